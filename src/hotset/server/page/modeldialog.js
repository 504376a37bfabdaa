// The models dialog: the answering model, loading and unloading, and comparing two models.

import { Catalogue } from "./catalogue.js";
import { byId, h } from "./dom.js";
import { isLoaded, progressOf, shortName, stateOf } from "./models.js";
import * as server from "./server.js";
import { count, counted, percent, size } from "./units.js";

export class ModelDialog {
  /** choose(name): the user chose a model. settings: with presets. */
  constructor(models, settings, { choose }) {
    this.models = models;
    this.settings = settings;
    this.choose = choose;
    this.second = null; // {model, preset} next to the chosen model; null: one model answers
    this.problem = "";
    this.contexts = new Map(); // name → context of the next load, as text
    this.dialog = byId("models");
    this.catalogue = new Catalogue(() => models.refresh());
    byId("choose-model").addEventListener("click", () => {
      this.problem = "";
      this.dialog.showModal();
      this.draw();
    });
    byId("compare").addEventListener("change", (event) => {
      this.second = event.target.checked ? { model: this.other(), preset: "" } : null;
      this.drawCompare();
      this.nameButton();
    });
    byId("second-model").addEventListener("change", (event) => {
      this.second.model = event.target.value;
      this.nameButton();
    });
    byId("second-preset").addEventListener("change", (event) => (this.second.preset = event.target.value));
  }

  /** Return a model other than the chosen one, if there are several. */
  other() {
    const { list, name } = this.models;
    return (list.find((one) => one.id !== name) ?? list[0])?.id ?? null;
  }

  /** Update after a change of the models or their states. */
  update() {
    this.nameButton();
    if (this.dialog.open) this.draw();
  }

  nameButton() {
    const { models, second } = this;
    const text = second ? `${models.shortName} and ${shortName(second.model ?? "")}` : models.describe();
    byId("model").textContent = text;
    byId("choose-model").title = text;
    const progress = progressOf(models.chosen);
    byId("load").hidden = progress === null;
    byId("load").value = progress ?? 0;
  }

  draw() {
    byId("catalogue").hidden = !this.models.hasStates;
    this.drawList();
    this.drawCompare();
  }

  drawList() {
    const focused = document.activeElement?.dataset?.act;
    byId("model-list").replaceChildren(...this.models.list.map((model) => this.row(model)));
    byId("model-problem").textContent = this.problem;
    byId("model-problem").hidden = this.problem === "";
    if (focused) this.dialog.querySelector(`[data-act="${CSS.escape(focused)}"]`)?.focus();
  }

  row(model) {
    const { models } = this;
    const radio = h("input", { type: "radio", name: "model", checked: model.id === models.name, dataset: { act: `choose ${model.id}` } });
    radio.addEventListener("change", () => this.choose(model.id));
    const facts = [
      stateOf(model),
      kindOf(model.meta),
      memoryOf(model),
      model.max_model_len ? `context of ${counted(model.max_model_len, "token")}` : "",
    ];
    const progress = progressOf(model);
    return h(
      "li",
      {},
      h("label", {}, radio, h("span", {}, h("b", {}, shortName(model.id)), h("small", {}, facts.filter(Boolean).join(" · ")))),
      h("span", { class: "loads" }, this.contextField(model), this.act(model)),
      progress === null ? null : h("progress", { value: progress, "aria-label": `${shortName(model.id)} is being loaded: ${percent(progress)}` }),
      model.status?.error ? h("p", { class: "problem" }, model.status.error) : null,
    );
  }

  /** Return the button that loads or unloads a model. An adapter follows its model. */
  act(model) {
    if (!model.status || model.parent) return null;
    const [does, ask] = isLoaded(model) ? ["Unload", server.unload] : ["Load", server.load];
    if (!isLoaded(model) && model.status.value !== "unloaded") return null;
    const button = h(
      "button",
      { type: "button", class: "quiet", "aria-label": `${does} ${shortName(model.id)}`, dataset: { act: `load ${model.id}` } },
      does,
    );
    button.addEventListener("click", () => {
      const written = this.contexts.get(model.id) ?? "";
      if (isLoaded(model) || written === "") return this.run(() => ask(model.id));
      return this.run(() => ask(model.id, Number(written)));
    });
    return button;
  }

  /** Return the field for the context with which the model will be loaded. */
  contextField(model) {
    if (model.status?.value !== "unloaded" || model.parent) return null;
    const most = model.meta?.n_ctx_train || null;
    const input = h("input", {
      type: "number", min: 1, max: most, step: 1, inputMode: "numeric", value: this.contexts.get(model.id) ?? "",
      placeholder: model.max_model_len ? String(model.max_model_len) : "default",
      title: `Context in tokens${most ? `; the model was trained with ${count(most)}` : ""}`,
      "aria-label": `Context of ${shortName(model.id)}, in tokens`, dataset: { act: `context ${model.id}` },
    });
    input.addEventListener("input", () => this.contexts.set(model.id, input.validity.valid ? input.value : ""));
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // otherwise it would close the dialog
      this.dialog.querySelector(`[data-act="${CSS.escape(`load ${model.id}`)}"]`)?.click();
    });
    return input;
  }

  /** Run a load or unload request, and show a refusal. */
  async run(request) {
    this.problem = "";
    try {
      await request();
    } catch (error) {
      if (!(error instanceof server.ServerError)) throw error;
      this.problem = error.message;
    }
    this.drawList();
  }

  drawCompare() {
    const { models, second, settings } = this;
    byId("compare").checked = second !== null;
    byId("second").hidden = second === null;
    if (!second) return;
    if (!models.find(second.model)) second.model = this.other();
    byId("second-model").replaceChildren(...models.list.map((one) => h("option", { value: one.id }, shortName(one.id))));
    byId("second-model").value = second.model;
    const names = [...settings.presets.keys()].sort();
    byId("second-preset").replaceChildren(
      h("option", { value: "" }, "The same settings"),
      ...names.map((name) => h("option", { value: name }, name)),
    );
    if (!settings.presets.has(second.preset)) second.preset = "";
    byId("second-preset").value = second.preset;
  }
}

/** Describe whether idle neurons are skipped; "" if the server does not report it. */
const kindOf = (meta) => (meta?.has_zeros ? "sparse: idle neurons are skipped" : meta?.has_zeros === false ? "dense" : "");

/** Describe the memory that a model reserves or will reserve, or the size of its weights if that is unknown. */
function memoryOf({ status, meta }) {
  if (status?.memory) return `${size(status.memory)} reserved${partsOf(status)}`;
  if (meta?.needs) return `reserves ${size(meta.needs.memory)}${partsOf(meta.needs)}`;
  return meta?.size ? `${size(meta.size)} of weights` : "";
}

function partsOf({ memory, weights, cache }) {
  if (cache === undefined) return "";
  const buffers = memory - weights - cache;
  return `: weights ${size(weights)}, cache ${size(cache)}${buffers > 0 ? `, buffers ${size(buffers)}` : ""}`;
}
