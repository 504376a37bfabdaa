// The page's parts, and the events between them.

import { Attachments } from "./attachments.js";
import { Chat } from "./chat.js";
import { byId, h } from "./dom.js";
import * as figures from "./figures.js";
import { askForKey } from "./keydialog.js";
import { ModelDialog } from "./modeldialog.js";
import { Models, shortName, stateOf } from "./models.js";
import { clearNotice, notice } from "./notices.js";
import { closeTop, leaveHistory } from "./panels.js";
import { Picture } from "./picture.js";
import * as server from "./server.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { Tools } from "./tools.js";
import { ToolsDialog } from "./toolsdialog.js";

const FIRST_WAIT = 1, LONGEST_WAIT = 20; // seconds between two checks whether the server is back
const IDEAS = [
  "What is photosynthesis?",
  "Write a short poem about a quiet fire.",
  "Explain to a child why the sky is blue.",
];

const picture = new Picture();
const settings = new Settings(() => chat.isEmpty || sidebar.keep(chat.conversation, false));
const models = new Models({ changed: onModels, ready: onFacts });
const dialog = new ModelDialog(models, settings, { choose: chooseModel });
const sidebar = new Sidebar({ open: (one) => openConversation(one), current: () => chat.conversation });
const tools = new Tools();
const chat = new Chat({
  models,
  settings,
  tools,
  picture,
  keep: (conversation) => sidebar.keep(conversation),
  second: () => dialog.second && { ...dialog.second, label: shortName(dialog.second.model ?? "") },
  opened: (conversation) => store.remember(conversation),
  onError: onAnswerError,
  running: setRunning,
  showEmpty,
});
const toolsDialog = new ToolsDialog(tools, {
  conversation: () => chat.conversation,
  changed: () => chat.isEmpty || sidebar.keep(chat.conversation, false),
});
const attachments = new Attachments({
  countTokens: async (text) => (models.isLoaded ? server.countTokens(models.baseName, text) : null),
  room: () => models.nContext,
  sees: () => models.sees,
});

// ---- the server and its models ----

let back = null; // the timer of these checks

async function connect() {
  window.clearTimeout(back);
  back = null;
  try {
    await models.connect();
  } catch (error) {
    if (!(error instanceof server.ServerError)) throw error;
    return onConnectError(error);
  }
  clearNotice("server");
  document.title = models.shortName ? `${models.shortName} · hotset` : "hotset";
}

function onConnectError(error) {
  if (error.kind === "key") return askForKey(server.hasKey() ? error.message : "", connect);
  const loading = error.kind === "loading";
  notice("server", loading ? "The model is being loaded." : `${error.message} Trying again.`, loading ? "calm" : "alarm");
  lookAgain(FIRST_WAIT);
}

/** Check at growing intervals whether the server answers again; then load its models. */
function lookAgain(seconds) {
  window.clearTimeout(back);
  back = window.setTimeout(async () => {
    const state = await server.health();
    if (state === "ok") return connect();
    if (state === "loading") notice("server", "The model is being loaded.", "calm");
    lookAgain(state === "loading" ? FIRST_WAIT : Math.min(2 * seconds, LONGEST_WAIT));
  }, 1000 * seconds);
}

function onModels() {
  dialog.update();
  const state = models.chosen?.status?.value;
  if (state === "loading" || state === "queued") {
    notice("model", `${models.shortName}: ${stateOf(models.chosen)}. Your message is answered once it is loaded.`, "calm");
  } else clearNotice("model");
}

function onFacts() {
  document.title = `${models.shortName} · hotset`;
  picture.setFacts(models.facts);
  chat.showMeter();
  showEmpty();
}

/** Choose the model of this and later conversations, and load it immediately. */
async function chooseModel(name) {
  chat.conversation.model = name;
  if (!chat.isEmpty) sidebar.keep(chat.conversation, false);
  await models.choose(name, true);
  if (!models.isLoaded && models.hasStates) dialog.run(() => server.load(models.baseName));
  picture.setFacts(models.facts);
  showEmpty();
}

function onAnswerError(error, retry) {
  if (error.kind === "network") lookAgain(FIRST_WAIT);
  if (error.kind === "network") notice("server", "The server does not answer. Trying again.");
  if (error.kind === "loading") onConnectError(error);
  if (error.kind !== "key") return;
  askForKey(server.hasKey() ? error.message : "", async () => {
    await connect();
    retry();
  });
}

// ---- conversations ----

function openConversation(which) {
  chat.open(which);
  toolsDialog.nameButton();
  sidebar.list();
}

function showEmpty() {
  byId("empty").hidden = !chat.isEmpty;
  if (!chat.isEmpty) return;
  byId("empty-title").textContent = models.facts?.has_zeros ? "Ask, and see which neurons fire." : "Ask a question.";
  byId("empty-text").textContent = models.facts?.has_zeros
    ? `Only some of ${models.shortName}’s neurons fire for each token. The panel beside the chat shows in which layers.`
    : models.shortName
      ? `${models.shortName} answers on the server’s machine. The panel beside the chat shows how fast, and what each token reads.`
      : "";
  byId("ideas").replaceChildren(
    ...IDEAS.map((idea) => h("li", {}, h("button", { type: "button", class: "idea", on: { click: () => chat.send(idea) } }, idea))),
  );
}

byId("new-chat").addEventListener("click", () => {
  openConversation(store.fresh());
  leaveHistory();
  byId("ask").focus();
});
byId("show-settings").addEventListener("click", () => {
  settings.build(byId("settings-body"), models.defaults);
  byId("settings").showModal();
});

// ---- the message ----

const ask = byId("ask");

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.running || (ask.value.trim() === "" && attachments.files.length === 0)) return;
  const text = ask.value;
  ask.value = "";
  fit();
  chat.send(text, attachments.take());
});
byId("stop").addEventListener("click", () => chat.stop());
ask.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (!closeTop()) chat.stop();
});

/** Fit the height of the text box to its text. */
function fit() {
  ask.style.height = "auto";
  ask.style.height = `${ask.scrollHeight}px`;
}
ask.addEventListener("input", fit);

function setRunning(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
  document.body.classList.toggle("running", is);
}

sidebar.list();
figures.clean(new Set(store.all().map((one) => one.id)));
picture.setFacts(null);
const before = store.remembered();
if (before) chat.open(before);
else showEmpty();
if (window.matchMedia("(pointer: fine)").matches) ask.focus();
connect();
