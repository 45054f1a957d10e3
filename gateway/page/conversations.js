// Conversations in localStorage, one item each, so that two tabs do not overwrite each other's.
//
// A conversation: { id, title, updated, messages }. A message: { role, content } and, for an assistant's,
// reasoning_content, note (how it ended), error (what went wrong) and isRunning while it is being written.

const PREFIX = "stratagate.chat.";
const TITLE_LENGTH = 60;

/** All that are kept, the latest first. */
export function list() {
  const found = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const key = localStorage.key(index);
    const conversation = key.startsWith(PREFIX) ? load(key.slice(PREFIX.length)) : null;
    if (conversation) found.push(conversation);
  }
  return found.sort((a, b) => b.updated - a.updated);
}

export function load(id) {
  try {
    const conversation = JSON.parse(localStorage.getItem(PREFIX + id));
    return Array.isArray(conversation?.messages) ? conversation : null;
  } catch {
    return null;
  }
}

/** A new one, not kept before its first message. */
export function create() {
  // randomUUID exists on https and on localhost only; a server in the next room has neither.
  const random = crypto.getRandomValues(new Uint32Array(3));
  return { id: Array.from(random, (part) => part.toString(36)).join(""), title: "", updated: 0, messages: [] };
}

/** Keep it. Returns false when the browser has no room or keeps nothing. */
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export function remove(id) {
  localStorage.removeItem(PREFIX + id);
}

export function titleFrom(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? line.slice(0, TITLE_LENGTH - 1) + "…" : line;
}

/** Calls back with the id when another tab changed one. */
export function onChange(callback) {
  addEventListener("storage", (event) => {
    if (event.key?.startsWith(PREFIX)) callback(event.key.slice(PREFIX.length));
  });
}
