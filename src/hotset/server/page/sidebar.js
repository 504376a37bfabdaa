// The list of conversations: open, search, rename, pin, move to folders, save, delete, export, import.

import { announce, byId, download, h, icon, ICONS } from "./dom.js";
import * as folders from "./folders.js";
import { notice, undoable } from "./notices.js";
import { leaveHistory } from "./panels.js";
import * as store from "./store.js";

const AROUND = 40; // characters shown before and after a search result

export class Sidebar {
  /** open(conversation): the user opens it. current(): the open conversation. */
  constructor({ open, current }) {
    this.open = open;
    this.current = current;
    this.removed = new Set(); // ids of deleted conversations, whose running answers must not be stored
    this.expanded = null; // id of a conversation whose actions are shown, other than the open one
    this.renaming = false; // a title or folder name is being edited
    byId("search").addEventListener("input", () => {
      const n = this.list();
      announce(n === 1 ? "One conversation" : `${n} conversations`);
    });
    byId("export-all").addEventListener("click", () =>
      download("hotset-conversations.json", "application/json", store.exported(store.all(), this.folderNames())),
    );
    byId("new-folder").addEventListener("click", () => this.newFolder());
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.import(event.target));
    window.addEventListener("storage", (event) => {
      if (store.isOurs(event.key) || event.key === folders.KEY) this.list();
    });
  }

  /** Store a conversation, unless it was deleted. touched: it becomes the latest one. */
  keep(conversation, touched = true) {
    if (!this.removed.has(conversation.id) && !store.save(conversation, touched)) noRoom();
    this.list();
  }

  /** Show the conversations that match the search, otherwise all in their folders. Returns their number. */
  list() {
    if (this.renaming) return 0; // the field being edited stays
    const words = byId("search").value.trim().toLowerCase();
    const found = store.all().filter((one) => words === "" || one.title.toLowerCase().includes(words) || passage(one, words));
    const none = words === "" ? "No conversations yet." : "No conversation has these words.";
    const inFolders = words === "" ? [...folders.folders(found)] : [];
    const loose = words === "" ? found.filter((one) => one.folder === null) : found;
    byId("conversations").replaceChildren(
      ...inFolders.map(([name, closed]) => this.folder(name, closed, found.filter((one) => one.folder === name))),
      ...(found.length ? loose.map((one) => this.item(one, words)) : [h("li", { class: "none" }, none)]),
    );
    return found.length;
  }

  folderNames() {
    return [...folders.folders(store.all()).keys()];
  }

  folder(name, closed, inside) {
    const open = h(
      "button",
      { type: "button", class: "quiet folder-name", "aria-expanded": String(!closed) },
      icon(ICONS.forth), h("span", {}, name), h("small", {}, String(inside.length)),
    );
    open.addEventListener("click", () => {
      folders.keepFolder(name, !closed);
      this.list();
      this.focus("folder", name);
    });
    const head = h(
      "div",
      { class: "head" },
      open,
      h(
        "span",
        { class: "doing" },
        action("edit", "Rename the folder", name, () => this.renameFolder(head, name, inside)),
        action("remove", "Delete the folder", name, () => this.removeFolder(name, inside)),
      ),
    );
    const list = h("ul", { hidden: closed, "aria-label": name }, inside.map((one) => this.item(one, "")));
    return h("li", { class: "folder", dataset: { folder: name } }, head, list);
  }

  /** Create a folder whose name is edited immediately. */
  newFolder() {
    const names = this.folderNames();
    let name = "New folder";
    for (let i = 2; names.includes(name); i++) name = `New folder ${i}`;
    byId("search").value = "";
    if (!folders.keepFolder(name)) return noRoom();
    this.list();
    this.renameFolder(this.find("folder", name).querySelector(".head"), name, []);
  }

  renameFolder(head, name, inside) {
    this.write(head, name, `Name of the folder ${name}`, (text) => {
      const next = folders.folderName(text) ?? name;
      if (next !== name) {
        folders.forgetFolder(name);
        folders.keepFolder(next);
        this.moveAll(inside, next);
      }
      this.list();
      this.focus("folder", next);
    });
  }

  removeFolder(name, inside) {
    this.moveAll(inside, null);
    folders.forgetFolder(name);
    this.list();
    undoable("deleted", `Folder “${name}” deleted; its conversations are kept.`, () => {
      folders.keepFolder(name);
      this.moveAll(inside, name);
      this.list();
    });
    byId("new-folder").focus();
  }

  /** Move conversations in their stored state, which may have changed since they were listed. */
  moveAll(some, name) {
    const ids = new Set(some.map((one) => one.id));
    for (const one of store.all()) {
      if (!ids.has(one.id)) continue;
      const own = this.own(one);
      own.folder = name;
      if (!store.save(own, false)) noRoom();
    }
  }

  move(one) {
    folders.askForFolder(one, this.folderNames(), (name) => {
      if (name !== null) folders.keepFolder(name); // open, so that the conversations are visible
      this.moveAll([one], name);
      this.list();
      this.focus("id", one.id);
    });
  }

  /** Return the entry of a conversation (by "id") or of a folder (by "folder"). */
  find(kind, value) {
    return byId("conversations").querySelector(`[data-${kind}="${CSS.escape(value)}"]`);
  }

  focus(kind, value) {
    this.find(kind, value)?.querySelector("button")?.focus();
  }

  item(one, words) {
    const current = one.id === this.current().id;
    const openIt = h("button", { type: "button", class: "quiet name", "aria-current": current ? "true" : null }, one.title);
    openIt.addEventListener("click", () => {
      if (one.id !== this.current().id) this.open(one);
      leaveHistory();
      byId("ask").focus();
    });
    const act = (name, label, does, more) => action(name, label, one.title, does, more);
    const more = current ? null : action("more", "More", one.title, () => this.expand(one), { "aria-expanded": String(one.id === this.expanded) });
    const where = words && !one.title.toLowerCase().includes(words) ? passage(one, words) : null;
    const item = h(
      "li",
      { class: `${current ? "current" : ""} ${one.pinned ? "pinned" : ""}`, dataset: { id: one.id } },
      openIt,
      more,
      h(
        "span",
        { class: "doing", hidden: !current && one.id !== this.expanded },
        act("pin", one.pinned ? "Unpin" : "Pin", () => this.pin(one), { "aria-pressed": String(one.pinned) }),
        act("edit", "Rename", () => this.rename(item, one)),
        act("folder", "Move", () => this.move(one)),
        act("save", "Save as text", () => download(`${fileName(one.title)}.md`, "text/markdown", store.asMarkdown(one))),
        act("remove", "Delete", () => this.remove(one)),
      ),
      where === null ? null : h("p", { class: "where" }, where),
    );
    return item;
  }

  /** Show or hide the actions of a conversation that is not open. */
  expand(one) {
    this.expanded = this.expanded === one.id ? null : one.id;
    this.list();
    this.find("id", one.id)?.querySelector("[aria-expanded]")?.focus();
  }

  /** Return the open conversation's own object if it is the same one, so that changes apply to it. */
  own(one) {
    return one.id === this.current().id ? this.current() : one;
  }

  pin(one) {
    const own = this.own(one);
    own.pinned = !own.pinned;
    this.keep(own, false);
    this.find("id", one.id)?.querySelector("[aria-pressed]")?.focus();
  }

  rename(item, one) {
    this.write(item, one.title, `Title of ${one.title}`, (text) => {
      const own = this.own(one);
      if (text.trim() !== one.title) store.rename(own, text);
      this.keep(own, false);
      this.focus("id", one.id);
    });
  }

  /** Turn an entry into a text field. done(text): gets the old text if nothing changed. */
  write(item, before, label, done) {
    const input = h("input", { value: before, "aria-label": label, autocomplete: "off" });
    const end = (kept) => {
      if (!this.renaming) return;
      this.renaming = false;
      done(kept ? input.value : before);
    };
    this.renaming = true;
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      event.preventDefault();
      end(event.key === "Enter");
    });
    input.addEventListener("blur", () => end(true));
    item.replaceChildren(input);
    input.focus();
    input.select();
  }

  remove(one) {
    store.remove(one);
    this.removed.add(one.id);
    undoable("deleted", `“${one.title}” deleted.`, () => {
      this.removed.delete(one.id);
      store.save(one, false);
      this.list();
    });
    if (one.id === this.current().id) this.open(store.fresh());
    else this.list();
    byId("new-chat").focus();
  }

  async import(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      const { list, folders: names } = store.imported(await file.text());
      const left = folders.takeFolders(names, folders.folders(store.all()));
      for (const one of list) {
        this.removed.delete(one.id);
        if (left.has(one.folder)) one.folder = null;
      }
      const kept = list.filter((one) => store.save(one, false)).length;
      notice("import", importedText(kept, left.size), "calm");
      if (kept < list.length) notice("storage", "The browser has no room for the rest.");
      const open = list.find((one) => one.id === this.current().id);
      if (open) this.open(open);
    } catch (error) {
      notice("import", error.message);
    }
    this.list();
  }
}

