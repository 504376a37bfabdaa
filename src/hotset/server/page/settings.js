// How answers are drawn: what the reader sets is sent, what is left empty is the server's own default. A conversation has
// the settings of all, or its own; presets are sets of them with a name.

import { h } from "./dom.js";
import { FIELDS } from "./parameters.js"; // the server makes it from its table of parameters

const STORED = "hotset.settings", PRESETS = "hotset.presets";
const LONGEST_NAME = 60; // of a preset

/** The settings as the reader left them: {system, stop, temperature, ...}, of what was set only. */
export class Settings {
  /** changed(): the settings of the conversation itself are others now. */
  constructor(changed) {
    this.changed = changed;
    this.conversation = null; // the one that is open
    this.shared = checkedSettings(stored(STORED));
    const presets = Object.entries(stored(PRESETS) ?? {});
    this.presets = new Map(presets.map(([name, values]) => [name, checkedSettings(values)]));
  }

  /** Those of the conversation that is open. */
  get values() {
    return this.conversation?.settings ?? this.shared;
  }

  set(name, value) {
    if (value === null || value === "") delete this.values[name];
    else this.values[name] = value;
    this.keep();
  }

  keep() {
    if (this.conversation?.settings) this.changed();
    else store(STORED, this.shared);
  }

  /** Gives the conversation settings of its own, which begin as they are; or those of all again. */
  separate(is) {
    if (!this.conversation) return;
    this.conversation.settings = is ? { ...this.values } : null;
    this.changed();
  }

  use(preset) {
    const values = { ...this.presets.get(preset) };
    if (this.conversation?.settings) this.conversation.settings = values;
    else this.shared = values;
    this.keep();
  }

  savePreset(name) {
    this.presets.set(name, { ...this.values });
    store(PRESETS, Object.fromEntries(this.presets));
  }

  removePreset(name) {
    this.presets.delete(name);
    store(PRESETS, Object.fromEntries(this.presets));
  }

  /** Fills the panel. defaults: the server's, by name, where it has them. preset: the one that was used just now. */
  build(root, defaults = {}, preset = "") {
    const again = (focused, used) => {
      this.build(root, defaults, used);
      root.querySelector(focused)?.focus();
    };
    const text = (name, label, note, rows) => {
      const area = h("textarea", { id: `set-${name}`, rows, value: this.values[name] ?? "", "aria-describedby": `note-${name}` });
      area.addEventListener("input", () => this.set(name, area.value));
      return h("div", { class: "field" }, h("label", { htmlFor: area.id }, label), area, h("p", { id: `note-${name}` }, note));
    };
    const own = h("input", { type: "checkbox", id: "set-own", checked: this.conversation?.settings !== null });
    own.addEventListener("change", () => {
      this.separate(own.checked);
      again("#set-own");
    });
    const reset = h("button", { type: "button", class: "quiet", id: "set-reset" }, "Reset to the server's defaults");
    reset.addEventListener("click", () => {
      for (const { name } of FIELDS) this.set(name, null);
      this.set("stop", null);
      again("#set-reset");
    });
    root.replaceChildren(
      h("label", { class: "check" }, own, " Only for this conversation"),
      this.presetRow(again, preset),
      text("system", "System prompt", "Comes before the conversation, from the next message on.", 4),
      h("div", { class: "fields" }, FIELDS.map((field) => this.number(field, defaults[field.name]))),
      text("stop", "Stop at", "One text per line: the answer ends before it.", 2),
      reset,
    );
  }

