// The page: the events between its parts. The conversation that is open, the answer that runs.

import { Activity } from "./activity.js";
import { scheme, onSchemeChange } from "./colours.js";
import { announce, byId, download, h, icon, ICONS } from "./dom.js";
import { factsOf, Picture } from "./picture.js";
import * as server from "./server.js";
import { Settings } from "./settings.js";
import * as store from "./store.js";
import { Transcript } from "./transcript.js";

const FIRST_WAIT = 1, LONGEST_WAIT = 20; // seconds between two looks whether the server is back
const IDEAS = [
  "What is photosynthesis?",
  "Write a short poem about a quiet fire.",
  "Explain to a child why the sky is blue.",
];

const settings = new Settings();
const picture = new Picture();
const transcript = new Transcript({ edit, again, picture: showPictureOf, busy: () => running !== null });

let conversation = store.fresh();
let running = null; // {controller, index}
const model = { id: null, name: "", facts: null, defaults: {} };
const removed = new Set(); // ids of conversations that are not to be kept, though an answer of theirs still ends
const activities = new WeakMap(); // message → Activity, of this visit: pictures are not kept
let back = null; // the timer that looks whether the server is back

// ---- the model ----

async function connect() {
  window.clearTimeout(back);
  back = null;
  try {
    const [list, props] = [await server.models(), await server.props()];
    const first = list.find((one) => one.status?.value === "loaded") ?? list[0]; // of several
    model.id = first?.id ?? null;
    model.name = shortName(model.id ?? "");
    model.facts = props?.hotset ?? null;
    model.defaults = props?.default_generation_settings?.params ?? {};
  } catch (error) {
    if (!(error instanceof server.ServerError)) throw error;
    return onConnectError(error);
  }
  clearNotice("server");
  byId("model").textContent = [model.name, ...factsOf(model.facts)].filter(Boolean).join(" · ");
  byId("model").title = byId("model").textContent;
  document.title = model.name ? `${model.name} · hotset` : "hotset";
  picture.setFacts(model.facts);
  showEmpty();
}

function onConnectError(error) {
  if (error.kind === "key") return askForKey(server.hasKey() ? error.message : "", connect);
  const loading = error.kind === "loading";
  notice("server", loading ? "The model is being loaded." : `${error.message} Trying again.`, loading ? "calm" : "alarm");
  lookAgain(FIRST_WAIT);
}

/** Looks whether the server answers again, at longer and longer intervals; then asks it for its model. */
function lookAgain(seconds) {
  window.clearTimeout(back);
  back = window.setTimeout(async () => {
    const state = await server.health();
    if (state === "ok") return connect();
    if (state === "loading") notice("server", "The model is being loaded.", "calm");
    lookAgain(state === "loading" ? FIRST_WAIT : Math.min(2 * seconds, LONGEST_WAIT));
  }, 1000 * seconds);
}

const shortName = (id) => id.split("/").at(-1).replace(/\.gguf$/, "");

// ---- notices ----

/** A message above the conversation, until it is cleared or replaced by another about the same. */
function notice(about, message, mood = "alarm", ...actions) {
  const shown = document.querySelector(`.notice[data-about="${about}"]`);
  if (shown?.firstChild.textContent === message && shown.classList.contains(mood)) return;
  const element = h(
    "div",
    { class: `notice ${mood}`, role: mood === "alarm" ? "alert" : "status", dataset: { about } },
    h("span", {}, message),
    actions,
    h("button", { type: "button", class: "quiet", "aria-label": "Dismiss", on: { click: () => element.remove() } }, "×"),
  );
  if (shown) shown.replaceWith(element);
  else byId("notices").append(element);
}

function clearNotice(about) {
  document.querySelector(`.notice[data-about="${about}"]`)?.remove();
}

// ---- the key ----

let afterKey = null;

function askForKey(problem, then) {
  afterKey = then;
  byId("key-text").textContent = problem || "Enter one of the API keys that it was started with.";
  byId("key-text").classList.toggle("problem", problem !== "");
  byId("key-input").value = "";
  if (!byId("key").open) byId("key").showModal();
  byId("key-input").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  server.useKey(byId("key-input").value.trim(), byId("key-keep").checked);
  byId("key").close("used");
  afterKey?.();
});
byId("key-cancel").addEventListener("click", () => byId("key").close("cancelled"));
byId("key").addEventListener("close", () => {
  if (byId("key").returnValue === "used") return;
  const enter = h("button", { type: "button", class: "quiet", on: { click: () => askForKey("", connect) } }, "Enter a key");
  notice("server", "Without a key this server answers nothing.", "alarm", enter);
});

// ---- asking ----

function send(text) {
  if (running || text.trim() === "") return;
  conversation.messages.push({ role: "user", content: text.trim() });
  answer();
}

function edit(index, text) {
  if (running) return;
  conversation.messages.splice(index, Infinity, { role: "user", content: text.trim() });
  answer();
}

function again(index) {
  if (running) return;
  conversation.messages.splice(index);
  answer();
}