function importedText(n, nLeft) {
  const text = n === 1 ? "One conversation was imported." : `${n} conversations were imported.`;
  if (nLeft === 0) return text;
  const left = nLeft === 1 ? "One folder was" : `${nLeft} folders were`;
  return `${text} ${left} left out: ${folders.MAX_FOLDERS} folders are the limit. The conversations are in the list without a folder.`;
}

const noRoom = () => notice("storage", "The browser has no room for more conversations: export them and delete some.");

/** Return an entry's icon button. */
function action(name, label, of, does, more = {}) {
  const properties = { type: "button", class: "quiet small", "aria-label": `${label}: ${of}`, title: label, ...more };
  const button = h("button", properties, icon(ICONS[name]));
  button.addEventListener("click", does);
  return button;
}

/** Return the text around the first match in a conversation; null: no match. */
function passage(conversation, words) {
  for (const { content } of conversation.messages) {
    const at = content.toLowerCase().indexOf(words);
    if (at < 0) continue;
    const begin = Math.max(at - AROUND, 0), end = at + words.length + AROUND;
    return `${begin > 0 ? "…" : ""}${content.slice(begin, end)}${end < content.length ? "…" : ""}`;
  }
  return null;
}

const fileName = (title) => title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim().slice(0, 40) || "conversation";
