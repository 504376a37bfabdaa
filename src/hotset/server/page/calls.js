// Shows the tool calls of an answer: the requested tool, its arguments, the user's decision and the result. Arguments
// and results are untrusted text: they become text nodes, and invisible characters are escaped, so that the user sees
// everything that is allowed.

import { h } from "./dom.js";
import { isSettled, LONGEST_RESULT, parsed } from "./tools.js";
import { counted } from "./units.js";

// Control, direction and other invisible characters, except joiners within words and emoji.
const JOINER = "(?<=[\\p{L}\\p{M}\\p{Emoji}\\ufe0f])[\\u200c\\u200d](?=[\\p{L}\\p{Emoji}])|(?<=\\p{Emoji})\\ufe0f";
const UNSEEN = new RegExp(`(?!${JOINER}|[\\n\\t])[\\p{Cc}\\p{Cf}\\p{Zl}\\p{Zp}\\p{Cs}\\p{Co}\\p{DI}]`, "gu");
export const written = (text) => text.replace(UNSEEN, (letter) => `\\u{${letter.codePointAt(0).toString(16)}}`);

const SAID = { once: "allowed once", always: "allowed in this conversation", typed: "result typed by you" };

/** Show the parameters of a tool or function. */
export const schemaOf = ({ name, parameters }) =>
  h("pre", { tabIndex: 0, role: "region", "aria-label": `Schema of ${name}` }, written(JSON.stringify(parameters, null, 2)));

/** The calls of one message. actions: allow(message, call, always), deny(message, call), type(message, call, text),
 * toolOf(call). */
export class CallsView {
  constructor(message, actions) {
    Object.assign(this, { message, actions });
    this.element = h("ol", { class: "calls", "aria-label": "Tools that the model calls", hidden: true });
    this.cards = [];
  }

  /** running: the answer still grows. active: the user may decide. */
  update(running, active) {
    const calls = this.message.calls ?? [];
    this.element.hidden = calls.length === 0;
    for (const [i, call] of calls.entries()) {
      if (running && this.cards[i]?.grow) this.cards[i].grow();
      else this.place(i, running ? this.growing(call) : this.card(call, active));
    }
    while (this.cards.length > calls.length) this.cards.pop().element.remove();
  }

  place(i, card) {
    if (this.cards[i]) this.cards[i].element.replaceWith(card.element);
    else this.element.append(card.element);
    this.cards[i] = card;
  }

  /** Show a call whose arguments are being generated, adding each piece as it arrives. */
  growing(call) {
    const name = h("b"), text = document.createTextNode("");
    let taken = 0;
    const grow = () => {
      name.textContent = written(call.name);
      text.appendData(written(call.arguments.slice(taken)));
      taken = call.arguments.length;
    };
    grow();
    return { grow, element: h("li", { class: "call" }, h("p", { class: "what" }, name), h("pre", {}, text)) };
  }

  card(call, active) {
    const given = parsed(call);
    const shown = written(given === null ? call.arguments : JSON.stringify(given, null, 2));
    const label = `Arguments of ${call.name}`;
    const element = h(
      "li",
      { class: `call ${call.state} ${call.error ? "faulty" : ""}`, tabIndex: -1 },
      h(
        "p",
        { class: "what" },
        h("b", {}, written(call.name)),
        h("small", {}, written(call.typed ? "your function" : call.server ? `MCP server ${call.server}` : "")),
        h("span", { class: "state" }, stateOf(call, active)),
      ),
      shown === "{}" ? h("p", { class: "none" }, "No arguments") : h("pre", { tabIndex: 0, role: "region", "aria-label": label }, shown),
      call.problem ? h("p", { class: "problem" }, written(call.problem)) : null,
      active && call.state === "asked" ? about(this.actions.toolOf(call)) : null,
      active && call.state === "asked" ? this.consent(call) : null,
      call.state === "done" ? result(call) : null,
    );
    return { element };
  }

  consent(call) {
    const { message, actions } = this;
    // Ignore the second click of a double click: the first one has moved another button under the pointer.
    const once = (act) => (event) => event.detail > 1 || act();
    const button = (name, kind, act) => h("button", { type: "button", class: kind, "aria-label": `${name}: ${call.name}`, on: { click: once(act) } }, name);
    const deny = button("Deny", "quiet", () => actions.deny(message, call));
    if (!call.typed) {
      return h(
        "div",
        { class: "consent" },
        button("Allow once", "solid", () => actions.allow(message, call, false)),
        button("Always in this conversation", "quiet", () => actions.allow(message, call, true)),
        deny,
      );
    }
    const area = h("textarea", { rows: 3, maxLength: LONGEST_RESULT, "aria-label": `Result of ${call.name}`, placeholder: "The result of the function" });
    const form = h("form", { class: "consent" }, area, h("button", { type: "submit", class: "solid" }, "Send this result"), deny);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      actions.type(message, call, area.value);
    });
    return form;
  }
}

/** Describe a tool that the user is asked to allow. */
function about(tool) {
  if (tool === undefined) return null;
  if (tool === null) return h("p", { class: "problem" }, "This tool has changed, or the server does not have it any more.");
  const description = written(tool.description) || "It has no description.";
  return h("details", { class: "about" }, h("summary", {}, "About this tool"), h("p", {}, description), schemaOf(tool));
}

function stateOf(call, active) {
  if (call.state === "asked") return active ? "waiting for you" : "not called";
  if (call.state === "running") return "running";
  if (call.state === "denied") return "denied";
  return [SAID[call.consent] ?? "", call.error ? "failed" : ""].filter(Boolean).join(", ");
}

function result(call) {
  const text = written(call.result);
  const pre = h("pre", { tabIndex: 0, role: "region", "aria-label": `Result of ${call.name}` }, text);
  const title = `${call.error ? "Error" : "Result"}, ${counted(call.result.length, "character")}`;
  return h("details", { class: "result", open: text.length < 400 }, h("summary", {}, title), pre);
}

/** Whether all calls of a message are finished. */
export const areSettled = (message) => (message.calls ?? []).every(isSettled);
