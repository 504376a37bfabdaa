// The messages of a conversation are a tree: an answer that is generated again stands beside the one before, and so
// does a question that was edited. What is shown is the path from the root to one leaf.
//
// A message has `id`, which counts upwards, and `parent`, the id of the message before it (null: it is the first).

/** The messages that are shown, the first one first. */
export function path(conversation) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const found = [];
  for (let at = byId.get(conversation.leaf); at; at = byId.get(at.parent)) found.push(at);
  return found.reverse();
}

/** Adds a message below another one (null: as a first message), and shows it. Returns it. */
export function add(conversation, parent, message) {
  const last = conversation.messages.at(-1)?.id ?? 0;
  const added = Object.assign(message, { id: last + 1, parent: parent?.id ?? null });
  conversation.messages.push(added);
  conversation.leaf = added.id;
  return added;
}

/** The messages that stand in one place, a message itself among them, the oldest first. */
export const versions = (conversation, message) => conversation.messages.filter((other) => other.parent === message.parent);

/** Shows the path through a message: below it, the newest message each time. */
export function show(conversation, message) {
  let leaf = message;
  for (let next = leaf; next; next = conversation.messages.findLast((other) => other.parent === leaf.id)) leaf = next;
  conversation.leaf = leaf.id;
}

/** Removes one message; those below it stand in its place. */
export function remove(conversation, message) {
  const below = conversation.messages.filter((other) => other.parent === message.id);
  conversation.messages = conversation.messages.filter((other) => other !== message);
  for (const other of below) other.parent = message.parent;
  if (conversation.leaf !== message.id) return;
  const parent = conversation.messages.find((other) => other.id === message.parent);
  const beside = conversation.messages.findLast((other) => other.parent === message.parent);
  if (beside) show(conversation, beside);
  else conversation.leaf = parent?.id ?? null;
}
