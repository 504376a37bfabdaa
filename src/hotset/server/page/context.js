// The context: how full it is, and which of the oldest turns the server leaves out.

import { byId } from "./dom.js";
import { clearNotice, notice } from "./notices.js";
import { path } from "./tree.js";
import { count, counted } from "./units.js";

/** Return the index of the first message that the model reads. `conversation.first` is its id once turns were left
 * out. */
export function begins(conversation, messages) {
  return Math.max(messages.findIndex((message) => message.id === conversation.first), 0);
}

/** Record that the server left out the oldest n turns of `messages` (docs/guides/serve.md). size: tokens of the context;
 * null: unknown. Returns whether the number has changed. */
export function leftOut(conversation, messages, n, size) {
  const question = messages.findLastIndex((message) => message.role === "user"); // the model always reads it
  const turns = [...messages.keys()].filter((i) => messages[i].role === "user" || i > question);
  const start = n ? Math.min(turns[n] ?? question, question) : 0, before = conversation.first ?? null;
  conversation.first = start > 0 ? messages[start].id : null;
  if (start === 0) clearNotice("context");
  if (conversation.first === before) return false;
  if (start > 0) {
    const full = size === null ? "The context is full." : `The context of ${counted(size, "token")} is full.`;
    const which = start === 1 ? "The oldest message is" : `The oldest ${start} messages are`;
    notice("context", `${full} ${which} left out of the prompt; they stay here.`, "calm");
  }
  return true;
}

/** Show how full the context was in the last answer. */
export function showMeter(conversation, size) {
  const used = path(conversation).findLast((message) => message.tokens !== undefined)?.tokens;
  byId("context").hidden = used === undefined || size === null;
  if (byId("context").hidden) return;
  byId("context-bar").max = size;
  byId("context-bar").value = Math.min(used, size);
  byId("context-text").textContent = `Context: ${count(used)} of ${counted(size, "token")}`;
}