/** Asks for the answer to the conversation as it stands, and shows it as it comes. */
async function answer() {
  const owner = conversation;
  const asked = [...owner.messages];
  const message = { role: "assistant", content: "" };
  owner.messages.push(message);
  const index = owner.messages.length - 1;
  const activity = new Activity(model.facts);
  activities.set(message, activity);
  running = { controller: new AbortController(), index };
  keep(owner);
  transcript.show(owner.messages, activities, model.name);
  showEmpty();
  setRunning(true);
  transcript.update(index, true, activity);
  picture.show(activity, true);
  announce("Answering");
  let reason = null;
  try {
    for await (const chunk of server.chat(bodyOf(asked), running.controller.signal)) {
      reason = take(chunk, message, activity) ?? reason;
      if (owner !== conversation) continue; // another one was opened, and this is about to end
      transcript.update(index, true, activity);
      if (activity.length) picture.show(activity, true);
    }
    message.note = noteOf(reason, activity);
    announce(activity.length ? `The answer is complete. ${activity.line()}` : "The answer is complete.");
    clearNotice("answer");
  } catch (error) {
    onAnswerError(error, message, activity, () => owner === conversation && again(index));
  } finally {
    running = null;
    setRunning(false);
  }
  if (message.content === "" && !message.reasoning && message.failed === undefined) message.failed = "Nothing was answered.";
  keep(owner);
  if (owner !== conversation) return;
  transcript.update(index, false, activity);
  picture.show(activity, false);
  if (document.activeElement === document.body || document.activeElement === byId("stop")) byId("ask").focus();
}

function bodyOf(messages) {
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  // A question without an answer goes with it: many templates refuse two questions in a row.
  const empty = (message) => message?.role === "assistant" && message.content === "";
  const kept = messages.filter((message, i) => !empty(message) && !empty(messages[i + 1]));
  const sent = kept.map(({ role, content }) => ({ role, content }));
  return {
    ...(model.id === null ? {} : { model: model.id }),
    messages: [...system, ...sent],
    ...settings.request(),
    stream_options: { include_usage: true, include_activity: true },
  };
}

/** Adds what a chunk brings; returns why the answer ended, where it did. */
function take(chunk, message, activity) {
  const choice = chunk.choices?.[0];
  if (choice?.delta?.content) message.content += choice.delta.content;
  if (choice?.delta?.reasoning_content) message.reasoning = (message.reasoning ?? "") + choice.delta.reasoning_content;
  if (chunk.hotset?.activity) activity.add(chunk.hotset.activity);
  if (chunk.usage) activity.usage = chunk.usage;
  return choice?.finish_reason;
}

function noteOf(reason, activity) {
  const parts = activity.length ? [activity.line()] : [];
  const cached = activity.usage?.prompt_tokens_details?.cached_tokens;
  if (activity.usage) parts.push(`${activity.usage.completion_tokens} tokens`);
  if (cached) parts.push(`${cached} of the prompt's ${activity.usage.prompt_tokens} tokens remembered`);
  if (reason === "length") parts.push("cut at the longest length");
  return parts.join(" · ");
}

function onAnswerError(error, message, activity, askAgain) {
  if (error.name === "AbortError") {
    message.note = [activity.length ? activity.line() : "", "stopped"].filter(Boolean).join(" · ");
    if (message.content === "") message.failed = "Stopped before the first word.";
    announce("Stopped");
    return;
  }
  if (!(error instanceof server.ServerError)) {
    message.failed = "The page itself failed; the browser's console says how.";
    console.error(error);
    return;
  }
  message.failed = error.message;
  if (error.retryAfter !== null) {
    message.failed = `${message.failed.replace(/[.;,]$/, "")}. Try again in ${Math.ceil(error.retryAfter)} s.`;
  }
  announce(message.failed);
  if (error.kind === "network") lookAgain(FIRST_WAIT);
  if (error.kind === "network") notice("server", "The server does not answer. Trying again.");
  if (error.kind === "loading") onConnectError(error);
  if (error.kind === "key") {
    askForKey(server.hasKey() ? error.message : "", async () => {
      await connect();
      askAgain();
    });
  }
}

function stop() {
  running?.controller.abort();
}

function setRunning(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
  document.body.classList.toggle("running", is);
}

function showPictureOf(index) {
  const activity = activities.get(conversation.messages[index]);
  if (!activity?.length) return;
  picture.show(activity, running?.index === index);
  openPicture(true);
}

// ---- conversations ----

function keep(which) {
  if (!removed.has(which.id) && !store.save(which)) {
    notice("storage", "The browser has no room for more conversations: export them and delete some.");
  }
  listConversations();
}

function open(which) {
  stop();
  conversation = which;
  transcript.show(conversation.messages, activities, model.name);
  showEmpty();
  const last = conversation.messages.at(-1);
  picture.show(activities.get(last) ?? null);
  listConversations();
}

