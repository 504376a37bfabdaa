// Models that can be downloaded: search, download, progress.

import { byId, h } from "./dom.js";
import * as server from "./server.js";
import { percent, size } from "./units.js";

const WAIT_MS = 200; // after the last key press, before the search

export class Catalogue {
  /** downloaded(): called when a download is complete. */
  constructor(downloaded) {
    this.downloaded = downloaded;
    this.found = [];
    this.pulls = new Map(); // name → {controller, share, problem} of a download
    byId("catalogue").addEventListener("toggle", () => byId("catalogue").open && this.search());
    byId("catalogue-search").addEventListener("input", () => {
      window.clearTimeout(this.timer);
      this.timer = window.setTimeout(() => this.search(), WAIT_MS);
    });
    byId("catalogue-search").addEventListener("keydown", (event) => event.key === "Enter" && event.preventDefault());
  }

  async search() {
    const words = byId("catalogue-search").value;
    let note;
    try {
      const found = await server.catalogue(words);
      if (words !== byId("catalogue-search").value) return; // the search text has changed meanwhile
      this.found = found;
      note = found.length ? "" : "No model has these words.";
    } catch (error) {
      if (!(error instanceof server.ServerError)) throw error;
      note = error.message;
    }
    byId("catalogue-note").textContent = note;
    this.draw();
  }

  draw() {
    const focused = document.activeElement?.dataset?.pull;
    byId("catalogue-list").replaceChildren(...this.found.map((entry) => this.row(entry)));
    if (focused) byId("catalogue-list").querySelector(`[data-pull="${CSS.escape(focused)}"]`)?.focus();
  }

  row(entry) {
    const pull = this.pulls.get(entry.id), runs = pull?.controller != null;
    const facts = [entry.has_zeros ? "sparse: idle neurons are skipped" : "", entry.size ? size(entry.size) : "", entry.needs];
    const label = runs ? "Cancel" : "Download";
    const button = h("button", { type: "button", class: "quiet", "aria-label": `${label} ${entry.id}`, dataset: { pull: entry.id } }, label);
    button.addEventListener("click", () => (runs ? pull.controller.abort() : this.pull(entry)));
    return h(
      "li",
      {},
      h("span", {}, h("b", {}, entry.id), h("small", {}, facts.filter(Boolean).join(" · "))),
      entry.is_stored ? h("small", {}, "downloaded") : button,
      runs ? h("progress", { value: pull.share, "aria-label": `Download of ${entry.id}: ${percent(pull.share ?? 0)}` }) : null,
      pull?.problem ? h("p", { class: "problem", role: "alert" }, pull.problem) : null,
    );
  }

  async pull(entry) {
    const state = { controller: new AbortController(), share: null, problem: "" };
    this.pulls.set(entry.id, state);
    this.draw();
    try {
      for await (const { completed, total } of server.pull(entry.id, state.controller.signal)) {
        if (!total) continue;
        state.share = completed / total;
        this.draw();
      }
      entry.is_stored = true;
      this.downloaded();
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof server.ServerError)) throw error;
      state.problem = error.name === "AbortError" ? "Stopped. What was downloaded is kept, and the next download continues there." : error.message;
    } finally {
      state.controller = null;
      this.draw();
    }
  }
}
