// A conversation is a tree of messages: editing a question or asking again adds a branch beside the one
// that was there. `leaf` is the last message of the branch that is shown. Nothing here touches the page.

let last = 0;

/** Return an id that no other message or conversation of this browser has. */
export function newId() {
  last = Math.max(last + 1, Date.now() * 1000);
  return last.toString(36) + Math.floor(Math.random() * 36 ** 4).toString(36);
}

export function createConversation(now = Date.now()) {
  return { id: newId(), title: "", created: now, updated: now, messages: [], leaf: null };
}

/** Add a message behind `parent` (null: the beginning), show its branch, and return it. */
export function addMessage(conversation, parent, message) {
  const added = { id: newId(), parent, ...message };
  conversation.messages.push(added);
  conversation.leaf = added.id;
  conversation.updated = Date.now();
  return added;
}

const find = (conversation, id) => conversation.messages.find(message => message.id === id);

/** Return the messages from the beginning to `leaf`. */
export function pathTo(conversation, leaf = conversation.leaf) {
  const path = [];
  for (let message = find(conversation, leaf); message; message = find(conversation, message.parent)) {
    path.unshift(message);
    if (path.length > conversation.messages.length) throw new Error("the messages of a conversation form a circle");
  }
  return path;
}

/** Return the ids of the messages at the same place, and the place of this one among them. */
export function branches(conversation, message) {
  const ids = conversation.messages.filter(one => one.parent === message.parent).map(one => one.id);
  return { ids, index: ids.indexOf(message.id) };
}

/** Show the branch of this message, down to its newest answer. */
export function showBranch(conversation, id) {
  let leaf = id;
  for (;;) {
    const next = conversation.messages.filter(message => message.parent === leaf).at(-1);
    if (!next) break;
    leaf = next.id;
  }
  conversation.leaf = leaf;
}

/** Remove a message, and those behind it. */
export function removeMessage(conversation, id) {
  const parent = find(conversation, id).parent;
  const gone = new Set([id]);
  for (const message of conversation.messages) if (gone.has(message.parent)) gone.add(message.id);
  conversation.messages = conversation.messages.filter(message => !gone.has(message.id));
  if (gone.has(conversation.leaf)) {
    conversation.leaf = parent;
    if (parent) showBranch(conversation, parent);
  }
}

/** Return a new conversation with the messages up to this one. */
export function fork(conversation, id) {
  const copy = createConversation();
  copy.title = `${titleOf(conversation)} (branch)`;
  let parent = null;
  for (const { id: old, parent: before, ...message } of pathTo(conversation, id)) {
    parent = addMessage(copy, parent, structuredClone(message)).id;
  }
  return copy;
}

/** Return the title that was given, or the beginning of the first question. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const question = conversation.messages.find(message => message.role === "user");
  const line = question ? question.content.trim().split("\n")[0] : "";
  return line.length > 48 ? `${line.slice(0, 47)}…` : line || "New conversation";
}

/** Return whether every word occurs in the title or a message. */
export function matches(conversation, words) {
  const text = [titleOf(conversation), ...conversation.messages.map(message => message.content)].join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).filter(Boolean).every(word => text.includes(word));
}

/** Return a conversation with the fields of this version alone. Throws for anything else. */
export function readConversation(value) {
  if (typeof value !== "object" || value === null || !Array.isArray(value.messages)) {
    throw new Error("not a conversation: it has no list of messages");
  }
  const messages = value.messages.map(message => {
    if (!["user", "assistant"].includes(message.role) || typeof message.content !== "string") {
      throw new Error("a message needs a role, user or assistant, and a text");
    }
    const kept = { id: String(message.id), parent: message.parent ? String(message.parent) : null };
    const { role, content, thought, model, stats, tokens, failure, calls } = message;
    return Object.fromEntries(
      Object.entries({ ...kept, role, content, thought, model, stats, tokens, failure, calls }).filter(([, one]) => one !== undefined));
  });
  const known = { id: String(value.id || newId()), title: String(value.title || ""), created: Number(value.created) || Date.now() };
  const found = { ...known, updated: Number(value.updated) || known.created, messages, leaf: value.leaf ? String(value.leaf) : null };
  pathTo(found);
  if (messages.length && !find(found, found.leaf)) found.leaf = messages.at(-1).id;
  return found;
}
