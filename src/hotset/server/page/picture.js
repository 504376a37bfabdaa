// The picture next to the conversation: the inner activity of the running or the chosen answer.

import { touched } from "./activity.js";
import { heat, heatStops, inks, onSchemeChange } from "./colours.js";
import { byId, h } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { SpeedPlot } from "./speedplot.js";
import { counted, finePercent, percent, shownToken, size } from "./units.js";

const SUMMARY_MS = 250; // between two updates of the numbers, so that they are readable
const TAPE_LENGTH = 1500; // tokens that are written out; the picture shows all
const HINT = "Point at a cell, or use the arrow keys, to see its numbers.";
const SPEED_HINT = "Point at the curve, or use the arrow keys, to see the numbers of a token.";

export class Picture {
  constructor() {
    this.facts = null;
    this.activity = null;
    this.plot = null;
    this.taped = 0;
    this.sentenceAt = 0;
    byId("places").addEventListener("change", (event) => {
      if (this.plot instanceof HeatMap) this.plot.place = event.target.value;
      this.plot?.redraw();
    });
    byId("tables").addEventListener("toggle", () => this.fillTables());
    byId("tape").addEventListener("click", (event) => {
      const index = event.target.dataset.token;
      if (index !== undefined && this.plot) this.chooseFromTape(Number(index));
    });
    onSchemeChange(() => {
      this.writeLegend();
      this.writeTape(true);
      this.drawStrip();
    });
    new ResizeObserver(() => this.drawStrip()).observe(byId("strip"));
  }

  /** Set the facts of the model before its first answer. */
  setFacts(facts) {
    this.facts = facts;
    byId("picture-title").textContent = facts?.has_zeros === false ? "Speed" : "Neurons that fire";
    byId("about-text").replaceChildren(...aboutText(facts));
    if (!this.activity) this.writeEmpty();
  }

  /** Show the activity of an answer; null: no answer. running: it still grows. */
  show(activity, running = false) {
    const another = activity !== this.activity;
    this.activity = activity;
    if (another) this.begin();
    if (activity?.length && !this.closedAbout) {
      byId("about").open = false; // it was open while there was nothing else to show
      this.closedAbout = true;
    }
    if (!activity?.length) return this.writeEmpty();
    const Kind = activity.isSparse ? HeatMap : SpeedPlot;
    if (!(this.plot instanceof Kind)) {
      this.plot = new Kind(byId("plot"), (token, layer) => this.describe(token, layer));
      this.describe(null, null);
    }
    this.plot.show(activity);
    const now = performance.now();
    if (another || !running || now - this.sentenceAt > SUMMARY_MS) {
      this.sentenceAt = now;
      this.writeSummary();
    }
    this.writeTape(false);
    this.drawStrip();
    if (!running) this.fillTables();
  }

  begin() {
    this.taped = 0;
    byId("tape").replaceChildren();
    this.scale = 0;
    this.describe(null, null);
  }

  writeEmpty() {
    const dense = this.facts?.has_zeros === false;
    byId("summary").textContent = dense
      ? "The next answer shows here how fast tokens are generated, and what each one reads."
      : "The next answer shows here which neurons fire for each token.";
    for (const id of ["amount", "places", "legend", "shared", "tape-box", "tables", "drafted"]) byId(id).hidden = true;
    byId("plot").replaceChildren(h("div", { class: "ghost", "aria-hidden": "true" }));
    byId("readout").textContent = "";
    byId("strip-text").textContent = "Live activity";
    this.plot = null;
  }

  writeSummary() {
    const { activity } = this;
    const parts = activity.summary();
    byId("summary").replaceChildren(
      ...parts.flatMap(([number, words], i) => [
        h("span", { class: "fact" }, h("b", {}, number), ` ${words}`),
        i < parts.length - 1 ? "; " : ".",
      ]),
    );
    byId("strip-text").textContent = activity.line();
    const sparse = activity.isSparse;
    const read = activity.mean("touched"), all = activity.mean("total");
    byId("amount").hidden = !sparse || read >= all;
    if (sparse) {
      byId("amount").querySelector("i").style.width = `${(100 * read) / all}%`;
      byId("amount").querySelector("p").textContent =
        `${size(all - read)} of ${size(all)} per token are not read: their neurons did not fire.`;
    }
    byId("places").hidden = !activity.hasDevice;
    byId("legend").hidden = !sparse;
    byId("tape-box").hidden = byId("tables").hidden = false;
    byId("drafted").hidden = !activity.nDrafted;
    byId("shared").hidden = !activity.isShared;
    byId("shared").textContent =
      "Other requests ran at the same time. Under a blue mark the numbers are means over all tokens of the step, which " +
      "read the weights once.";
    this.writeLegend();
  }

  writeLegend() {
    if (!this.activity?.isSparse) return;
    const ramp = h("i", { class: "ramp", "aria-hidden": "true" });
    ramp.style.background = `linear-gradient(to right, ${heatStops().join(", ")})`;
    const { scale } = this.activity;
    const end = scale < 1 ? `${percent(scale)} or more` : "100%";
    const keys = [h("span", { class: "scale" }, "0%", ramp, end), h("span", {}, "of a layer's neurons fired")];
    if (this.activity.hasDevice) {
      keys.push(h("span", {}, h("i", { class: "dot cool" }), "hot, on the GPU"), h("span", {}, h("i", { class: "dot ember" }), "cold, on the CPU"));
    }
    byId("legend").replaceChildren(...keys);
  }

