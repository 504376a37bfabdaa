// Stores conversations in this browser, each in its own entry of localStorage, so that two tabs seldom write the same
// one.

import { fenced } from "./attachments.js";
import { folderName } from "./folders.js";
import { isImageUrl } from "./images.js";
import { checkedSettings } from "./settings.js";
import { checkedCalls, checkedTools, distrustCalls } from "./tools.js";
import { path } from "./tree.js";

const PREFIX = "hotset.chat.", OPEN = "hotset.open";
const ROLES = new Set(["user", "assistant"]);
const MAX_TITLE = 60;
const MAX_OWN_TITLE = 200; // characters of a title that the user typed

/** Return a new conversation, which is stored after its first message. settings: its own; null: the common ones.
 * model: the name that the user chose for it. tools: those that the model may call (tools.js). first: the first
 * message of requests after the context was full (context.js). */
export function fresh() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", titled: false, pinned: false, folder: null, updated: Date.now(), model: null, settings: null, tools: null, messages: [], leaf: null, first: null };
}

/** Return a conversation's title: the user's, or the beginning of its first message. */
export function titleOf(conversation) {
  if (conversation.titled) return conversation.title;
  const first = conversation.messages.find((message) => message.role === "user");
  const line = (first?.content.trim() || first?.files?.[0]?.name || "").split("\n")[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line || "New conversation";
}

/** Set a conversation's title; an empty one means the beginning of its first message. */
export function rename(conversation, title) {
  conversation.title = title.trim().slice(0, MAX_OWN_TITLE);
  conversation.titled = conversation.title !== "";
  conversation.title = titleOf(conversation);
}

/** Return all conversations, pinned ones first, then the latest. Entries that are not valid conversations (another
 * program's, an older page's) are skipped. */
export function all() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const key = localStorage.key(i);
    if (!key.startsWith(PREFIX)) continue;
    try {
      const conversation = checked(JSON.parse(localStorage.getItem(key)));
      if (conversation && PREFIX + conversation.id === key) found.push(conversation);
    } catch {
      // Not a conversation.
    }
  }
  return found.sort((a, b) => b.pinned - a.pinned || b.updated - a.updated);
}

/** Store a conversation. touched: it is the latest now. Returns false if the storage is full. */
export function save(conversation, touched = true) {
  if (touched) conversation.updated = Date.now();
  conversation.title = titleOf(conversation);
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

/** Remember the tab's open conversation, so that a reload opens it again. */
export function remember(conversation) {
  try {
    sessionStorage.setItem(OPEN, conversation.id);
  } catch {
    // A reload then begins with a new one.
  }
}

export function remembered() {
  try {
    const id = sessionStorage.getItem(OPEN);
    return all().find((one) => one.id === id) ?? null;
  } catch {
    return null;
  }
}

export const remove = (conversation) => localStorage.removeItem(PREFIX + conversation.id);

/** Whether a change of localStorage in another tab concerns a conversation. */
export const isOurs = (key) => key === null || key.startsWith(PREFIX);

/** Return the valid parts of a stored conversation; null if it is not one. */
function checked(value) {
  if (typeof value !== "object" || value === null || !Array.isArray(value.messages)) return null;
  if (typeof value.id !== "string" || !/^[0-9a-f]{1,32}$/.test(value.id)) return null;
  const messages = checkedMessages(value.messages);
  if (messages === null) return null;
  const leaf = messages.find((message) => message.id === value.leaf) ?? messages.at(-1);
  const titled = value.titled === true && typeof value.title === "string" && value.title.trim() !== "";
  const conversation = {
    id: value.id,
    title: titled ? value.title.trim().slice(0, MAX_OWN_TITLE) : "",
    titled,
    pinned: value.pinned === true,
    folder: folderName(value.folder),
    updated: Number.isFinite(value.updated) ? value.updated : 0,
    model: typeof value.model === "string" ? value.model : null,
    settings: typeof value.settings === "object" && value.settings !== null ? checkedSettings(value.settings) : null,
    tools: checkedTools(value.tools),
    messages,
    leaf: leaf?.id ?? null,
    first: Number.isSafeInteger(value.first) ? value.first : null,
  };
  conversation.title = titleOf(conversation);
  return conversation;
}

/** Return the messages of a stored list; null if one is invalid. Ids rise and parents precede children, which
 * excludes cycles. Lists of older pages have no ids: each message follows the previous one. */
function checkedMessages(list) {
  const messages = [], ids = new Set();
  for (const [i, value] of list.entries()) {
    if (!ROLES.has(value?.role) || typeof value.content !== "string") return null;
    const before = messages.at(-1)?.id ?? 0;
    const id = value.id ?? i + 1, parent = value.id === undefined ? (before || null) : value.parent;
    if (!Number.isSafeInteger(id) || id <= before || !(parent === null || ids.has(parent))) return null;
    ids.add(id);
    messages.push({ id, parent, ...checkedMessage(value) });
  }
  return messages;
}

function checkedMessage(value) {
  const kept = { role: value.role, content: value.content };
  for (const name of ["reasoning", "note", "failed", "model"]) if (typeof value[name] === "string") kept[name] = value[name];
  for (const name of ["pair", "tokens"]) if (Number.isSafeInteger(value[name]) && value[name] >= 0) kept[name] = value[name];
  const calls = value.role === "assistant" ? checkedCalls(value.calls) : null;
  if (calls) kept.calls = calls;
  if (Array.isArray(value.files)) {
    const isFile = (file) => typeof file?.name === "string" && (typeof file.text === "string" || isImageUrl(file.image));
    kept.files = value.files.filter(isFile).map(({ name, text, image }) => (typeof text === "string" ? { name, text } : { name, image }));
  }
  return kept;
}

/** Return the conversations and all folder names of an exported file, folders with conversations first. Throws a
 * message if the file is not valid. A conversation with the id of a stored one replaces it. */
export function imported(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  const list = (Array.isArray(value?.conversations) ? value.conversations : []).map(checked);
  if (list.length === 0 || list.includes(null)) throw new Error("The file holds no conversations of this page.");
  // Tools that the author of the file allowed or turned on are not allowed by this user.
  for (const { tools, messages } of list) {
    if (tools) Object.assign(tools, { on: [], allowed: [] });
    for (const { calls } of messages) if (calls) distrustCalls(calls);
  }
  const folders = Array.isArray(value.folders) ? value.folders.map(folderName) : [];
  return { list, folders: [...list.map((one) => one.folder), ...folders].filter((name) => name !== null) };
}

export const exported = (conversations, folders) =>
  JSON.stringify({ from: "hotset", version: 2, folders, conversations }, null, 1);

/** Return the visible part of a conversation as Markdown. */
export function asMarkdown(conversation) {
  const parts = path(conversation).map((message) => {
    const files = (message.files ?? []).map((file) => `*Attached: ${file.name}*\n\n`).join("");
    const calls = (message.calls ?? []).map((call) => `\n\n${callAsMarkdown(call)}`).join("");
    return `**${message.role === "user" ? "You" : "Answer"}**\n\n${files}${message.content}${calls}\n`;
  });
  return `# ${titleOf(conversation)}\n\n${parts.join("\n---\n\n")}`;
}

function callAsMarkdown(call) {
  const became = call.state === "done" ? (call.error ? "Failed" : "Result") : call.state === "denied" ? "Denied" : "Not called";
  const blocks = [`*Calls ${call.name}*`, fenced(call.arguments || "{}"), `*${became}*`, ...(call.state === "done" ? [fenced(call.result)] : [])];
  return blocks.join("\n\n");
}
