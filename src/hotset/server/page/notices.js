// Messages above the conversation.

import { byId, h } from "./dom.js";

/** Show a message until it is cleared or replaced by another one about the same subject. */
export function notice(about, message, mood = "alarm", ...actions) {
  const shown = find(about);
  if (shown?.firstChild.textContent === message && shown.classList.contains(mood)) return;
  const element = h(
    "div",
    { class: `notice ${mood}`, role: mood === "alarm" ? "alert" : "status", dataset: { about } },
    h("span", {}, message),
    actions,
    h("button", { type: "button", class: "quiet", "aria-label": "Dismiss", on: { click: () => element.remove() } }, "×"),
  );
  if (shown) shown.replaceWith(element);
  else byId("notices").append(element);
}

export function clearNotice(about) {
  find(about)?.remove();
}

/** Show a message with an undo button; the next message about the same subject replaces it. */
export function undoable(about, message, undo) {
  const button = h("button", { type: "button", class: "quiet" }, "Undo");
  button.addEventListener("click", () => {
    clearNotice(about);
    undo();
  });
  notice(about, message, "calm", button);
}

const find = (about) => document.querySelector(`.notice[data-about="${about}"]`);
