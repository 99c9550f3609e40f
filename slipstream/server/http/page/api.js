// The requests of the page, and what their answers say. All go to the server of the page.

const HELPERS = new Set(["ensemble", "tensorrt_llm_bls", "tensorrt_llm", "preprocessing", "postprocessing"]);
export const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"];
export const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };
export const TOP_TOKENS = 5;  // alternatives of each token, if probabilities are shown

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A server of this page: its address is relative, so that a proxy may give it a path. */
export class Server {
  constructor() {
    this.key = "";
  }

  headers() {
    return { "Content-Type": "application/json", ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) };
  }

  async request(path, options = {}) {
    let response;
    try {
      response = await fetch(path, { ...options, headers: this.headers() });
    } catch (problem) {
      if (problem.name === "AbortError") throw problem;
      throw new ApiError(0, "the server cannot be reached");  // the browser's own text does not say so
    }
    if (!response.ok) throw new ApiError(response.status, await readProblem(response));
    return response;
  }

  /** Return the names of the models to talk to. Helpers are left out where there are others. */
  async listModels() {
    const { data } = await (await this.request("v1/models")).json();
    return offered(data.map(({ id }) => id));
  }

  async post(path, body, signal) {
    return this.request(path, { method: "POST", body: JSON.stringify(body), signal });
  }
}

export function offered(names) {
  const own = names.filter(name => !HELPERS.has(name));
  return own.length ? own : names;
}

async function readProblem(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return `${response.status}: ${error.message || error}`;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

/** Return the body of a request. `messages`: those of the conversation, without a system message. */
export function requestBody(settings, messages) {
  const body = { model: settings.model };
  if (settings.mode === "completion") {
    body.prompt = messages.at(-1).content;
  } else {
    const system = (settings.system || "").trim();
    body.messages = [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages.map(({ role, content }) => ({ role, content })),
    ];
  }
  for (const name of NUMBERS) {
    const value = settings[name];
    if (value !== "" && value !== undefined && value !== null) body[name] = Number(value);
  }
  const stop = (settings.stop || "").split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.probabilities && settings.mode === "completion") body.logprobs = TOP_TOKENS;
  if (settings.probabilities && settings.mode !== "completion") Object.assign(body, { logprobs: true, top_logprobs: TOP_TOKENS });
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

const quoted = text => `'${text.replace(/'/g, "'\\''")}'`;

/** Return the request as a command for a terminal. A key is not written into it. */
export function curlCommand(url, body, keyed) {
  const key = keyed ? " \\\n  -H \"Authorization: Bearer $SLIPSTREAM_API_KEY\"" : "";
  return `curl -N ${quoted(url)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}`;
}

/** Yield the JSON events of a stream. */
export async function* readEvents(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    waiting += decoder.decode(value, { stream: true });
    const whole = waiting.split("\n\n");
    waiting = whole.pop();
    for (const text of whole) {
      const data = text.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(response.status, event.error.message);
      yield event;
    }
  }
}

/** An answer while it arrives. `now`: a clock in milliseconds. */
export class Answer {
  constructor(began, now = () => performance.now()) {
    this.now = now;
    this.began = began;
    this.first = 0;
    this.last = began;
    this.pieces = 0;
    this.text = "";
    this.thought = "";
    this.tokens = [];  // { text, logprob, top }, if they were asked for
    this.calls = [];
    this.usage = null;
    this.finish = "";
  }

  take(event) {
    this.usage = event.usage || this.usage;
    const choice = (event.choices || [])[0];
    if (!choice) return;
    const delta = choice.delta || { content: choice.text };
    const thought = delta.reasoning_content || delta.reasoning || "";
    if (delta.content || thought || delta.tool_calls) {
      this.first = this.first || this.now();
      this.last = this.now();
      this.pieces += 1;
      this.text += delta.content || "";
      this.thought += thought;
    }
    for (const call of delta.tool_calls || []) this.takeCall(call);
    this.tokens.push(...readTokens(choice.logprobs));
    this.finish = choice.finish_reason || this.finish;
  }

  takeCall({ index = 0, function: { name = "", arguments: text = "" } = {} }) {
    this.calls[index] = this.calls[index] || { name: "", arguments: "" };
    this.calls[index].name += name;
    this.calls[index].arguments += text;
  }

  /** Return the figures of the answer so far. */
  stats() {
    const tokens = this.usage ? this.usage.completion_tokens : this.pieces;
    const seconds = (this.last - this.first) / 1000;
    return {
      tokens,
      rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
      first: this.first ? (this.first - this.began) / 1000 : null,
      prompt: this.usage ? this.usage.prompt_tokens : null,
      cached: this.usage && this.usage.prompt_tokens_details ? this.usage.prompt_tokens_details.cached_tokens : null,
      finish: this.finish,
    };
  }
}

/** Return the figures in words. */
export function describeStats({ tokens, rate, first, prompt, cached, finish }) {
  const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  return [
    counted(tokens, "token"),
    rate ? `${rate.toFixed(1)} tokens/s` : "",
    first === null ? "waiting" : `first token after ${first.toFixed(2)} s`,
    prompt ? `${counted(prompt, "prompt token")}${cached ? ` (${cached} from the cache)` : ""}` : "",
    finish === "length" ? "ended at the limit of tokens" : "",
    finish === "stopped" ? "stopped" : "",
  ].filter(Boolean).join(" · ");
}

/** Return the tokens of an event: those of chat completions and those of completions differ. */
function readTokens(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({
      text: token, logprob, top: (top || []).map(one => [one.token, one.logprob]),
    }));
  }
  return (logprobs.tokens || []).map((text, i) => ({
    text, logprob: logprobs.token_logprobs[i], top: Object.entries((logprobs.top_logprobs || [])[i] || {}),
  }));
}
