// The list of conversations: open, search, rename, pin, save, delete, export, import.

import { announce, byId, download, h, icon, ICONS } from "./dom.js";
import { notice, undoable } from "./notices.js";
import { leaveHistory } from "./panels.js";
import * as store from "./store.js";

const AROUND = 40; // characters that are shown before and behind what was searched for

export class Sidebar {
  /** open(conversation): the reader wants to see it; current(): the one that is open. */
  constructor({ open, current }) {
    this.open = open;
    this.current = current;
    this.removed = new Set(); // ids of conversations that are not to be kept, though an answer of theirs still ends
    this.renaming = null; // the id of one whose title is being written
    byId("search").addEventListener("input", () => {
      const n = this.list();
      announce(n === 1 ? "One conversation" : `${n} conversations`);
    });
    byId("export-all").addEventListener("click", () =>
      download("hotset-conversations.json", "application/json", store.exported(store.all())),
    );
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.import(event.target));
    window.addEventListener("storage", (event) => {
      if (store.isOurs(event.key)) this.list();
    });
  }

  /** Keeps a conversation, unless it was deleted. touched: it is the latest one now. */
  keep(conversation, touched = true) {
    if (!this.removed.has(conversation.id) && !store.save(conversation, touched)) {
      notice("storage", "The browser has no room for more conversations: export them and delete some.");
    }
    this.list();
  }

  /** Shows those that have the words that are searched for. Returns how many. */
  list() {
    if (this.renaming !== null) return 0; // the one that is being written stays
    const words = byId("search").value.trim().toLowerCase();
    const found = store.all().filter((one) => words === "" || one.title.toLowerCase().includes(words) || passage(one, words));
    const none = words === "" ? "None yet." : "None has these words.";
    byId("conversations").replaceChildren(
      ...(found.length ? found.map((one) => this.item(one, words)) : [h("li", { class: "none" }, none)]),
    );
    return found.length;
  }

  item(one, words) {
    const current = one.id === this.current().id;
    const openIt = h("button", { type: "button", class: "quiet name", "aria-current": current ? "true" : null }, one.title);
    openIt.addEventListener("click", () => {
      if (one.id !== this.current().id) this.open(one);
      leaveHistory();
      byId("ask").focus();
    });
    const act = (name, label, does, more = {}) => {
      const properties = { type: "button", class: "quiet small", "aria-label": `${label}: ${one.title}`, title: label, ...more };
      const button = h("button", properties, icon(ICONS[name]));
      button.addEventListener("click", does);
      return button;
    };
    const where = words && !one.title.toLowerCase().includes(words) ? passage(one, words) : null;
    const item = h(
      "li",
      { class: `${current ? "current" : ""} ${one.pinned ? "pinned" : ""}`, dataset: { id: one.id } },
      openIt,
      h(
        "span",
        { class: "doing" },
        act("pin", one.pinned ? "Unpin" : "Pin", () => this.pin(one), { "aria-pressed": String(one.pinned) }),
        act("edit", "Rename", () => this.rename(item, one)),
        act("save", "Save as a text", () => download(`${fileName(one.title)}.md`, "text/markdown", store.asMarkdown(one))),
        act("remove", "Delete", () => this.remove(one)),
      ),
      where === null ? null : h("p", { class: "where" }, where),
    );
    return item;
  }

  /** The conversation itself, where it is open: what is changed is what the page goes on with. */
  own(one) {
    return one.id === this.current().id ? this.current() : one;
  }

  pin(one) {
    const own = this.own(one);
    own.pinned = !own.pinned;
    this.keep(own, false);
    byId("conversations").querySelector(`[data-id="${one.id}"] [aria-pressed]`)?.focus();
  }

  rename(item, one) {
    const input = h("input", { value: one.title, "aria-label": `Title of ${one.title}`, autocomplete: "off" });
    const end = (kept) => {
      if (this.renaming === null) return;
      this.renaming = null;
      const own = this.own(one);
      if (kept && input.value.trim() !== one.title) store.rename(own, input.value);
      this.keep(own, false);
      byId("conversations").querySelector(`[data-id="${one.id}"] .name`)?.focus();
    };
    this.renaming = one.id;
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
    undoable("deleted", `“${one.title}” is deleted.`, () => {
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
      const list = store.imported(await file.text());
      for (const one of list) this.removed.delete(one.id);
      const kept = list.filter((one) => store.save(one, false)).length;
      notice("import", kept === 1 ? "One conversation came in." : `${kept} conversations came in.`, "calm");
      if (kept < list.length) notice("storage", "The browser has no room for the rest of them.");
      const open = list.find((one) => one.id === this.current().id);
      if (open) this.open(open);
    } catch (error) {
      notice("import", error.message);
    }
    this.list();
  }
}

/** The words around the first place in a conversation that has them; null: none has. */
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
