// The activity of one answer's tokens, as the server counted it; docs/guides/serve.md describes the fields.

import { ENDS } from "./colours.js";
import { count, counted, finePercent, percent, rate, shownToken, size, sizeOf } from "./units.js";

const NEARLY_ALL = 0.97;

/** Return the bytes that a token read, including keys and values, and the bytes of a token with all neurons. */
export const touched = (token) => token.bytes_touched + (token.bytes_kv ?? 0);
export const total = (token) => token.bytes_total + (token.bytes_kv ?? 0);

// The averaged quantities, by name.
const COUNTED = { share: (token) => token.active_share, touched, total };

/** The activity of one answer: an entry per token, in order. The first token's step also read the prompt, so means
 * exclude it. Sums and counts are updated with each token, so that the display of a growing answer does not read
 * all tokens again. */
export class Activity {
  constructor(facts) {
    this.facts = facts; // of the model; null if the server sent none
    this.tokens = [];
    this.isSparse = this.hasDevice = false; // hasDevice: a device computed some neurons
    this.isShared = false; // some steps of this answer included tokens of other requests
    this.nLayers = 0;
    this.nDrafted = 0; // tokens drafted in the previous token's step (speculative decoding)
    this.below = ENDS.map(() => 0); // for each possible end of the scale, the number of cells not above it
    this.nCells = 0;
    this.clear();
  }

  add(entries) {
    for (const token of entries) {
      this.tokens.push(token);
      this.nDrafted += token.drafted === true;
      const { layers } = token;
      if (layers) {
        this.isSparse = true;
        this.nLayers ||= layers.active_share.length;
        this.hasDevice ||= layers.cpu_share !== undefined;
        this.nCells += layers.active_share.length;
        for (const share of layers.active_share) {
          for (let i = ENDS.length - 1; i >= 0 && share <= ENDS[i]; i--) this.below[i]++;
        }
      }
      if (this.tokens.length === 2) this.clear(); // the first token was included until now
      this.isShared ||= this.tokens.length > 1 && token.step_tokens > 1;
      this.count(token);
    }
  }

  clear() {
    this.sums = {}; // name → [sum, weight]
    this.layerSums = []; // per layer: fired, fired on the CPU, bytes
    this.layerWeight = 0;
  }

  /** Add a token to the sums. Tokens of one step share its counts, so each is weighted as its share of the step. */
  count(token) {
    const weight = token.step_tokens ?? 1, { layers } = token;
    for (const [name, of] of Object.entries(COUNTED)) {
      const value = of(token);
      if (value === undefined) continue;
      this.sums[name] ??= [0, 0];
      const sum = this.sums[name];
      sum[0] += value * weight;
      sum[1] += weight;
    }
    if (!layers) return;
    this.layerWeight += weight;
    for (const [i, share] of layers.active_share.entries()) {
      this.layerSums[i] ??= [0, 0, 0];
      const sum = this.layerSums[i];
      sum[0] += share * weight;
      sum[1] += (layers.cpu_share?.[i] ?? share) * weight;
      sum[2] += layers.bytes[i] * weight;
    }
  }

  get length() {
    return this.tokens.length;
  }

  /** The tokens that means include. */
  get counted() {
    return this.tokens.length > 1 ? this.tokens.slice(1) : this.tokens;
  }

  /** Return the mean of "share", "touched" or "total" over tokens. */
  mean(name) {
    const [sum, weight] = this.sums[name] ?? [0, 0];
    return weight ? sum / weight : 0;
  }

  /** Return the mean bytes that a token reads in a layer. */
  layerBytes(layer) {
    return this.layerWeight ? this.layerSums[layer][2] / this.layerWeight : 0;
  }

  /** Tokens per second after the first; 0 before the second token. */
  get perSecond() {
    const n = this.tokens.length;
    if (n < 2) return 0;
    const seconds = this.tokens[n - 1].seconds - this.tokens[0].seconds;
    return seconds > 0 ? (n - 1) / seconds : 0;
  }

  /** The end of the picture's colour scale. Nearly all cells are below it: a few much larger ones would make the
   * rest look alike. */
  get scale() {
    const needed = Math.ceil(NEARLY_ALL * (this.nCells - 1)) + 1;
    const end = ENDS.find((_, i) => this.below[i] >= needed) ?? 1;
    // The scale only grows, so that colours do not flicker.
    this.scaleSoFar = Math.max(this.scaleSoFar ?? 0, end);
    return this.scaleSoFar;
  }

