// The start of the page: its parts, the models, the key, the keys of the keyboard.

import { Server } from "./api.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { createConversation } from "./conversation.js";
import { Dashboard } from "./dashboard.js";
import { askText } from "./dialog.js";
import { at, showProblem } from "./elements.js";
import { ConversationList } from "./list.js";
import { SchemaTab } from "./schema.js";
import { Settings } from "./settings.js";
import { Store, openStorage } from "./store.js";
import { hideListIfNarrow, startPanels, startTabs } from "./tabs.js";

const store = new Store(openStorage());
const server = new Server();
const settings = new Settings(store, name => { if (["plain", "all"].includes(name)) chat.show(); });
const chat = new Chat(store, server, settings, () => list.show());
const list = new ConversationList(store, () => chat.conversation, conversation => {
  chat.open(conversation);
  hideListIfNarrow();
});
const compare = new Compare(store, server, settings);
const schema = new SchemaTab(store, server, settings);
const dashboard = new Dashboard(server);

let asking = false;

/** Ask for the key after the server has refused a request without it. */
server.onRefused = async () => {
  if (asking) return;
  asking = true;
  const title = server.key ? "The server refuses this API key" : "This server needs an API key";
  const key = await askText({ title, label: "API key", value: "", yes: "Use it", secret: true });
  asking = false;
  if (!key || !key.trim()) return;
  useKey(key.trim());
};

function useKey(key) {
  server.key = at("key").value = key;
  store.set("key", key || null);
  loadModels();
}

async function loadModels() {
  try {
    const names = await server.listModels();
    settings.offerModels(names);
    compare.offer(names);
    showProblem(names.length ? "" : "This server has no text model.");
  } catch (problem) {
    showProblem(`The models cannot be listed: ${problem.message}`);
    if (problem.status === 401 || problem.status === 403) server.onRefused();
  }
}

server.key = at("key").value = store.get("key", "");
at("key").addEventListener("change", () => useKey(at("key").value.trim()));
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || at("ask").open) return;
  chat.stop();
  compare.stop();
  schema.stop();
});
startPanels(store);
startTabs(name => dashboard.watch(name === "dashboard"));
const last = store.get("current", "");
chat.open((last && store.load(last)) || createConversation());
list.show();
loadModels();
at("text").focus();
