// The list of conversations: open, search, rename, delete, export, import.

import { createConversation, titleOf } from "./conversation.js";
import { askText, askYes } from "./dialog.js";
import { at, showProblem } from "./elements.js";
import { make } from "./nodes.js";

export class ConversationList {
  /** `current` returns the conversation that is shown; `open` shows another. */
  constructor(store, current, open) {
    this.store = store;
    this.current = current;
    this.open = open;
    at("new").addEventListener("click", () => { this.open(createConversation()); this.show(); at("text").focus(); });
    at("search").addEventListener("input", () => this.show());
    at("export").addEventListener("click", () => this.exportFile());
    at("import").addEventListener("click", () => at("import-file").click());
    at("import-file").addEventListener("change", () => this.importFile());
    at("delete-all").addEventListener("click", () => this.removeAll());
  }

  /** Show the conversations. The focus stays on its button, or goes to the one in its place. */
  show() {
    const buttons = () => [...at("conversations").querySelectorAll("button")];
    const place = buttons().indexOf(document.activeElement), key = place < 0 ? "" : document.activeElement.dataset.key;
    this.fill();
    if (place < 0) return;
    const left = buttons();
    (left.find(one => one.dataset.key === key) || left[Math.min(place, left.length - 1)] || at("new")).focus();
  }

  fill() {
    const current = this.current().id;
    const items = this.store.list(at("search").value).map(conversation => this.item(conversation, current));
    const empty = at("search").value ? "Nothing found." : "No conversation yet.";
    at("conversations").replaceChildren(...(items.length ? items : [make("li", { class: "hint", text: empty })]));
  }

  item(conversation, current) {
    const title = titleOf(conversation), chosen = conversation.id === current;
    const open = make("button", {
      type: "button", class: "open", text: title, title, "aria-current": chosen ? "true" : null,
      "data-key": `${conversation.id} open`,
      on: { click: () => { this.open(conversation); this.show(); } },
    });
    const rename = make("button", { type: "button", class: "small", text: "✎", "data-key": `${conversation.id} rename`, "aria-label": `Rename: ${title}`, title: "Rename", on: { click: () => this.rename(conversation) } });
    const remove = make("button", { type: "button", class: "small", text: "✕", "data-key": `${conversation.id} remove`, "aria-label": `Delete: ${title}`, title: "Delete", on: { click: () => this.remove(conversation) } });
    return make("li", { class: chosen ? "current" : null }, open, rename, remove);
  }

  async rename(conversation) {
    const title = await askText({ title: "Rename the conversation", label: "Title", value: titleOf(conversation) });
    if (title === null) return;
    const shown = this.current();
    const changed = shown.id === conversation.id ? shown : conversation;
    changed.title = title.trim();
    this.store.save(changed);
    this.show();
  }

  async remove(conversation) {
    if (!(await askYes(`Delete “${titleOf(conversation)}”?`, "Delete"))) return;
    this.store.remove(conversation.id);
    if (this.current().id === conversation.id) this.open(createConversation());
    this.show();
  }

  async removeAll() {
    const all = this.store.list();
    if (!all.length || !(await askYes(`Delete all ${all.length} conversations?`, "Delete all"))) return;
    for (const { id } of all) this.store.remove(id);
    this.open(createConversation());
    this.show();
  }

  exportFile() {
    const file = new Blob([this.store.exportText()], { type: "application/json" });
    const address = URL.createObjectURL(file);
    make("a", { href: address, download: `conversations-${new Date().toISOString().slice(0, 10)}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  }

  async importFile() {
    const [file] = at("import-file").files;
    at("import-file").value = "";
    if (!file) return;
    try {
      const count = this.store.importText(await file.text());
      at("status").textContent = `${count} conversation${count === 1 ? "" : "s"} imported`;
    } catch (problem) {
      showProblem(`${file.name}: ${problem.message}`);
    }
    this.show();
  }
}
