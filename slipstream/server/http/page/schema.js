// The tab for answers of a given form: JSON of a schema, calls of tools, text of a regular expression.

import { Answer, PATHS, curlCommand, describeStats, readEvents, requestBody } from "./api.js";
import { at } from "./elements.js";
import { build, copyText, make } from "./nodes.js";

const PERSON = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
  required: ["name", "age", "city"],
  additionalProperties: false,
};
const WEATHER = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
      required: ["city"],
    },
  },
}];
const KINDS = {
  schema: { label: "JSON schema", text: JSON.stringify(PERSON, null, 2), prompt: "Anna is 34 years old and lives in Oslo. Who is it?" },
  tools: { label: "Tools, as a JSON list", text: JSON.stringify(WEATHER, null, 2), prompt: "What is the weather in Paris?" },
  regex: { label: "Regular expression", text: "(yes|no), because [a-z ]{10,60}\\.", prompt: "Is the sky blue?" },
};

export class SchemaTab {
  constructor(store, server, settings) {
    this.store = store;
    this.server = server;
    this.settings = settings;
    this.controller = null;
    this.kept = store.get("schema", {});
    at("schema-kind").value = this.kept.kind || "schema";
    at("schema-kind").addEventListener("change", () => this.showKind());
    for (const id of ["schema-text", "schema-prompt"]) at(id).addEventListener("input", () => this.keep());
    at("schema-form").addEventListener("submit", event => { event.preventDefault(); this.run(); });
    at("schema-stop").addEventListener("click", () => this.stop());
    at("schema-copy").addEventListener("click", () => this.copy());
    this.showKind();
  }

  showKind() {
    const kind = at("schema-kind").value, kept = this.kept[kind] || {};
    at("schema-label").textContent = KINDS[kind].label;
    at("schema-text").value = kept.text ?? KINDS[kind].text;
    at("schema-prompt").value = kept.prompt ?? KINDS[kind].prompt;
  }

  keep() {
    const kind = at("schema-kind").value;
    this.kept = { ...this.kept, kind, [kind]: { text: at("schema-text").value, prompt: at("schema-prompt").value } };
    this.store.set("schema", this.kept);
  }

  /** Return the request. Throws if the schema is not JSON. */
  body() {
    const kind = at("schema-kind").value, text = at("schema-text").value;
    const settings = { ...this.settings.read(), mode: "chat", probabilities: false };
    const body = requestBody(settings, [{ role: "user", content: at("schema-prompt").value }]);
    if (kind === "regex") return { ...body, structured_outputs: { regex: text } };
    let value;
    try {
      value = JSON.parse(text);
    } catch (problem) {
      throw new Error(`${KINDS[kind].label}: ${problem.message}`);
    }
    if (kind === "tools") return { ...body, tools: value, tool_choice: "required" };
    return { ...body, response_format: { type: "json_schema", json_schema: { name: "answer", schema: value, strict: true } } };
  }

  stop() {
    if (this.controller) this.controller.abort();
  }

  async run() {
    if (this.controller) return;
    let body;
    try {
      body = this.body();
    } catch (problem) {
      at("schema-status").textContent = problem.message;
      return;
    }
    this.controller = new AbortController();
    at("schema-send").disabled = true;
    at("schema-stop").disabled = false;
    const answer = new Answer(performance.now());
    try {
      const response = await this.server.post(PATHS.chat, body, this.controller.signal);
      for await (const event of readEvents(response)) {
        answer.take(event);
        this.show(answer);
      }
      this.show(answer);
    } catch (problem) {
      at("schema-status").textContent = problem.name === "AbortError" ? "stopped" : problem.message;
    }
    this.controller = null;
    at("schema-send").disabled = false;
    at("schema-stop").disabled = true;
  }

  show(answer) {
    const blocks = answer.calls.filter(Boolean).map(call => [
      make("h3", { text: `Call of ${call.name}` }),
      build(codeOf(call.arguments)),
    ]).flat();
    if (answer.text) blocks.unshift(build(codeOf(answer.text)));
    at("schema-output").replaceChildren(...blocks);
    at("schema-status").textContent = describeStats(answer.stats());
  }

  copy() {
    try {
      const url = new URL(PATHS.chat, location.href).href;
      copyText(curlCommand(url, this.body(), Boolean(this.server.key)), at("schema-copy"));
    } catch (problem) {
      at("schema-status").textContent = problem.message;
    }
  }
}

/** Return the code block of a text, indented if it is whole JSON. */
function codeOf(text) {
  let shown = text;
  try {
    shown = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // it is no JSON, or not yet
  }
  return { tag: "pre", attributes: { language: "json" }, children: [shown] };
}
