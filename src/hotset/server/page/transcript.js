// The visible conversation: a list of turns, each with its actions.

import { fileList } from "./attachments.js";
import { areSettled, CallsView } from "./calls.js";
import { begins } from "./context.js";
import { byId, copyFrom, h, icon, ICONS } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { tokenHeat } from "./picture.js";
import { path, versions } from "./tree.js";

const LEAST_MS = 40; // between two renderings of a growing answer; longer if rendering is slow
const THREAD_STOPS = 40;

export class Transcript {
  /** actions, each with a message: edit(message, text), again, goOn, remove, show (another version), picture,
   * isLeaf; also busy(), and CallsView's actions. */
  constructor(actions) {
    this.actions = actions;
    this.list = byId("messages");
    this.box = byId("scroll");
    this.turns = new Map(); // message → its elements
    this.atEnd = true;
    this.box.addEventListener("scroll", () => {
      this.atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 40;
    });
    // Parts of an answer get their true height only when they become visible.
    this.resized = new ResizeObserver(() => this.toEnd(false));
  }

  /** Show a conversation. activities: message → its Activity, if any. toEnd: scroll to its end. */
  show(conversation, activities, answerName, toEnd = true) {
    for (const turn of this.turns.values()) window.clearTimeout(turn.timer);
    this.turns.clear();
    this.resized.disconnect();
    const shown = path(conversation), last = shown.at(-1), first = begins(conversation, shown);
    const items = shown.map((message) => {
      const all = versions(conversation, message);
      const pair = message.pair === undefined ? [message] : all.filter((other) => other.pair === message.pair);
      const turns = pair.map((each) => {
        const isChosen = each === message;
        const turn = each.role === "user" ? this.question(each) : this.answer(each, answerName, isChosen && each === last);
        // Two answers side by side share their versions.
        if (isChosen && all.length > pair.length) turn.acts.prepend(this.versions(all, message));
        if (pair.length > 1) this.choice(turn, isChosen);
        turn.message = each;
        turn.activity = activities.get(each);
        this.turns.set(each, turn);
        if (turn.view) {
          this.render(turn, false);
          this.resized.observe(turn.text);
        }
        return turn;
      });
      const isPast = shown.indexOf(message) < first;
      const line = first > 0 && message === shown[first] ? h("p", { class: "dropped" }, "The context is full: messages above are left out of the prompt") : null;
      return h("li", { class: [pair.length > 1 && "versus", isPast && "past"].filter(Boolean).join(" ") }, line, turns.map((turn) => turn.element));
    });
    this.list.replaceChildren(...items);
    this.toEnd(toEnd);
  }

  button(name, label, act) {
    const button = h("button", { type: "button", class: "quiet act" }, icon(ICONS[name]), h("span", {}, label));
    button.addEventListener("click", () => act(button));
    return button;
  }

  /** Return a message's icon button. */
  small(name, label, act, more = {}) {
    const button = h("button", { type: "button", class: "quiet act", "aria-label": label, title: label, ...more }, icon(ICONS[name]));
    button.addEventListener("click", act);
    return button;
  }

  /** Return the buttons for the other versions of a message. */
  versions(all, message) {
    const at = all.indexOf(message);
    const to = (i, name, label) =>
      this.small(name, label, () => {
        if (this.actions.busy()) return;
        this.actions.show(all[i]);
        const turn = this.turns.get(all[i]);
        const there = turn?.acts.querySelectorAll(".versions button:not(:disabled)");
        (turn?.acts.querySelector(`[aria-label="${label}"]:not(:disabled)`) ?? there?.[0])?.focus();
      }, { disabled: i < 0 || i >= all.length });
    return h(
      "span",
      { class: "versions", role: "group", "aria-label": "Versions of this message" },
      to(at - 1, "back", "Previous version"),
      h("span", {}, `${at + 1} / ${all.length}`),
      to(at + 1, "forth", "Next version"),
    );
  }

  /** Return the choice between two answers side by side: the conversation continues after one of them. */
  choice(turn, isChosen) {
    turn.element.classList.toggle("chosen", isChosen);
    const message = () => turn.message;
    turn.acts.prepend(
      isChosen
        ? h("span", { class: "act kept" }, "The conversation continues here")
        : this.button("again", "Continue with this", () => this.actions.busy() || this.actions.show(message())),
    );
  }

  question(message) {
    const text = h("div", { class: "said" }, message.content);
    const acts = h(
      "div",
      { class: "acts" },
      this.button("edit", "Edit", () => this.edit(message)),
      this.button("copy", "Copy", (button) => copyFrom(button, message.content)),
      this.small("remove", "Delete your message", () => this.actions.remove(message)),
    );
    const element = h(
      "div",
      { class: "turn question" },
      h("h2", { class: "who" }, "You"),
      message.files?.length ? fileList(message.files) : null,
      text,
      acts,
    );
    return { element, text, acts };
  }

