// A conversation is a tree: an edited or regenerated message stands beside the old one, and what followed stays there.

/** An id; `crypto.randomUUID` is missing on pages without TLS. */
const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("");

export function newConversation(settings) {
  return { id: newId(), title: "", updated: Date.now(), settings: structuredClone(settings), messages: [], leaf: null };
}

/** Put a message after `parent` (an id; null at the beginning), and show it. */
export function addMessage(conversation, parent, message) {
  const added = { id: newId(), parent, ...message };
  conversation.messages.push(added);
  conversation.leaf = added.id;
  conversation.updated = Date.now();
  if (!conversation.title && message.role === "user") {
    conversation.title = (message.content.trim() || message.images?.[0].name || "").slice(0, 80);
  }
  return added;
}

/** Take out a message that nothing follows, and show what stood before it. */
export function removeLeaf(conversation, message) {
  conversation.messages = conversation.messages.filter((other) => other !== message);
  conversation.leaf = message.parent;
}

/** The messages from the first to the one that is shown last. */
export function readPath(conversation, leaf = conversation.leaf) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const path = [];
  for (let id = leaf; id !== null; id = byId.get(id).parent) path.unshift(byId.get(id));
  return path;
}

/** A message and its other versions, oldest first. */
export function readVersions(conversation, message) {
  return conversation.messages.filter((other) => other.parent === message.parent);
}

/** Show a message and the newest of what follows it. */
export function showVersion(conversation, message) {
  let leaf = message;
  for (let next = message; next; next = conversation.messages.findLast((other) => other.parent === leaf.id)) leaf = next;
  conversation.leaf = leaf.id;
}

function toParts(images, text) {
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

/** The messages up to `leaf` as the API takes them. Reasoning is not sent back. */
export function toRequest(conversation, leaf) {
  const system = conversation.settings.system.trim();
  const messages = readPath(conversation, leaf).map(({ role, content, images, toolCalls, toolCallId }) => ({
    role,
    content: images ? toParts(images, content) : content || (toolCalls?.length ? null : ""),
    ...(toolCalls?.length && { tool_calls: toolCalls }),
    ...(toolCallId && { tool_call_id: toolCallId }),
  }));
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}
