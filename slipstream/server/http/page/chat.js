// The chat: the conversation that is shown, the requests of it, and the buttons of its messages.

import { Answer, PATHS, curlCommand, describeStats, readEvents, requestBody } from "./api.js";
import { addMessage, createConversation, fork, pathTo, removeMessage, showBranch } from "./conversation.js";
import { at, showProblem } from "./elements.js";
import { MessageView } from "./message.js";
import { copyText, make } from "./nodes.js";

const SAVE_MILLISECONDS = 1000;
const STARTS = ["What is machine learning?", "Give me three tips for good sleep.", "Write a short poem about rain."];
const LONGEST_FILE = 200000;  // characters of an attached file

export class Chat {
  /** `changed`: called when conversations were added, changed or removed. */
  constructor(store, server, settings, changed) {
    this.store = store;
    this.server = server;
    this.settings = settings;
    this.changed = changed;
    this.running = null;  // { conversation, message, controller }
    this.views = new Map();  // id of a message → its view
    this.conversation = createConversation();
    at("form").addEventListener("submit", event => { event.preventDefault(); this.send(); });
    at("text").addEventListener("keydown", event => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      at("form").requestSubmit();
    });
    at("stop").addEventListener("click", () => this.stop());
    at("copy").addEventListener("click", () => this.copyCommand());
    at("attach").addEventListener("click", () => at("attach-file").click());
    at("attach-file").addEventListener("change", () => this.attach());
    addEventListener("pagehide", () => this.keep());
  }

  // -- what is shown

  open(conversation) {
    this.conversation = conversation;
    this.store.set("current", conversation.id);
    at("command").hidden = true;
    at("status").textContent = "";
    this.show();
  }

  show() {
    const path = pathTo(this.conversation);
    const options = this.settings.read();
    const actions = {
      again: message => this.regenerate(message),
      edit: (message, text) => this.edit(message, text),
      fork: message => this.fork(message),
      remove: message => this.remove(message),
      show: id => { showBranch(this.conversation, id); this.keepAndShow(); },
    };
    this.views = new Map(path.map(message => [message.id, new MessageView(this.conversation, message, actions, options)]));
    const log = at("conversation");
    log.replaceChildren(...[...this.views.values()].map(view => view.element));
    if (!path.length) log.append(this.welcome());
    if (this.running && this.views.has(this.running.message.id)) this.views.get(this.running.message.id).update(true);
    follow(true);
  }

  welcome() {
    const questions = STARTS.map(text => make("button", { type: "button", text, on: { click: () => this.ask(text) } }));
    return make("div", { class: "welcome" }, make("p", { text: "Ask something. The answer comes from this server." }),
      make("div", { class: "starts", role: "group", "aria-label": "Questions to begin with" }, ...questions));
  }

  ask(text) {
    at("text").value = text;
    at("form").requestSubmit();
  }

  keep() {
    if (this.running) this.store.save(this.running.conversation);
    if (this.conversation.messages.length && !this.store.save(this.conversation)) {
      showProblem("The browser has no room for this conversation: export or delete some.");
    }
    this.changed();
  }

  keepAndShow() {
    this.keep();
    this.show();
  }

  // -- buttons of a message

  regenerate(message) {
    if (!this.running) this.answer(message.parent);
  }

  edit(message, text) {
    if (this.running) return;
    const { role, model } = message;
    const changed = addMessage(this.conversation, message.parent, { role, model, content: text });
    if (role === "user") this.answer(changed.id);
    else this.keepAndShow();
  }

  fork(message) {
    const copy = fork(this.conversation, message.id);
    this.store.save(copy);
    this.changed();
    this.open(copy);
    at("text").focus();
  }

  remove(message) {
    if (this.running) return;
    removeMessage(this.conversation, message.id);
    this.keepAndShow();
  }

  // -- requests

  async send() {
    const text = at("text").value;
    if (this.running || !text.trim() || !at("form").reportValidity()) return;
    at("text").value = "";
    const question = addMessage(this.conversation, this.conversation.leaf, { role: "user", content: text });
    const message = await this.answer(question.id);
    if (message.failure && !message.content && !at("text").value && this.conversation.leaf === message.id) {
      removeMessage(this.conversation, question.id);  // so that it can be sent again
      at("text").value = text;
      this.keep();
    }
    const focused = document.activeElement;  // the user may be elsewhere by now
    if (focused === document.body || at("form").contains(focused)) at("text").focus();
  }

  /** Ask for an answer to the message `parent`. */
  async answer(parent) {
    const conversation = this.conversation, settings = this.settings.read();
    const question = conversation.messages.find(message => message.id === parent);
    const messages = pathTo(conversation, parent).filter(message => !message.failure || message.content);
    const message = addMessage(conversation, parent, { role: "assistant", content: "", model: settings.model });
    const body = requestBody(settings, question ? messages : [{ role: "user", content: "" }]);
    const controller = new AbortController();
    this.running = { conversation, message, controller };
    showProblem("");
    at("command").hidden = true;
    this.keepAndShow();
    this.showBusy(true);
    const answer = new Answer(performance.now());
    try {
      const response = await this.server.post(PATHS[settings.mode], body, controller.signal);
      await this.receive(response, answer, message);
    } catch (problem) {
      if (problem.name === "AbortError") answer.finish = "stopped";
      else this.fail(message, problem);
    }
    this.write(message, answer);
    this.running = null;
    this.showBusy(false);
    this.keep();
    const view = this.views.get(message.id);
    if (view) view.update();
    const end = answer.finish === "stopped" ? "Stopped." : "The answer is complete.";
    at("status").textContent = message.failure ? "" : end;
    follow(false);
    return message;
  }

  async receive(response, answer, message) {
    let frame = 0, saved = performance.now();
    const draw = () => {
      frame = 0;
      this.write(message, answer);
      const view = this.views.get(message.id);
      if (view && this.running && this.running.message === message) {
        view.update(true);
        at("status").textContent = describeStats(answer.stats());
        follow(false);
      }
    };
    try {
      for await (const event of readEvents(response)) {
        answer.take(event);
        if (!frame) frame = requestAnimationFrame(draw);
        if (performance.now() - saved > SAVE_MILLISECONDS) {
          saved = performance.now();
          this.write(message, answer);
          this.store.save(this.running.conversation);
        }
      }
    } finally {
      cancelAnimationFrame(frame);
    }
  }

  /** Write what has arrived into the message. */
  write(message, answer) {
    message.content = answer.text;
    if (answer.thought) message.thought = answer.thought;
    if (answer.tokens.length) message.tokens = answer.tokens;
    message.stats = answer.stats();
  }

  fail(message, problem) {
    message.failure = `No answer: ${problem.message}`;
    showProblem(problem.message);
    if (problem.status === 401 || problem.status === 403) this.server.onRefused();
  }

  stop() {
    if (this.running) this.running.controller.abort();
  }

  /** Show the one of the buttons Send and Stop that has a use. The focus stays in their place. */
  showBusy(busy) {
    const [shown, hidden] = busy ? [at("stop"), at("send")] : [at("send"), at("stop")];
    const focused = document.activeElement === hidden;
    shown.disabled = shown.hidden = false;
    hidden.disabled = hidden.hidden = true;
    if (focused) shown.focus();
    at("conversation").setAttribute("aria-busy", String(busy));
  }

  // -- the rest of the form

  copyCommand() {
    const settings = this.settings.read();
    const question = { role: "user", content: at("text").value || "Hello" };
    const body = requestBody(settings, [...pathTo(this.conversation), question]);
    const place = at("command");
    place.textContent = curlCommand(new URL(PATHS[settings.mode], location.href).href, body, Boolean(this.server.key));
    place.hidden = false;
    copyText(place.textContent, at("copy"));
  }

  async attach() {
    const [file] = at("attach-file").files;
    at("attach-file").value = "";
    if (!file) return;
    const text = await file.text();
    if (text.includes("\0") || text.length > LONGEST_FILE) {
      showProblem(`${file.name} is not a text of at most ${LONGEST_FILE} characters`);
      return;
    }
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
    const before = at("text").value ? `${at("text").value}\n\n` : "";
    at("text").value = `${before}${file.name}:\n${fence}\n${text.trimEnd()}\n${fence}\n`;
    at("text").focus();
  }
}

/** Scroll to the end. Without `always`, a reader further up stays there. */
function follow(always) {
  const view = at("conversation");
  const below = view.scrollHeight - view.scrollTop - view.clientHeight;
  if (always || below < 120) view.scrollTop = view.scrollHeight;
}
