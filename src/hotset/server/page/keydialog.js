// The dialog that asks for an API key.

import { byId, h } from "./dom.js";
import { notice } from "./notices.js";
import * as server from "./server.js";

const QUESTION = "Enter one of the API keys of this server.";

let next = null; // called with a new key

/** problem: with the previous key; "" without one. then: called with a new key. */
export function askForKey(problem, then) {
  next = then;
  byId("key-text").textContent = problem || QUESTION;
  byId("key-text").classList.toggle("problem", problem !== "");
  byId("key-input").value = "";
  if (!byId("key").open) byId("key").showModal();
  byId("key-input").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  server.useKey(byId("key-input").value.trim(), byId("key-keep").checked);
  byId("key").close("used");
  next?.();
});
byId("key-cancel").addEventListener("click", () => byId("key").close("cancelled"));
byId("key").addEventListener("close", () => {
  if (byId("key").returnValue === "used") return;
  const enter = h("button", { type: "button", class: "quiet", on: { click: () => askForKey("", next) } }, "Enter a key");
  notice("server", "Without a key this server does not answer.", "alarm", enter);
});