  describe(token, layer) {
    const text = token === null || !this.activity ? null : this.activity.describe(token, layer);
    byId("readout").textContent = text ?? (this.plot instanceof SpeedPlot ? SPEED_HINT : HINT);
    byId("readout").classList.toggle("idle", text === null);
    byId("tape").querySelector(".chosen")?.classList.remove("chosen");
    const piece = token === null ? null : byId("tape").children[token];
    piece?.classList.add("chosen");
  }

  // ---- the answer, token by token ----

  writeTape(anew) {
    const { activity } = this, tape = byId("tape");
    if (!activity) return;
    if (anew) {
      tape.replaceChildren();
      this.taped = 0;
    }
    for (; this.taped < Math.min(activity.length, TAPE_LENGTH); this.taped++) {
      const token = activity.tokens[this.taped];
      const piece = h("span", { class: token.drafted ? "drafted" : null, dataset: { token: this.taped } }, shownToken(token.text));
      piece.style.setProperty("--heat", tokenHeat(activity, this.taped));
      tape.append(piece);
    }
    if (!anew) tape.scrollTop = tape.scrollHeight;
  }

  chooseFromTape(index) {
    if (!(this.plot instanceof HeatMap)) return this.plot.choose(index);
    this.plot.choose(index, this.plot.chosen?.layer ?? 0);
    this.plot.bringIntoView(index);
    this.describe(index, null);
  }

  /** Draw the picture as a line, for small screens. */
  drawStrip() {
    const canvas = byId("strip"), width = canvas.clientWidth, { activity } = this;
    if (!width) return;
    canvas.width = width;
    canvas.height = 1;
    const pen = canvas.getContext("2d"), n = activity?.length ?? 0;
    const columns = Math.max(n, 40), drawn = Math.min(Math.ceil((n * width) / columns), width);
    for (let x = 0; x < drawn; x++) {
      pen.fillStyle = tokenHeat(activity, Math.min(Math.floor((x * columns) / width), n - 1));
      pen.fillRect(x, 0, 1, 1);
    }
  }

  // ---- the same as tables, for screen readers ----

  fillTables() {
    if (!byId("tables").open || !this.activity) return;
    byId("tables-body").replaceChildren(...tables(this.activity));
  }
}

/** Return the colour of a token: the share of all neurons that fired, on the picture's scale. */
export function tokenHeat(activity, index) {
  const share = activity.tokens[index].active_share;
  return share === undefined ? inks().glow : heat(0.1 + (0.9 * share) / activity.scale);
}

function tables(activity) {
  const found = [];
  if (activity.isSparse) {
    const shares = activity.layerShares(), cold = activity.layerShares("cpu");
    const rows = shares.map((share, layer) => {
      const of = activity.counted.map((token) => token.layers?.active_share[layer] ?? 0);
      return [
        layer, finePercent(share), finePercent(Math.min(...of)), finePercent(Math.max(...of)),
        ...(activity.hasDevice ? [finePercent(cold[layer])] : []), size(activity.layerBytes(layer)),
      ];
    });
    const head = ["Layer", "Fired, mean", "Least", "Most", ...(activity.hasDevice ? ["On the CPU"] : []), "Read per token"];
    found.push(tableOf("Layers", head, rows));
  }
  const head = activity.isSparse ? ["Token", "Text", "Fired", "Read"] : ["Token", "Text", "At", "Read"];
  const rows = activity.tokens.map((token, i) => [
    i + 1,
    shownToken(token.text),
    activity.isSparse ? finePercent(token.active_share ?? 0) : `${token.seconds.toFixed(3)} s`,
    size(touched(token)),
  ]);
  found.push(tableOf("Tokens", head, rows));
  return found;
}

function tableOf(caption, head, rows) {
  return h(
    "div",
    { class: "wide", tabIndex: 0, role: "region", "aria-label": `${caption} of the picture` },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))),
      h(
        "tbody",
        {},
        rows.map(([first, ...rest]) =>
          h("tr", {}, h("th", { scope: "row" }, String(first)), rest.map((cell) => h("td", {}, cell))),
        ),
      ),
    ),
  );
}

/** Return short descriptions of the model, before its first answer. */
export function factsOf(facts) {
  if (!facts?.n_ff?.length) return [];
  const sum = facts.n_ff.reduce((a, b) => a + b, 0), same = sum === facts.n_ff[0] * facts.n_ff.length;
  const n = facts.n_ff.length;
  const mode = facts.sparsity ? [[facts.sparsity.mode, facts.sparsity.predictor].filter(Boolean).join(" by ")] : [];
  return [same ? `${counted(n, "layer")} × ${counted(sum / n, "neuron")}` : `${counted(n, "layer")}, ${counted(sum, "neuron")}`, ...mode];
}

function aboutText(facts) {
  const texts = [];
  if (facts?.has_zeros === false) {
    texts.push(
      "This model computes every neuron for every token" + (facts.sparsity ? ` (${facts.sparsity.reason})` : "") +
        ": each token reads all weights, and the keys and values of all tokens before it.",
      "In a model of the ReLU family most neurons are zero. hotset does not read their weights, and shows here which neurons fire.",
    );
  } else {
    texts.push(
      "Each column is a token of the answer, each row a layer of the model, the first at the bottom. The hotter a cell, " +
        "the more of the layer's neurons fired: their value was not zero. The others add nothing, " +
        (facts?.sparsity?.mode === "dense" ? "but dense mode reads their weights, too." : "and their weights are not read."),
      "The first column is left out of the means: its step also read the prompt.",
      "The bottom row, layer 0, is striped: that layer sees little more than the token itself, so its share jumps from " +
        "token to token, and the same token looks the same again. Layers above see more of the text and change less.",
    );
  }
  const known = factsOf(facts);
  if (known.length) texts.push(`This model: ${known.join(", ")}.`);
  return texts.map((text) => h("p", {}, text));
}