  /** Presets: one is used, these settings are kept as one, one is deleted. */
  presetRow(again, used) {
    const names = [...this.presets.keys()].sort();
    const choose = h(
      "select",
      { id: "set-preset", disabled: names.length === 0 },
      h("option", { value: "" }, names.length ? "Choose one" : "None yet"),
      names.map((name) => h("option", {}, name)),
    );
    choose.value = used;
    choose.addEventListener("change", () => {
      if (choose.value === "") return;
      this.use(choose.value);
      again("#set-preset", choose.value);
    });
    const remove = h("button", { type: "button", class: "quiet", disabled: used === "" }, "Delete");
    remove.addEventListener("click", () => {
      this.removePreset(used);
      again("#set-preset-name");
    });
    const name = h("input", { id: "set-preset-name", maxLength: LONGEST_NAME, autocomplete: "off" });
    const save = h("button", { type: "button", class: "quiet" }, "Save");
    save.addEventListener("click", () => {
      if (name.value.trim() === "") return name.focus();
      this.savePreset(name.value.trim());
      again("#set-preset-name");
    });
    name.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // it would close the dialog
      save.click();
    });
    return h(
      "div",
      { class: "field presets" },
      h("label", { htmlFor: "set-preset" }, "Preset"),
      h("div", { class: "beside" }, choose, remove),
      h("label", { htmlFor: "set-preset-name" }, "Save these settings as a preset"),
      h("div", { class: "beside" }, name, save),
    );
  }

  number(field, fallback) {
    const { name, label, note } = field;
    const set = name in this.values;
    const problem = h("span", { class: "problem", role: "alert" });
    const input = h("input", {
      id: `set-${name}`,
      type: "number",
      inputMode: field.whole ? "numeric" : "decimal",
      min: field.min,
      max: field.max,
      step: field.whole ? 1 : "any",
      value: set ? String(this.values[name]) : "",
      placeholder: fallback === undefined || fallback === null ? (name === "seed" ? "random" : "default") : String(fallback),
      "aria-describedby": `note-${name}`,
    });
    const [low, high] = field.slider ?? [];
    const slider = field.slider && h("input", {
      type: "range", min: low, max: high, step: field.whole ? 1 : 0.01, "aria-label": `${label}, slider`,
    });
    const place = () => {
      if (slider) slider.value = input.value === "" ? (fallback ?? low) : input.value;
    };
    const take = () => {
      const value = input.value === "" ? null : Number(input.value);
      const fault = input.validity.badInput ? "not a number" : value === null ? "" : wrong(field, value);
      problem.textContent = fault;
      input.setAttribute("aria-invalid", String(fault !== ""));
      if (!fault) this.set(name, value);
    };
    place();
    input.addEventListener("input", () => {
      place();
      take();
    });
    slider?.addEventListener("input", () => {
      input.value = slider.value;
      take();
    });
    return h(
      "div",
      { class: "field" },
      h("label", { htmlFor: input.id }, label),
      h("div", { class: "pair" }, slider ?? h("span"), input),
      h("p", { id: `note-${name}` }, note, problem),
    );
  }
}

/** What is wrong with a value; "" where nothing is. */
function wrong(field, value) {
  if (!Number.isFinite(value)) return "not a number";
  if (field.whole && !Number.isSafeInteger(value)) return "a whole number";
  if (field.min !== null && value < field.min) return `at least ${field.min}`;
  if (field.max !== null && value > field.max) return `at most ${field.max}`;
  return "";
}

/** The fields of a request. */
export function requestOf(values) {
  const fields = {};
  for (const { name } of FIELDS) if (name in values) fields[name] = values[name];
  const stop = (values.stop ?? "").split("\n").filter((line) => line !== "");
  if (stop.length) fields.stop = stop;
  return fields;
}

/** What may be kept of stored settings. */
export function checkedSettings(value) {
  const kept = {};
  if (typeof value !== "object" || value === null) return kept;
  for (const name of ["system", "stop"]) if (typeof value[name] === "string") kept[name] = value[name];
  for (const field of FIELDS) {
    if (typeof value[field.name] === "number" && !wrong(field, value[field.name])) kept[field.name] = value[field.name];
  }
  return kept;
}

function stored(name) {
  try {
    return JSON.parse(localStorage.getItem(name) ?? "{}");
  } catch {
    return {};
  }
}

function store(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // They hold until the page is left.
  }
}
