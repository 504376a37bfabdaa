// The models of the server: the list, the chosen one, and the progress of loading.

import { factsOf } from "./picture.js";
import * as server from "./server.js";
import { percent } from "./units.js";

const CHOSEN = "hotset.model";
const AGAIN_MS = 2000; // between two attempts to follow the models' events

export const shortName = (id) => id.split("/").at(-1).replace(/\.gguf$/, "");

/** The state of the models. A server with one model reports no states: the model is loaded, or the server does not
 * answer. */
export class Models {
  /** changed(): the list, the choice or a state has changed. ready(): the facts of the chosen model are known. */
  constructor({ changed, ready }) {
    this.changed = changed;
    this.ready = ready;
    this.list = []; // entries of /v1/models
    this.name = null; // of the chosen one
    this.facts = null; // of the chosen one, once it is loaded
    this.defaults = {}; // its default parameters
    this.watching = false;
  }

  /** Load the list from the server. Throws ServerError. */
  async connect() {
    const list = await server.models();
    this.list = list;
    if (!this.find(this.name)) this.name = this.usual();
    await this.learn();
    if (this.hasStates) this.watch();
  }

  /** Return the model that was chosen last, or is loaded, or is first in the list. */
  usual() {
    let last = null;
    try {
      last = localStorage.getItem(CHOSEN);
    } catch {
      // Storage is not available.
    }
    const found = this.find(last) ?? this.list.find((one) => one.status?.value === "loaded") ?? this.list[0];
    return found?.id ?? null;
  }

  /** Find a model of the list. Adapters (MODEL:ADAPTER) are listed only while their model is loaded. */
  find(name) {
    const found = this.list.find((one) => one.id === name);
    if (found || !name?.includes(":")) return found;
    const parent = this.list.find((one) => one.id === name.slice(0, name.lastIndexOf(":")));
    return parent && !isLoaded(parent) ? { ...parent, id: name, parent: parent.id } : undefined;
  }

  get hasStates() {
    return this.list.some((one) => one.status !== undefined);
  }

  get chosen() {
    return this.find(this.name);
  }

  /** The name of the chosen model without an adapter; null on a server with one model. */
  get baseName() {
    return this.hasStates ? (this.chosen?.parent ?? this.name) : null;
  }

  get shortName() {
    return shortName(this.name ?? "");
  }

  get isLoaded() {
    return isLoaded(this.chosen);
  }

  /** Tokens of the chosen model's context; null if unknown. */
  get nContext() {
    return this.chosen?.max_model_len ?? null;
  }

  /** Whether the chosen model reads images. */
  get sees() {
    return this.chosen?.architecture?.input_modalities?.includes("image") ?? false;
  }

  /** Choose a model. name: null or unknown: the usual one. keep: for later conversations, too. */
  async choose(name, keep = false) {
    const wanted = this.find(name)?.id ?? this.usual();
    if (wanted === this.name) return;
    this.name = wanted;
    if (keep) {
      try {
        localStorage.setItem(CHOSEN, wanted);
      } catch {
        // It holds until the page is closed.
      }
    }
    this.facts = null;
    this.changed();
    try {
      await this.learn();
    } catch (error) {
      if (!(error instanceof server.ServerError)) throw error; // the next request will report it
    }
  }

  /** Load the facts of the chosen model, but only if it is loaded: asking would load it. */
  async learn() {
    const { name } = this;
    const props = this.isLoaded ? await server.props(this.baseName) : null;
    if (name !== this.name) return; // another model was chosen meanwhile
    this.facts = props?.hotset ?? null;
    this.defaults = props?.default_generation_settings?.params ?? {};
    this.changed();
    this.ready();
  }

  /** Follow the states of the models while the page is open. */
  async watch() {
    if (this.watching) return;
    this.watching = true;
    while (true) {
      try {
        for await (const { model, ...status } of server.states()) this.take(model, status);
      } catch (error) {
        if (!(error instanceof server.ServerError)) throw error;
        if (error.kind === "refused" || error.kind === "key") break; // a server without such events
      }
      await new Promise((go) => window.setTimeout(go, AGAIN_MS));
      await this.refresh();
    }
    this.watching = false;
  }

  /** Reload the list after a time without events. */
  async refresh() {
    try {
      this.list = await server.models();
      this.changed();
    } catch (error) {
      if (!(error instanceof server.ServerError)) throw error;
    }
  }

  take(name, status) {
    const model = this.find(name);
    if (!model) return void this.refresh();
    const was = model.status?.value, isChosen = name === this.baseName;
    for (const one of this.list) if (one === model || one.parent === name) one.status = status;
    this.changed();
    if (status.value !== "loaded" || was === "loaded") return;
    this.refresh() // its adapters are listed now
      .then(() => isChosen && this.learn())
      .catch(() => {});
  }

  /** Describe the chosen model in a few words. */
  describe() {
    if (this.name === null) return "";
    const state = this.isLoaded ? factsOf(this.facts) : [stateOf(this.chosen)];
    return [this.shortName, ...state].filter(Boolean).join(" · ");
  }
}

export const isLoaded = (model) => model !== undefined && (model.status === undefined || model.status.value === "loaded");

/** Return the progress of loading from 0 to 1; null if no load is running or it is unknown. */
export function progressOf(model) {
  const progress = model?.status?.value === "loading" ? model.status.progress : null;
  return progress?.total ? Math.min(progress.done / progress.total, 1) : null;
}

/** Describe a model's state in a few words. */
export function stateOf(model) {
  const value = model?.status?.value, progress = progressOf(model);
  if (value === undefined) return "";
  if (value === "loading") return progress === null ? "loading" : `loading, ${percent(progress)}`;
  if (value === "queued") return "waiting to be loaded";
  if (value === "unloaded") return model.status.failed ? "could not be loaded" : "not loaded";
  return value;
}