  answer(message, answerName, isLast) {
    const text = h("div", { class: "said markdown" });
    const thought = h("div", { class: "said thought" }, document.createTextNode(""));
    const thinking = h("details", { class: "thinking", hidden: true }, h("summary", {}, "Reasoning"), thought);
    const calls = new CallsView(message, this.actions);
    const note = h("p", { class: "note" });
    const failed = h("p", { class: "failed", hidden: true });
    const thread = h("button", { type: "button", class: "thread", "aria-label": "Show the activity of this answer", hidden: true });
    thread.addEventListener("click", () => this.actions.picture(message));
    const goOn = isLast ? this.button("forth", "Continue", () => this.actions.goOn(message)) : null;
    const acts = h(
      "div",
      { class: "acts" },
      this.button("again", "Regenerate", () => this.actions.again(message)),
      goOn,
      this.button("copy", "Copy", (button) => copyFrom(button, message.content)),
      this.small("edit", "Edit this answer", () => this.edit(message)),
      this.small("remove", "Delete this answer", () => this.actions.remove(message)),
      note,
    );
    const element = h(
      "div",
      { class: "turn answer" },
      h("h2", { class: "who" }, message.model || answerName || "Answer"),
      thread, thinking, text, calls.element, failed, acts,
    );
    return { element, text, calls, thought, thinking, note, failed, thread, acts, goOn, view: new MarkdownView(text), took: 0, drawn: 0 };
  }

  /** Show the answer so far. running: it still grows. */
  update(message, running, activity) {
    const turn = this.turns.get(message);
    if (!turn) return;
    turn.activity = activity;
    if (!running) {
      window.clearTimeout(turn.timer);
      turn.timer = 0;
      this.render(turn, false);
    } else if (!turn.timer) {
      // Rendering a long answer is slow: use at most a fifth of the time for it.
      const wait = Math.max(LEAST_MS, 4 * turn.took) - (performance.now() - turn.drawn);
      turn.timer = window.setTimeout(() => {
        turn.timer = 0;
        this.render(turn, true);
      }, Math.max(wait, 0));
    }
  }

  /** Focus the next call that waits for the user, but not a button: Enter must not allow a call unread. Returns
   * false if no call waits. */
  focusCall(message) {
    const next = this.turns.get(message)?.element.querySelector(".call:has(.consent)");
    if (document.activeElement !== document.body && document.activeElement !== byId("stop")) return true;
    next?.focus();
    return Boolean(next);
  }

  render(turn, running) {
    const began = performance.now(), { message } = turn;
    turn.view.update(message.content, !running);
    turn.thinking.hidden = !message.reasoning;
    if (message.reasoning) turn.thought.firstChild.appendData(message.reasoning.slice(turn.thought.firstChild.length));
    turn.element.classList.toggle("running", running);
    turn.element.setAttribute("aria-busy", String(running));
    turn.element.classList.toggle("waiting", running && message.content === "" && !message.calls);
    turn.acts.hidden = running;
    turn.calls.update(running, this.actions.isLeaf(message));
    if (turn.goOn) turn.goOn.hidden = message.calls ? !areSettled(message) : message.content === "";
    turn.note.textContent = message.note ?? "";
    turn.failed.hidden = !message.failed;
    turn.failed.textContent = message.failed ?? "";
    this.drawThread(turn);
    turn.drawn = performance.now();
    turn.took = turn.drawn - began;
    this.toEnd(false);
  }

  /** Draw the line along an answer, from its first token to its last: hotter where more neurons fired. */
  drawThread(turn) {
    const n = turn.activity?.length ?? 0;
    turn.thread.hidden = n < 2;
    if (n < 2) return;
    const stops = Array.from({ length: Math.min(n, THREAD_STOPS) }, (_, i) =>
      tokenHeat(turn.activity, Math.floor((i * (n - 1)) / Math.max(Math.min(n, THREAD_STOPS) - 1, 1))),
    );
    turn.thread.style.setProperty("--thread", `linear-gradient(${stops.join(", ")})`);
  }

  /** Turn a message into a text field. An edited question is sent again as a sibling of the old one. An answer takes the
   * new text, and later messages stay. */
  edit(message) {
    const turn = this.turns.get(message);
    if (this.actions.busy() || turn.element.classList.contains("edited")) return;
    const asks = message.role === "user";
    const area = h("textarea", {
      value: message.content,
      rows: Math.min(message.content.split("\n").length + 1, 12),
      "aria-label": asks ? "Edit your message" : "Edit the answer",
    });
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
        h("span", { class: "hint" }, asks ? "You get a new answer; this version is kept." : "The model takes it as its own answer."),
        h("button", { type: "button", class: "quiet", on: { click: close } }, "Cancel"),
        h("button", { type: "submit", class: "solid" }, asks ? "Send" : "Save"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() !== "") this.actions.edit(message, area.value);
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && asks) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    turn.text.replaceWith(form);
    turn.element.classList.add("edited");
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  /** Scroll to the end if the user is already there. */
  toEnd(always) {
    if (always || this.atEnd) this.box.scrollTop = this.box.scrollHeight;
  }
}
