// Conversations, kept in this browser: one entry of localStorage each, so that two tabs seldom write the same.

const PREFIX = "hotset.chat.";
const ROLES = new Set(["user", "assistant"]);
const MAX_TITLE = 60;

/** A new conversation; it is stored once it has a message. */
export function fresh() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", updated: Date.now(), messages: [] };
}

/** What a conversation is called: the beginning of its first message. */
export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user")?.content ?? "";
  const line = first.trim().split("\n")[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line || "New conversation";
}

/** All of them, the latest first. What is no conversation (another program's, an older page's) is passed over. */
export function all() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const key = localStorage.key(i);
    if (!key.startsWith(PREFIX)) continue;
    try {
      const conversation = checked(JSON.parse(localStorage.getItem(key)));
      if (conversation && PREFIX + conversation.id === key) found.push(conversation);
    } catch {
      // Not ours to read.
    }
  }
  return found.sort((a, b) => b.updated - a.updated);
}

/** Keeps a conversation. Returns whether there was room. */
export function save(conversation) {
  conversation.updated = Date.now();
  conversation.title = titleOf(conversation);
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export const remove = (conversation) => localStorage.removeItem(PREFIX + conversation.id);

/** Whether a change of localStorage, in another tab, is of a conversation. */
export const isOurs = (key) => key === null || key.startsWith(PREFIX);

/** The parts of a value that make a conversation; null where it is none. */
function checked(value) {
  if (typeof value !== "object" || value === null || !Array.isArray(value.messages)) return null;
  if (typeof value.id !== "string" || !/^[0-9a-f]{1,32}$/.test(value.id)) return null;
  const messages = [];
  for (const message of value.messages) {
    if (!ROLES.has(message?.role) || typeof message.content !== "string") return null;
    const kept = { role: message.role, content: message.content };
    if (typeof message.reasoning === "string") kept.reasoning = message.reasoning;
    if (typeof message.note === "string") kept.note = message.note;
    if (typeof message.failed === "string") kept.failed = message.failed;
    messages.push(kept);
  }
  const updated = Number.isFinite(value.updated) ? value.updated : 0;
  const conversation = { id: value.id, title: "", updated, messages };
  conversation.title = titleOf(conversation);
  return conversation;
}

/** Conversations of an exported file; throws a message where it is none. One that is here already, by
 * its id, is to be replaced. */
export function imported(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  const list = (Array.isArray(value?.conversations) ? value.conversations : []).map(checked);
  if (list.length === 0 || list.includes(null)) throw new Error("The file holds no conversations of this page.");
  return list;
}

export const exported = (conversations) =>
  JSON.stringify({ from: "hotset", version: 1, conversations }, null, 1);

/** A conversation as a text to read. */
export function asMarkdown(conversation) {
  const parts = conversation.messages.map(
    (message) => `**${message.role === "user" ? "You" : "Answer"}**\n\n${message.content}\n`,
  );
  return `# ${titleOf(conversation)}\n\n${parts.join("\n---\n\n")}`;
}