  /** Return the share of a layer's neurons that fired for a token. place: "all", "device" or "cpu". */
  share(token, layer, place = "all") {
    const layers = this.tokens[token]?.layers;
    if (!layers) return null;
    const all = layers.active_share[layer];
    const cpu = layers.cpu_share?.[layer] ?? all;
    return place === "cpu" ? cpu : place === "device" ? Math.max(all - cpu, 0) : all;
  }

  /** Return the mean share of each layer. */
  layerShares(place = "all") {
    const of = { all: ([all]) => all, cpu: ([, cpu]) => cpu, device: ([all, cpu]) => all - cpu }[place];
    return this.layerSums.map((sum) => of(sum) / this.layerWeight);
  }

  /** The share of the firing neurons that the CPU computed. */
  get cpuPart() {
    const all = this.layerShares().map((share, i) => share * (this.facts?.n_ff?.[i] ?? 1));
    const cpu = this.layerShares("cpu").map((share, i) => share * (this.facts?.n_ff?.[i] ?? 1));
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    return sum(all) ? sum(cpu) / sum(all) : 1;
  }

  /** Return a summary of the answer as pairs [number, words]. */
  summary() {
    const parts = [];
    if (this.isSparse) {
      parts.push([percent(this.mean("share")), "of neurons fired"]);
      parts.push([sizeOf(this.mean("touched"), this.mean("total")), "read per token"]);
    } else {
      parts.push([size(this.mean("touched")), "read per token, the whole model"]);
    }
    if (this.hasDevice) parts.push([percent(1 - this.cpuPart), "of the neurons that fired were hot, on the GPU"]);
    if (this.nDrafted) parts.push([percent(this.nDrafted / this.length), "of tokens were drafted"]);
    if (this.perSecond) parts.push([rate(this.perSecond), "tokens per second"]);
    if (this.perSecond && !this.isSparse) {
      parts.push([`${((this.perSecond * this.mean("touched")) / 1e9).toPrecision(3)} GB/s`, "from memory"]);
    }
    return parts;
  }

  /** Return a summary in one line: 31% fired · 5.2 of 14.6 MiB read per token · 58 tok/s. */
  line() {
    const parts = [];
    if (this.isSparse) parts.push(`${percent(this.mean("share"))} fired`);
    parts.push(`${this.isSparse ? sizeOf(this.mean("touched"), this.mean("total")) : size(this.mean("touched"))} read per token`);
    if (this.perSecond) parts.push(`${rate(this.perSecond)} tok/s`);
    return parts.join(" · ");
  }

  /** Return a description of a token or, with a layer, of a cell. */
  describe(index, layer = null) {
    const token = this.tokens[index];
    if (!token) return "";
    const name = `Token ${index + 1}, “${shownToken(token.text)}”`;
    const first =
      index === 0 && token.step_tokens > 1 ? " (its step read the prompt)" : token.drafted ? " (drafted: from the same step as the one before)" : "";
    if (!token.layers) {
      const before = this.tokens[index - 1];
      const took = before ? `${(1000 * (token.seconds - before.seconds)).toFixed(1)} ms, ` : "";
      const kv = token.bytes_kv === undefined ? "" : `, ${size(token.bytes_kv)} of it keys and values`;
      return `${name}${first}: ${took}${size(touched(token))} read${kv}.`;
    }
    if (layer === null) {
      const all = sizeOf(touched(token), total(token));
      return `${name}${first}: ${finePercent(token.active_share)} of all neurons fired, ${all} read.`;
    }
    const share = token.layers.active_share[layer];
    const n = this.facts?.n_ff?.[layer];
    const fired = n ? ` of ${counted(n, "neuron")} fired (${count(Math.round(share * n))})` : " of the neurons fired";
    const cpu = token.layers.cpu_share?.[layer];
    const where =
      cpu === undefined ? "" : `, ${finePercent(Math.max(share - cpu, 0))} hot on the GPU and ${finePercent(cpu)} cold on the CPU`;
    return `${name}, layer ${layer}${first}: ${finePercent(share)}${fired}${where}, ${size(token.layers.bytes[layer])} read.`;
  }
}
