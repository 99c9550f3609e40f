// What the browser keeps: conversations and settings. Nothing of it is sent to the server.

import { matches, newId, readConversation } from "./conversation.js";

const PREFIX = "slipstream.";
const CONVERSATION = `${PREFIX}conversation.`;
const FORMAT = "slipstream-conversations";

/** Storage that ends with the page. */
export class MemoryStorage {
  constructor() {
    this.items = new Map();
  }

  get length() { return this.items.size; }
  key(at) { return [...this.items.keys()][at]; }
  getItem(key) { return this.items.has(key) ? this.items.get(key) : null; }
  setItem(key, value) { this.items.set(key, value); }
  removeItem(key) { this.items.delete(key); }
}

/** Return the browser's storage, or one that ends with the page where the browser allows none. */
export function openStorage() {
  try {
    return localStorage;
  } catch {
    return new MemoryStorage();
  }
}

export class Store {
  /** `storage`: an object with the methods of localStorage. */
  constructor(storage) {
    this.storage = storage;
  }

  /** Return a value that was kept, or the given one. */
  get(name, otherwise) {
    try {
      const text = this.storage.getItem(PREFIX + name);
      return text === null ? otherwise : JSON.parse(text);
    } catch {  // storage that is switched off, or a text of another program
      return otherwise;
    }
  }

  /** Keep a value; null removes it. Return whether there was room for it. */
  set(name, value) {
    try {
      if (value === null) this.storage.removeItem(PREFIX + name);
      else this.storage.setItem(PREFIX + name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }

  save(conversation) {
    return this.set(`conversation.${conversation.id}`, conversation);
  }

  load(id) {
    const value = this.get(`conversation.${id}`, null);
    return value === null ? null : readConversation(value);
  }

  remove(id) {
    this.set(`conversation.${id}`, null);
  }

  /** Return the conversations with these words, the latest first. */
  list(words = "") {
    const found = [];
    for (let at = 0; at < this.storage.length; at += 1) {
      const key = this.storage.key(at);
      if (!key.startsWith(CONVERSATION)) continue;
      try {
        const conversation = this.load(key.slice(CONVERSATION.length));
        if (conversation && matches(conversation, words)) found.push(conversation);
      } catch (problem) {
        console.warn(`${key} cannot be read: ${problem.message}`);
      }
    }
    return found.sort((one, other) => other.updated - one.updated);
  }

  /** Return all conversations, or the given ones, as the text of a file. */
  exportText(conversations = this.list()) {
    return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
  }

  /** Keep the conversations of a file. Return how many there were; throw if it is another file. */
  importText(text) {
    let file;
    try {
      file = JSON.parse(text);
    } catch {
      throw new Error("the file is not JSON");
    }
    if (!file || file.format !== FORMAT || !Array.isArray(file.conversations)) {
      throw new Error(`the file has no conversations: its format must be ${FORMAT}`);
    }
    const read = file.conversations.map(readConversation);
    for (const conversation of read) {
      if (this.get(`conversation.${conversation.id}`, null)) conversation.id = newId();
      if (!this.save(conversation)) throw new Error("the browser has no room for them");
    }
    return read.length;
  }
}
