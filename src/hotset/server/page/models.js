// The models of the server: which there are, which one answers, how far a load is.

import { factsOf } from "./picture.js";
import * as server from "./server.js";
import { percent } from "./units.js";

const CHOSEN = "hotset.model";
const AGAIN_MS = 2000; // after which the events of models are asked for again

export const shortName = (id) => id.split("/").at(-1).replace(/\.gguf$/, "");

/** What is known of the models. A server with one model has no states: it is loaded, or the server does not answer. */
export class Models {
  /** changed(): the list, the choice or a state is another one; ready(): the facts of the chosen model are known. */
  constructor({ changed, ready }) {
    this.changed = changed;
    this.ready = ready;
    this.list = []; // as /v1/models has them
    this.name = null; // of the chosen one
    this.facts = null; // of the chosen one, once it is loaded
    this.defaults = {}; // its parameters of requests that leave them out
    this.watching = false;
  }

  /** Asks the server anew. Throws ServerError. */
  async connect() {
    const list = await server.models();
    this.list = list;
    if (!this.find(this.name)) this.name = this.usual();
    await this.learn();
    if (this.hasStates) this.watch();
  }

  /** The one that was chosen last, or is loaded, or the first. */
  usual() {
    let last = null;
    try {
      last = localStorage.getItem(CHOSEN);
    } catch {
      // Nothing is kept.
    }
    const found = this.find(last) ?? this.list.find((one) => one.status?.value === "loaded") ?? this.list[0];
    return found?.id ?? null;
  }

  /** A model of the list. Of one that is not loaded the server does not list adapters (MODEL:ADAPTER): they are there once it is. */
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

  /** By which the server knows the chosen model, without an adapter; null on a server of one model. */
  get baseName() {
    return this.hasStates ? (this.chosen?.parent ?? this.name) : null;
  }

  get shortName() {
    return shortName(this.name ?? "");
  }

  get isLoaded() {
    return isLoaded(this.chosen);
  }

  /** Tokens of the chosen model's context; null where they are not known. */
  get nContext() {
    return this.chosen?.max_model_len ?? null;
  }

  /** name: null, or of no model here: the usual one. keep: for later conversations too. */
  async choose(name, keep = false) {
    const wanted = this.find(name)?.id ?? this.usual();
    if (wanted === this.name) return;
    this.name = wanted;
    if (keep) {
      try {
        localStorage.setItem(CHOSEN, wanted);
      } catch {
        // Until the page is left, then.
      }
    }
    this.facts = null;
    this.changed();
    try {
      await this.learn();
    } catch (error) {
      if (!(error instanceof server.ServerError)) throw error; // the next request says what is wrong
    }
  }

  /** Asks for the facts of the chosen model; one that is not loaded would be loaded for that. */
  async learn() {
    const { name } = this;
    const props = this.isLoaded ? await server.props(this.baseName) : null;
    if (name !== this.name) return; // another one was chosen meanwhile
    this.facts = props?.hotset ?? null;
    this.defaults = props?.default_generation_settings?.params ?? {};
    this.changed();
    this.ready();
  }

  /** Follows the states of models as long as the page lives. */
  async watch() {
    if (this.watching) return;
    this.watching = true;
    while (true) {
      try {
        for await (const { model, ...status } of server.states()) this.take(model, status);
      } catch (error) {
        if (!(error instanceof server.ServerError)) throw error;
        if (error.kind === "refused" || error.kind === "key") break; // a server that has no such events
      }
      await new Promise((go) => window.setTimeout(go, AGAIN_MS));
      await this.refresh();
    }
    this.watching = false;
  }

  /** What came or went while nothing was heard. */
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

  /** The chosen model in a few words. */
  describe() {
    if (this.name === null) return "";
    const state = this.isLoaded ? factsOf(this.facts) : [stateOf(this.chosen)];
    return [this.shortName, ...state].filter(Boolean).join(" · ");
  }
}

export const isLoaded = (model) => model !== undefined && (model.status === undefined || model.status.value === "loaded");

/** How far a load is, from 0 to 1; null where none runs or nothing is known of it. */
export function progressOf(model) {
  const progress = model?.status?.value === "loading" ? model.status.progress : null;
  return progress?.total ? Math.min(progress.done / progress.total, 1) : null;
}

/** What a model does, in a few words. */
export function stateOf(model) {
  const value = model?.status?.value, progress = progressOf(model);
  if (value === undefined) return "";
  if (value === "loading") return progress === null ? "loading" : `loading, ${percent(progress)}`;
  if (value === "queued") return "waiting to be loaded";
  if (value === "unloaded") return model.status.failed ? "could not be loaded" : "not loaded";
  return value;
}
