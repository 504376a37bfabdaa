// The conversation as it is read: a list of turns, each with what can be done about it.

import { tokenHeat } from "./picture.js";
import { byId, copyFrom, h, icon, ICONS } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const LEAST_MS = 40; // between two renderings of an answer that grows; a slow one waits longer

export class Transcript {
  /** actions: edit(index, text), again(index), picture(index), each for the turn at the index. */
  constructor(actions) {
    this.actions = actions;
    this.list = byId("messages");
    this.box = byId("scroll");
    this.turns = [];
    this.atEnd = true;
    this.box.addEventListener("scroll", () => {
      this.atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 40;
    });
  }

  /** Shows the messages of a conversation. activities: message → its Activity, where there is one. */
  show(messages, activities, answerName) {
    this.list.replaceChildren();
    this.turns = messages.map((message, index) => {
      const turn = message.role === "user" ? this.question(message, index) : this.answer(index, answerName, message);
      turn.message = message;
      turn.activity = activities.get(message);
      if (turn.view) this.render(turn, false);
      return turn;
    });
    this.list.append(...this.turns.map((turn) => turn.element));
    this.toEnd(true);
  }

  button(name, label, act) {
    const button = h("button", { type: "button", class: "quiet act" }, icon(ICONS[name]), h("span", {}, label));
    button.addEventListener("click", () => act(button));
    return button;
  }

  question(message, index) {
    const text = h("div", { class: "said" }, message.content);
    const element = h(
      "li",
      { class: "turn question" },
      h("h2", { class: "who" }, "You"),
      text,
      h(
        "div",
        { class: "acts" },
        this.button("edit", "Edit", () => this.edit(index)),
        this.button("copy", "Copy", (button) => copyFrom(button, message.content)),
      ),
    );
    return { element, text };
  }

  answer(index, answerName, message) {
    const text = h("div", { class: "said markdown" });
    const thought = h("div", { class: "said thought" });
    const thinking = h("details", { class: "thinking", hidden: true }, h("summary", {}, "Its thoughts"), thought);
    const note = h("p", { class: "note" });
    const failed = h("p", { class: "failed", hidden: true });
    const thread = h("button", { type: "button", class: "thread", "aria-label": "Show the picture of this answer", hidden: true });
    thread.addEventListener("click", () => this.actions.picture(index));
    const acts = h(
      "div",
      { class: "acts" },
      this.button("again", "Again", () => this.actions.again(index)),
      this.button("copy", "Copy", (button) => copyFrom(button, message.content)),
      note,
    );
    const element = h(
      "li",
      { class: "turn answer" },
      h("h2", { class: "who" }, answerName || "Answer"),
      thread, thinking, text, failed, acts,
    );
    return { element, text, thought, thinking, note, failed, thread, acts, view: new MarkdownView(text), took: 0, drawn: 0 };
  }

  /** Shows the answer as far as it is; running: more is to come. */
  update(index, running, activity) {
    const turn = this.turns[index];
    turn.activity = activity;
    if (!running) {
      window.clearTimeout(turn.timer);
      turn.timer = 0;
      this.render(turn, false);
    } else if (!turn.timer) {
      // A long answer takes long to render: no more than a fifth of the time goes there.
      const wait = Math.max(LEAST_MS, 4 * turn.took) - (performance.now() - turn.drawn);
      turn.timer = window.setTimeout(() => {
        turn.timer = 0;
        this.render(turn, true);
      }, Math.max(wait, 0));
    }
  }

  render(turn, running) {
    const began = performance.now(), { message } = turn;
    turn.view.update(message.content);
    turn.thinking.hidden = !message.reasoning;
    if (message.reasoning) turn.thought.textContent = message.reasoning;
    turn.element.classList.toggle("running", running);
    turn.element.setAttribute("aria-busy", String(running));
    turn.element.classList.toggle("waiting", running && message.content === "");
    turn.acts.hidden = running;
    turn.note.textContent = message.note ?? "";
    turn.failed.hidden = !message.failed;
    turn.failed.textContent = message.failed ?? "";
    this.drawThread(turn);
    turn.drawn = performance.now();
    turn.took = turn.drawn - began;
    this.toEnd(false);
  }

  /** The line along an answer, from its first token to its last: hotter where more neurons fired. */
  drawThread(turn) {
    const n = turn.activity?.length ?? 0;
    turn.thread.hidden = n < 2;
    if (n < 2) return;
    const stops = Array.from({ length: Math.min(n, 40) }, (_, i) =>
      tokenHeat(turn.activity, Math.floor((i * (n - 1)) / Math.max(Math.min(n, 40) - 1, 1))),
    );
    turn.thread.style.setProperty("--thread", `linear-gradient(${stops.join(", ")})`);
  }

  /** The message becomes a text to write in; sent, it takes the place of itself and of all that follows. */
  edit(index) {
    const turn = this.turns[index], { message } = turn;
    if (this.actions.busy()) return;
    const area = h("textarea", { value: message.content, rows: Math.min(message.content.split("\n").length + 1, 12), "aria-label": "Edit your message" });
    const close = () => {
      form.replaceWith(turn.text);
      turn.element.classList.remove("edited");
      turn.element.querySelector(".act")?.focus();
    };
    const form = h(
      "form",
      { class: "edit" },
      area,
      h(
        "div",
        { class: "row end" },
        h("span", { class: "hint" }, "What follows it is answered anew."),
        h("button", { type: "button", class: "quiet", on: { click: close } }, "Cancel"),
        h("button", { type: "submit", class: "solid" }, "Send"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() !== "") this.actions.edit(index, area.value);
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    turn.text.replaceWith(form);
    turn.element.classList.add("edited");
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  /** Scrolls to the end, where the reader is there already. */
  toEnd(always) {
    if (always || this.atEnd) this.box.scrollTop = this.box.scrollHeight;
  }
}
