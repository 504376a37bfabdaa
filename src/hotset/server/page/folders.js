// Folders of conversations. A conversation stores its folder's name; one entry of localStorage stores all folders,
// including empty ones, and which of them are closed.

import { byId, h, icon, ICONS } from "./dom.js";

export const KEY = "hotset.folders";
const MAX_NAME = 60;
export const MAX_FOLDERS = 256; // from an imported file: the list of folders is rebuilt with each answer

/** Normalise a folder name; null if it is not valid. */
export const folderName = (name) => (typeof name === "string" && name.trim().slice(0, MAX_NAME).trim()) || null;

/** Return all folders ordered by name: name → whether it is closed. */
export function folders(conversations) {
  const found = new Map(conversations.filter((one) => one.folder !== null).map((one) => [one.folder, false]));
  for (const [name, closed] of kept()) found.set(name, closed);
  return new Map([...found].sort(([a], [b]) => a.localeCompare(b)));
}

/** Store a folder. Returns false if the storage is full. */
export const keepFolder = (name, closed = false) => write(kept().set(name, closed));

/** Store the folders of an imported file, up to MAX_FOLDERS in total. names: of the file. known: existing folders.
 * Returns the names that were left out. */
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
    return new Map(); // invalid, or from an older page
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

let choose = null; // called with the chosen folder

/** Ask for a conversation's folder. then(name) gets null for no folder. */
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
