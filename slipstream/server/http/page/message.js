// One message as an element: its text, its reasoning, its tokens, its figures and its buttons.

import { describeStats } from "./api.js";
import { branches } from "./conversation.js";
import { levelHeadings, parseMarkdown, splitThinking } from "./markdown.js";
import { Blocks, copyText, make } from "./nodes.js";
import { tokenView } from "./tokens.js";

/** Return the reasoning and the answer of a message. */
export function partsOf({ content, thought = "" }) {
  const found = splitThinking(content);
  return { thought: thought || found.thought, answer: found.answer, open: found.open };
}

export class MessageView {
  /** `actions`: what the buttons call, with the message: edit, again, fork, remove, show. */
  constructor(conversation, message, actions, options) {
    this.message = message;
    this.conversation = conversation;
    this.actions = actions;
    this.options = options;
    this.answer = make("div", { class: "answer" });
    this.blocks = new Blocks(this.answer);
    this.thoughtText = make("div", { class: "plain" });
    this.thoughtTitle = make("summary");
    this.thought = make("details", { class: "thought", hidden: true }, this.thoughtTitle, this.thoughtText);
    this.failure = make("p", { class: "failure", hidden: true });
    this.stats = make("p", { class: "stats" });
    this.buttons = make("div", { class: "actions", role: "group", "aria-label": "Actions on this message" });
    const who = message.role === "user" ? "You" : message.model || "Assistant";
    this.element = make("article", { class: `message ${message.role}` }, make("h2", { text: who }),
      this.thought, this.answer, this.failure, this.stats, this.buttons);
    this.update();
  }

  /** Show the message as it is now. `running`: it is still being written. */
  update(running = false) {
    const { thought, answer, open } = partsOf(this.message);
    this.thought.hidden = !thought;
    if (thought) {
      this.thoughtTitle.textContent = running && (open || !answer) ? "Thinking…" : "Thoughts";
      this.thoughtText.textContent = thought;
    }
    if (this.message.role === "user" || this.options.plain) {
      this.blocks.shown = [];
      this.answer.replaceChildren(make("p", { class: "plain", text: answer }));
    } else {
      this.blocks.show(levelHeadings(parseMarkdown(answer)));
    }
    this.failure.hidden = !this.message.failure;
    this.failure.textContent = this.message.failure || "";
    this.stats.textContent = this.message.stats ? describeStats(this.message.stats) : "";
    this.buttons.hidden = running;
    if (!running) this.showButtons();
  }

  showButtons() {
    const { role, tokens } = this.message;
    const button = (text, call, more = {}) => make("button", { type: "button", class: "small", text, on: { click: call }, ...more });
    const copy = button("Copy", () => copyText(partsOf(this.message).answer, copy));
    const buttons = [
      this.branchButtons(button),
      copy,
      button("Edit", () => this.edit()),
      role === "assistant" ? button("Regenerate", () => this.actions.again(this.message)) : null,
      role === "assistant" ? button("Branch", () => this.actions.fork(this.message), { title: "A new conversation with the messages up to here" }) : null,
      tokens && tokens.length ? button("Tokens", event => this.toggleTokens(event.target), { "aria-pressed": "false" }) : null,
      button("Delete", () => this.actions.remove(this.message)),
    ];
    this.buttons.replaceChildren(...buttons.filter(Boolean));
  }

  branchButtons(button) {
    const { ids, index } = branches(this.conversation, this.message);
    if (ids.length < 2) return null;
    const move = (text, label, to) => button(text, () => this.actions.show(ids[to]), { "aria-label": label, disabled: !ids[to] });
    return make("span", { class: "branches", role: "group", "aria-label": "Versions of this message" },
      move("‹", "Previous version", index - 1), `${index + 1}/${ids.length}`, move("›", "Next version", index + 1));
  }

  toggleTokens(button) {
    const shown = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!shown));
    if (shown) this.tokens.remove();
    else {
      this.tokens = tokenView(this.message.tokens);
      this.answer.after(this.tokens);
    }
    this.answer.hidden = !shown;
  }

  edit() {
    const text = make("textarea", { rows: Math.min(12, this.message.content.split("\n").length + 1), "aria-label": "The message" });
    text.value = this.message.content;
    const ask = this.message.role === "user";
    const done = () => this.update();
    const form = make("form", { class: "edit" }, text, make("div", { class: "row" },
      make("button", { type: "submit", class: "strong", text: ask ? "Save and send" : "Save" }),
      make("button", { type: "button", text: "Cancel", on: { click: () => { form.remove(); this.answer.hidden = false; done(); } } })));
    form.addEventListener("submit", event => {
      event.preventDefault();
      if (text.value.trim()) this.actions.edit(this.message, text.value);
    });
    this.answer.hidden = true;
    this.buttons.replaceChildren();
    this.answer.after(form);
    text.focus();
  }
}
