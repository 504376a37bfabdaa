// The messages of a conversation form a tree: a regenerated answer is a sibling of the old one, and so is an edited
// question. The page shows the path from the root to one leaf.
//
// A message has a rising `id`, and `parent`, the id of the previous message (null: it is the first).

/** Return the shown messages, in order. */
export function path(conversation) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const found = [];
  for (let at = byId.get(conversation.leaf); at; at = byId.get(at.parent)) found.push(at);
  return found.reverse();
}

/** Add a message below another one (null: as a first message), and show it. Returns it. */
export function add(conversation, parent, message) {
  const last = conversation.messages.at(-1)?.id ?? 0;
  const added = Object.assign(message, { id: last + 1, parent: parent?.id ?? null });
  conversation.messages.push(added);
  conversation.leaf = added.id;
  return added;
}

/** Return the siblings of a message, including itself, oldest first. */
export const versions = (conversation, message) => conversation.messages.filter((other) => other.parent === message.parent);

/** Show the path through a message and, below it, through the newest messages. */
export function show(conversation, message) {
  let leaf = message;
  for (let next = leaf; next; next = conversation.messages.findLast((other) => other.parent === leaf.id)) leaf = next;
  conversation.leaf = leaf.id;
}

/** Remove one message; its children take its place. */
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
