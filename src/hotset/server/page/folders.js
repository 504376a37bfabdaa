// Folders of conversations. A conversation names its folder; here is which folders there are, empty ones too, and which
// of them are closed: one entry of localStorage.

import { byId, h, icon, ICONS } from "./dom.js";

export const KEY = "hotset.folders";
const MAX_NAME = 60;
export const MAX_FOLDERS = 256; // that a file brings: the list of them is made anew with each answer

/** A name as it is kept; null where it is none. */
export const folderName = (name) => (typeof name === "string" && name.trim().slice(0, MAX_NAME).trim()) || null;

/** All folders in the order of their names: name → whether it is closed. */
export function folders(conversations) {
  const found = new Map(conversations.filter((one) => one.folder !== null).map((one) => [one.folder, false]));
  for (const [name, closed] of kept()) found.set(name, closed);
  return new Map([...found].sort(([a], [b]) => a.localeCompare(b)));
}

/** Keeps a folder. Returns whether there was room. */
export const keepFolder = (name, closed = false) => write(kept().set(name, closed));

/** Keeps those of a file, as far as there are fewer than MAX_FOLDERS. names: of all; known: folders that are there.
 * Returns the names that are left out. */
export function takeFolders(names, known) {
  const fresh = [...new Set(names)].filter((name) => !known.has(name)), room = Math.max(MAX_FOLDERS - known.size, 0);
  write(fresh.slice(0, room).reduce((all, name) => all.set(name, false), kept()));
  return new Set(fresh.slice(room));
}

export function forgetFolder(name) {
  const all = kept();
  all.delete(name);
  write(all);
}

function kept() {
  try {
    const list = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return new Map(list.filter(([name]) => name === folderName(name)).map(([name, closed]) => [name, closed === true]));
  } catch {
    return new Map(); // not ours, or an older page's
  }
}

function write(all) {
  try {
    localStorage.setItem(KEY, JSON.stringify([...all]));
    return true;
  } catch {
    return false;
  }
}

let choose = null; // what is done with the folder that is chosen

/** Asks for the folder of a conversation; then(name), null: of none. */
export function askForFolder(conversation, names, then) {
  choose = then;
  const option = (name, label) => {
    const chosen = name === conversation.folder;
    const button = h("button", { type: "button", class: "quiet", "aria-current": chosen ? "true" : null }, icon(ICONS[name === null ? "close" : "folder"]), h("span", {}, label));
    button.addEventListener("click", () => pick(name));
    return h("li", {}, button);
  };
  byId("move-what").textContent = `Move “${conversation.title}” to:`;
  byId("folder-list").replaceChildren(...names.map((name) => option(name, name)), option(null, "No folder"));
  byId("folder-name").value = "";
  byId("move").showModal();
}

function pick(name) {
  byId("move").close();
  choose(name);
}

byId("move-close").addEventListener("click", () => byId("move").close());
byId("move-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = folderName(byId("folder-name").value);
  if (name !== null) pick(name);
});
