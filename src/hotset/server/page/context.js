// The context: how full it is, and which of the oldest turns are not sent any more.

import { byId } from "./dom.js";
import { notice } from "./notices.js";
import { path } from "./tree.js";
import { count } from "./units.js";

const LEAST_ROOM = 1 / 8; // of the context, for an answer: with less the oldest turns are dropped, as in the terminal's chat
const FREED = 1 / 4; // of the context is free afterwards: the server's prompt cache helps until it is full

/** Where the messages begin that are sent: the index of a question. `conversation.first` names it once turns were dropped. */
export function begins(conversation, messages) {
  return Math.max(messages.findIndex((message) => message.id === conversation.first), 0);
}

/** Drops the oldest turns where the context has too little room for an answer to `messages`, and returns those that are
 * sent. size: tokens of the context, null: not known. count(messages): their tokens, as a promise. */
export async function fitted(conversation, messages, size, maxTokens, countTokens) {
  const start = begins(conversation, messages), sent = messages.slice(start);
  const later = [...sent.keys()].filter((i) => i > 0 && sent[i].role === "user");
  if (size === null || later.length === 0) return sent;
  const room = Math.min(maxTokens ?? size, Math.floor(size * LEAST_ROOM));
  if (mostTokens(sent) + room <= size || (await countTokens(sent)) + room <= size) return sent;
  let low = 0, high = later.length - 1; // the last turn stays, whatever its size
  while (low < high) {
    const middle = Math.floor((low + high) / 2);
    if ((await countTokens(sent.slice(later[middle]))) <= size * (1 - FREED)) high = middle;
    else low = middle + 1;
  }
  const kept = sent.slice(later[low]);
  conversation.first = kept[0].id;
  const n = later[low];
  notice(
    "context",
    `The context of ${count(size)} tokens is full. ${n === 1 ? "The oldest message is" : `The oldest ${n} messages are`} not sent any more; they stay here.`,
    "calm",
  );
  return kept;
}

/** An upper bound of the tokens: the server's latest count, and the bytes of later messages. */
function mostTokens(messages) {
  const last = messages.findLastIndex((message) => message.tokens !== undefined);
  if (last < 0) return Infinity;
  const bytes = (message) => new TextEncoder().encode(JSON.stringify(message)).length;
  return messages.slice(last + 1).reduce((sum, message) => sum + bytes(message), messages[last].tokens);
}

/** Shows how full the context was with the last answer. */
export function showMeter(conversation, size) {
  const used = path(conversation).findLast((message) => message.tokens !== undefined)?.tokens;
  byId("context").hidden = used === undefined || size === null;
  if (byId("context").hidden) return;
  byId("context-bar").max = size;
  byId("context-bar").value = Math.min(used, size);
  byId("context-text").textContent = `Context: ${count(used)} of ${count(size)} tokens`;
}