function showEmpty() {
  const empty = conversation.messages.length === 0;
  byId("empty").hidden = !empty;
  if (!empty) return;
  byId("empty-text").textContent = model.facts?.has_zeros
    ? `Only a part of ${model.name}’s neurons fire for each word. Beside the conversation you see which layers they are in, as it writes.`
    : model.name
      ? `${model.name} answers here, on this machine. Beside the conversation you see how fast, and what each word costs.`
      : "";
  byId("ideas").replaceChildren(
    ...IDEAS.map((idea) => h("li", {}, h("button", { type: "button", class: "idea", on: { click: () => send(idea) } }, idea))),
  );
}

function listConversations() {
  const items = store.all().map((one) => {
    const current = one.id === conversation.id;
    const openIt = h("button", { type: "button", class: "quiet name", "aria-current": current ? "true" : null }, one.title);
    openIt.addEventListener("click", () => {
      if (one.id !== conversation.id) open(one);
      openHistory(false);
      byId("ask").focus();
    });
    const act = (name, label, does) => {
      const button = h("button", { type: "button", class: "quiet small", "aria-label": `${label}: ${one.title}`, title: label }, icon(ICONS[name]));
      button.addEventListener("click", does);
      return button;
    };
    return h(
      "li",
      { class: current ? "current" : "" },
      openIt,
      act("save", "Save as a text", () => download(`${fileName(one.title)}.md`, "text/markdown", store.asMarkdown(one))),
      act("remove", "Delete", () => remove(one)),
    );
  });
  byId("conversations").replaceChildren(...(items.length ? items : [h("li", { class: "none" }, "None yet.")]));
}

const fileName = (title) => title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 40) || "conversation";

function remove(one) {
  store.remove(one);
  removed.add(one.id);
  const undo = h("button", { type: "button", class: "quiet" }, "Undo");
  undo.addEventListener("click", () => {
    removed.delete(one.id);
    store.save(one);
    clearNotice("deleted");
    listConversations();
  });
  notice("deleted", `“${one.title}” is deleted.`, "calm", undo);
  if (one.id === conversation.id) open(store.fresh());
  else listConversations();
  byId("new-chat").focus();
}

byId("export-all").addEventListener("click", () =>
  download("hotset-conversations.json", "application/json", store.exported(store.all())),
);
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const list = store.imported(await file.text());
    for (const one of list) removed.delete(one.id);
    const kept = list.filter((one) => store.save(one)).length;
    notice("import", kept === 1 ? "One conversation came in." : `${kept} conversations came in.`, "calm");
    if (kept < list.length) notice("storage", "The browser has no room for the rest of them.");
  } catch (error) {
    notice("import", error.message);
  }
  listConversations();
});
window.addEventListener("storage", (event) => {
  if (store.isOurs(event.key)) listConversations();
});

// ---- drawers, dialogs, theme ----

function openHistory(is) {
  document.body.classList.toggle("history-open", is);
  byId("show-history").setAttribute("aria-expanded", String(is));
  if (is) byId("hide-history").focus();
}

function openPicture(is) {
  const sheet = getComputedStyle(byId("show-picture")).display !== "none";
  document.body.classList.toggle("picture-open", is && sheet);
  byId("show-picture").setAttribute("aria-expanded", String(is && sheet));
  if (is && sheet) byId("hide-picture").focus();
}

byId("show-history").addEventListener("click", () => openHistory(!document.body.classList.contains("history-open")));
byId("hide-history").addEventListener("click", () => {
  openHistory(false);
  byId("show-history").focus();
});
byId("show-picture").addEventListener("click", () => openPicture(!document.body.classList.contains("picture-open")));
byId("hide-picture").addEventListener("click", () => {
  openPicture(false);
  byId("show-picture").focus();
});
byId("show-settings").addEventListener("click", () => {
  settings.build(byId("settings-body"), model.defaults);
  byId("settings").showModal();
});
for (const dialog of document.querySelectorAll("dialog")) {
  // A click beside it closes it.
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}
byId("new-chat").addEventListener("click", () => {
  open(store.fresh());
  openHistory(false);
  byId("ask").focus();
});

function nameTheme() {
  const other = scheme() === "dark" ? "Light" : "Dark";
  byId("theme").querySelector(".label").textContent = other;
}
byId("theme").addEventListener("click", () => {
  const next = scheme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("hotset.theme", next);
  } catch {
    // Until the page is left, then.
  }
});
onSchemeChange(nameTheme);
nameTheme();

// ---- the message ----

const ask = byId("ask");

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const text = ask.value;
  ask.value = "";
  fit();
  send(text);
});
byId("stop").addEventListener("click", stop);
ask.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (document.body.classList.contains("picture-open")) byId("hide-picture").click();
  else if (document.body.classList.contains("history-open")) byId("hide-history").click();
  else stop();
});

/** The box is as high as what is written. */
function fit() {
  ask.style.height = "auto";
  ask.style.height = `${ask.scrollHeight}px`;
}
ask.addEventListener("input", fit);

listConversations();
picture.setFacts(null);
showEmpty();
if (window.matchMedia("(pointer: fine)").matches) ask.focus();
connect();
