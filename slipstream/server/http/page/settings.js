// The settings: a form whose values the browser keeps.

import { askText } from "./dialog.js";
import { at } from "./elements.js";
import { make } from "./nodes.js";

const PRESETS = {
  "Short answers": "Answer in one or two sentences.",
  "Step by step": "Think step by step. Give the steps as a numbered list, then the answer on a line of its own.",
  "Programmer": "You are an experienced programmer. Answer with working code and a short explanation.",
  "Teacher": "You are a patient teacher. Explain in simple words, with one example, and end with a question.",
  "Translator to English": "Translate what the user writes into English. Answer with the translation only.",
  "Editor": "Correct the spelling and grammar of what the user writes. Answer with the corrected text only.",
};

export class Settings {
  /** `changed` is called with the name of a setting after the user has changed it. */
  constructor(store, changed) {
    this.store = store;
    this.changed = changed;
    this.fields = [...document.querySelectorAll("[data-setting]")];
    this.defaults = this.read();
    this.wantedModel = "";
    this.write({ ...this.defaults, ...store.get("settings", {}) });
    for (const field of this.fields) field.addEventListener("input", () => this.onInput(nameOf(field)));
    at("reset").addEventListener("click", () => this.reset());
    at("preset").addEventListener("change", () => this.usePreset());
    at("preset-save").addEventListener("click", () => this.savePreset());
    at("preset-delete").addEventListener("click", () => this.deletePreset());
    this.showPresets("");
  }

  read() {
    return Object.fromEntries(this.fields.map(field => [nameOf(field), field.type === "checkbox" ? field.checked : field.value]));
  }

  write(values) {
    for (const field of this.fields) {
      const value = values[nameOf(field)];
      if (value === undefined) continue;
      if (field.type === "checkbox") field.checked = Boolean(value);
      else field.value = value;
    }
    this.wantedModel = values.model || this.wantedModel;
    this.showTheme();
  }

  onInput(name) {
    if (name === "model") this.wantedModel = at("model").value;
    this.store.set("settings", { ...this.read(), model: this.wantedModel });
    this.showTheme();
    this.changed(name);
  }

  reset() {
    this.store.set("settings", null);
    this.write({ ...this.defaults, model: this.wantedModel });
    this.changed("all");
  }

  showTheme() {
    document.documentElement.style.colorScheme = at("theme").value;
  }

  /** Offer these models, and choose the one that was used last. */
  offerModels(names) {
    const options = names.map(name => make("option", { value: name, text: name }));
    at("model").replaceChildren(...options);
    if (names.includes(this.wantedModel)) at("model").value = this.wantedModel;
  }

  // -- presets of the system prompt

  presets() {
    return { ...PRESETS, ...this.store.get("presets", {}) };
  }

  showPresets(chosen) {
    const names = Object.keys(this.presets());
    const none = make("option", { value: "", text: "none" });
    at("preset").replaceChildren(none, ...names.map(name => make("option", { value: name, text: name })));
    at("preset").value = chosen;
    at("preset-delete").disabled = !(chosen in this.store.get("presets", {}));
  }

  usePreset() {
    const name = at("preset").value;
    at("system").value = name ? this.presets()[name] : "";
    this.showPresets(name);
    this.onInput("system");
  }

  async savePreset() {
    const name = await askText({ title: "Save the system prompt as a preset", label: "Name", value: at("preset").value });
    if (!name || !name.trim()) return;
    this.store.set("presets", { ...this.store.get("presets", {}), [name.trim()]: at("system").value });
    this.showPresets(name.trim());
  }

  deletePreset() {
    const kept = this.store.get("presets", {});
    delete kept[at("preset").value];
    this.store.set("presets", kept);
    this.showPresets("");
  }
}

const nameOf = field => field.dataset.setting || field.id;
