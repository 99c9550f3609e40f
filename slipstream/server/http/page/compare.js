// The comparison: one message to two models, or to one with two settings.

import { Answer, PATHS, describeStats, readEvents, requestBody } from "./api.js";
import { addMessage, createConversation, pathTo } from "./conversation.js";
import { at } from "./elements.js";
import { MessageView } from "./message.js";
import { make } from "./nodes.js";

const CHOICES = [["temperature", "Temperature", "2", "0.05"], ["max_tokens", "Maximum tokens", "", "1"]];

/** One of the two sides. */
class Contender {
  constructor(name, store, server, settings) {
    this.name = name;
    this.store = store;
    this.server = server;
    this.settings = settings;
    this.conversation = createConversation();
    this.log = make("div", { class: "log", role: "log", tabindex: 0, "aria-label": `Answers of ${name}` });
    this.status = make("p", { class: "stats", role: "status" });
    this.model = make("select", { id: `compare-model-${name}` });
    this.system = make("textarea", { id: `compare-system-${name}`, rows: 1 });
    this.numbers = Object.fromEntries(CHOICES.map(([field, , max, step]) =>
      [field, make("input", { id: `compare-${field}-${name}`, type: "number", min: 0, max: max || null, step })]));
    const labelled = (text, field) => make("div", {}, make("label", { for: field.id, text }), field);
    this.element = make("section", { class: "contender", "aria-label": `Side ${name}` },
      make("h2", { text: `Side ${name}` }),
      make("div", { class: "choices" }, labelled("Model", this.model),
        ...CHOICES.slice(0, 1).map(([field, label]) => labelled(label, this.numbers[field]))),
      make("div", { class: "choices" }, labelled("System prompt", this.system),
        ...CHOICES.slice(1).map(([field, label]) => labelled(label, this.numbers[field]))),
      this.log, this.status);
    for (const field of [this.model, this.system, ...Object.values(this.numbers)]) {
      field.addEventListener("input", () => this.keep());
    }
  }

  offer(models, kept) {
    this.model.replaceChildren(...models.map(name => make("option", { value: name, text: name })));
    if (models.includes(kept.model)) this.model.value = kept.model;
    this.system.value = kept.system || "";
    for (const [field, input] of Object.entries(this.numbers)) input.value = kept[field] ?? this.settings.read()[field];
  }

  keep() {
    this.store.set(`compare.${this.name}`, this.choices());
  }

  choices() {
    const numbers = Object.fromEntries(Object.entries(this.numbers).map(([field, input]) => [field, input.value]));
    return { model: this.model.value, system: this.system.value, ...numbers };
  }

  clear() {
    this.conversation = createConversation();
    this.log.replaceChildren();
    this.status.textContent = "";
  }

  async ask(text, signal) {
    const settings = { ...this.settings.read(), mode: "chat", ...this.choices() };
    const question = addMessage(this.conversation, this.conversation.leaf, { role: "user", content: text });
    const messages = pathTo(this.conversation).filter(message => !message.failure);
    const message = addMessage(this.conversation, question.id, { role: "assistant", content: "", model: settings.model });
    const view = new MessageView(this.conversation, message, {}, settings);
    const asked = new MessageView(this.conversation, question, {}, settings);
    for (const one of [asked, view]) {
      one.buttons.remove();
      this.log.append(one.element);
    }
    const answer = new Answer(performance.now());
    const write = running => {
      Object.assign(message, { content: answer.text, thought: answer.thought || undefined, stats: answer.stats() });
      view.update(running);
      this.log.scrollTop = this.log.scrollHeight;
    };
    try {
      const response = await this.server.post(PATHS.chat, requestBody(settings, messages), signal);
      let frame = 0;
      for await (const event of readEvents(response)) {
        answer.take(event);
        frame = frame || requestAnimationFrame(() => { frame = 0; write(true); });
      }
      cancelAnimationFrame(frame);
    } catch (problem) {
      if (problem.name === "AbortError") answer.finish = "stopped";
      else message.failure = `No answer: ${problem.message}`;
    }
    write(false);
    this.status.textContent = message.failure || describeStats(message.stats);
  }
}

export class Compare {
  constructor(store, server, settings) {
    this.store = store;
    this.sides = ["A", "B"].map(name => new Contender(name, store, server, settings));
    this.controller = null;
    at("contenders").append(...this.sides.map(side => side.element));
    at("compare-form").addEventListener("submit", event => { event.preventDefault(); this.send(); });
    at("compare-text").addEventListener("keydown", event => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    at("compare-stop").addEventListener("click", () => this.stop());
    at("compare-clear").addEventListener("click", () => { this.stop(); this.sides.forEach(side => side.clear()); });
  }

  /** Offer these models, the second one on the second side. */
  offer(models) {
    this.sides.forEach((side, i) => side.offer(models, this.store.get(`compare.${side.name}`, { model: models[i] || models[0] })));
  }

  stop() {
    if (this.controller) this.controller.abort();
  }

  async send() {
    const text = at("compare-text").value;
    if (this.controller || !text.trim()) return;
    this.controller = new AbortController();
    at("compare-text").value = "";
    at("compare-send").disabled = true;
    at("compare-stop").disabled = false;
    await Promise.all(this.sides.map(side => side.ask(text, this.controller.signal)));
    this.controller = null;
    at("compare-send").disabled = false;
    at("compare-stop").disabled = true;
  }
}
