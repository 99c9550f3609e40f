// The chat page's script beside the least of a browser that it needs: `node chat_page.mjs chat.html` asks a question,
// clears the conversation in the midst of the answer, asks again, and prints what was sent and what the page shows.
import { readFileSync } from "node:fs";

class Element {
  constructor(shown = false) { Object.assign(this, { shown, children: [], parent: null, value: "", textContent: "" }); }
  get isConnected() { return this.shown || Boolean(this.parent && this.parent.isConnected); }
  append(...children) { for (const child of children) child.parent = this; this.children.push(...children); }
  replaceChildren(...children) {
    for (const child of this.children) child.parent = null;
    this.children = [];
    this.append(...children);
  }
  addEventListener(kind, heed) { this[kind] = heed; }
  reportValidity() { return true; }
  setAttribute() {}
  focus() {}
}

const MODELS = ["ensemble", "mine", "other", "tensorrt_llm_bls", "yours"];
const elements = new Map(), sent = [];
const at = id => elements.get(id) || elements.set(id, new Element(true)).get(id);
let write;

globalThis.document = { getElementById: at, createElement: () => new Element(), addEventListener() {} };
globalThis.Option = class extends Element { constructor(text, value) { super(); this.value = value; } };
globalThis.fetch = async (path, options) => {
  if (path === "v1/models") return { ok: true, json: async () => ({ data: MODELS.map(id => ({ id })) }) };
  sent.push(JSON.parse(options.body).messages);
  const body = new ReadableStream({
    start(stream) {
      write = text => stream.enqueue(new TextEncoder().encode(text));
      options.signal.addEventListener("abort", () => stream.error(new DOMException("stopped", "AbortError")));
    },
  });
  return { ok: true, body };
};

const settled = () => new Promise(done => setTimeout(done, 20));
const ask = text => { at("text").value = text; at("form").submit({ preventDefault() {} }); return settled(); };

at("mode").value = "chat";
(0, eval)(readFileSync(process.argv[2], "utf8").match(/<script>([^]*)<\/script>/)[1]);
await settled();
await ask("one");
write('data: {"choices":[{"delta":{"content":"half an"}}]}\n\n');
await settled();
at("clear").click();
await settled();
const status = at("status").textContent;
await ask("two");
const models = at("model").children.map(option => option.value);
console.log(JSON.stringify({ sent, status, models, shown: at("conversation").children.length }));
process.exit(0);
