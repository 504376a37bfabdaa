// The heat map: a column per token, a row per layer, with the first layer at the bottom. Token means are above it,
// layer means to its right. The pointer or the arrow keys choose a cell.

import { heat, heatPixels, inks, onSchemeChange } from "./colours.js";
import { announce, h } from "./dom.js";
import { percent } from "./units.js";

const WIDEST = 16, NARROWEST = 1; // width of columns: all tokens fit until the narrowest, then the map scrolls
const LEFT = 34, RIGHT = 58, TOP = 34, BOTTOM = 20, BAR = 12, GAP = 8;

export class HeatMap {
  /** onChoose(token, layer): a cell was chosen; null, null: no cell. */
  constructor(root, onChoose) {
    this.onChoose = onChoose;
    this.activity = null;
    this.place = "all";
    this.chosen = null; // {token, layer}
    this.follow = true; // stays at the newest token until the user scrolls back
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.small = h("canvas"); // source of the enlarged image
    this.spacer = h("div", { class: "spacer" });
    this.scroller = h("div", { class: "scroller", tabIndex: -1 }, this.spacer);
    this.element = h(
      "div",
      {
        class: "heat",
        tabIndex: 0,
        role: "application",
        "aria-roledescription": "heat map",
        "aria-label": "Share of each layer's neurons that fired, for each token. Arrow keys move from cell to cell.",
        "aria-describedby": "readout",
      },
      this.canvas,
      this.scroller,
    );
    root.replaceChildren(this.element);
    this.listen();
    new ResizeObserver(() => this.redraw()).observe(this.element);
    onSchemeChange(() => this.redraw());
  }

  show(activity) {
    if (activity !== this.activity) {
      this.activity = activity;
      this.chosen = null;
      this.follow = true;
    }
    this.redraw();
  }

  /** Draw in the next frame, once for any number of calls. */
  redraw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  choose(token, layer, byKeys = false) {
    this.chosen = token === null ? null : { token, layer };
    if (byKeys && this.chosen) {
      this.bringIntoView(token);
      announce(this.activity.describe(token, layer));
    }
    this.onChoose(token, layer);
    this.redraw();
  }

  // ---- geometry ----

  measure() {
    const width = this.element.clientWidth;
    const rows = this.activity.nLayers, n = this.activity.length;
    const mapWidth = Math.max(width - LEFT - RIGHT - GAP, 60);
    const column = Math.min(Math.max(mapWidth / Math.max(n, 1), NARROWEST), WIDEST);
    const row = Math.min(Math.max(300 / rows, 4), 22);
    return { width, rows, n, mapWidth, column, row, mapHeight: rows * row, height: TOP + rows * row + BOTTOM + BAR };
  }

  cellAt(event) {
    const g = this.measure(), box = this.scroller.getBoundingClientRect();
    const token = Math.floor((event.clientX - box.left + this.scroller.scrollLeft) / g.column);
    const layer = g.rows - 1 - Math.floor((event.clientY - box.top) / g.row);
    if (token < 0 || token >= g.n) return [null, null];
    return [token, Math.min(Math.max(layer, 0), g.rows - 1)];
  }

  bringIntoView(token) {
    const g = this.measure(), left = token * g.column, shown = this.scroller.scrollLeft;
    if (left < shown) this.scroller.scrollLeft = left - g.column;
    else if (left + g.column > shown + g.mapWidth) this.scroller.scrollLeft = left + 2 * g.column - g.mapWidth;
  }

  // ---- the user's actions ----

  listen() {
    this.scroller.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this.choose(...this.cellAt(event));
    });
    this.scroller.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && document.activeElement !== this.element) this.choose(null, null);
    });
    this.scroller.addEventListener("click", (event) => this.choose(...this.cellAt(event)));
    this.scroller.addEventListener("scroll", () => {
      this.follow = this.scroller.scrollLeft + this.scroller.clientWidth >= this.scroller.scrollWidth - 8;
      this.redraw();
    });
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    this.element.addEventListener("focus", () => {
      if (!this.chosen && this.activity?.length) this.choose(this.activity.length - 1, 0);
    });
    this.element.addEventListener("blur", () => this.choose(null, null));
  }

  onKey(event) {
    if (!this.activity?.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.activity.length - 1, top = this.activity.nLayers - 1;
    let { token, layer } = this.chosen ?? { token: last, layer: 0 };
    if (event.key === "ArrowLeft") token--;
    else if (event.key === "ArrowRight") token++;
    else if (event.key === "ArrowUp") layer++;
    else if (event.key === "ArrowDown") layer--;
    else if (event.key === "PageUp") token -= 10;
    else if (event.key === "PageDown") token += 10;
    else if (event.key === "Home") token = 0;
    else if (event.key === "End") token = last;
    else return;
    event.preventDefault();
    this.choose(Math.min(Math.max(token, 0), last), Math.min(Math.max(layer, 0), top), true);
  }

  // ---- drawing ----

  draw() {
    if (!this.activity?.nLayers || !this.element.clientWidth) return;
    const g = this.measure(), ratio = window.devicePixelRatio || 1;
    this.element.style.height = `${g.height}px`;
    this.spacer.style.width = `${g.n * g.column}px`;
    Object.assign(this.scroller.style, {
      left: `${LEFT}px`, top: `${TOP}px`, width: `${g.mapWidth}px`, height: `${g.mapHeight + BOTTOM + BAR}px`,
    });
    if (this.follow) this.scroller.scrollLeft = this.scroller.scrollWidth;
    const canvas = this.canvas;
    if (canvas.width !== Math.round(g.width * ratio) || canvas.height !== Math.round(g.height * ratio)) {
      canvas.width = Math.round(g.width * ratio);
      canvas.height = Math.round(g.height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, g.width, g.height);
    const ink = inks();
    g.offset = this.scroller.scrollLeft;
    g.first = Math.floor(g.offset / g.column);
    g.last = Math.min(g.n, Math.ceil((g.offset + g.mapWidth) / g.column));
    this.scale = this.activity.scale;
    this.drawCells(pen, g);
    this.drawTokens(pen, g, ink);
    this.drawLayers(pen, g, ink);
    this.drawAxes(pen, g, ink);
    this.drawChosen(pen, g, ink);
  }

  /** Return a column's left edge and width in whole pixels; fractions would let neighbours shine through. */
  edges(g, token) {
    const left = LEFT + Math.round(token * g.column - g.offset);
    return [left, LEFT + Math.round((token + 1) * g.column - g.offset) - left];
  }

  drawCells(pen, g) {
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, g.mapWidth, g.mapHeight);
    pen.clip();
    if (g.column >= 6 && g.row >= 6) this.drawLargeCells(pen, g);
    else if (g.last > g.first) this.drawSmallCells(pen, g);
    pen.restore();
  }

  /** Draw cells with gaps between them. */
  drawLargeCells(pen, g) {
    for (let token = g.first; token < g.last; token++) {
      const [x, width] = this.edges(g, token);
      for (let layer = 0; layer < g.rows; layer++) {
        const share = this.activity.share(token, layer, this.place);
        if (share === null) continue;
        pen.fillStyle = heat(share / this.scale);
        const y = TOP + (g.rows - 1 - layer) * g.row;
        const bottom = Math.round(y + g.row), upper = Math.round(y);
        pen.fillRect(x, upper, width - 1, bottom - upper - 1);
      }
    }
  }

  /** Draw thousands of cells per frame as an enlarged image of one pixel per cell. */
  drawSmallCells(pen, g) {
    const n = g.last - g.first, colour = heatPixels();
    const image = new ImageData(n, g.rows), pixels = new Uint32Array(image.data.buffer);
    for (let layer = 0; layer < g.rows; layer++) {
      const row = (g.rows - 1 - layer) * n;
      for (let i = 0; i < n; i++) {
        const share = this.activity.share(g.first + i, layer, this.place);
        if (share !== null) pixels[row + i] = colour(share / this.scale);
      }
    }
    this.small.width = n;
    this.small.height = g.rows;
    this.small.getContext("2d").putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.small, LEFT + g.first * g.column - g.offset, TOP, n * g.column, g.mapHeight);
  }

  /** Draw the bars above the map: for each token, the share of all neurons that fired. */
  drawTokens(pen, g, ink) {
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, g.mapWidth, TOP);
    pen.clip();
    const room = TOP - 12;
    for (let token = g.first; token < g.last; token++) {
      const entry = this.activity.tokens[token];
      const height = Math.max(room * Math.min(entry.active_share / this.scale, 1), 1);
      const chosen = this.chosen?.token === token;
      pen.fillStyle = chosen ? ink.ink : token === 0 ? ink.line : ink.ember;
      const [x, width] = this.edges(g, token);
      const gap = width > 3 ? 1 : 0;
      pen.fillRect(x, TOP - 5 - height, width - gap, height);
      if (token > 0 && entry.step_tokens > 1) { // the step included other requests
        pen.fillStyle = ink.cool;
        pen.fillRect(x, TOP - 4, width - gap, 2);
      }
    }
    pen.restore();
  }

  /** Draw the bars to the right: each layer's mean, hot and cold side by side if a device computes. */
  drawLayers(pen, g, ink) {
    const left = LEFT + g.mapWidth + GAP, room = RIGHT - 4;
    const all = this.activity.layerShares(), cpu = this.activity.layerShares("cpu");
    const scale = Math.max(...all, 1e-9);
    for (let layer = 0; layer < g.rows; layer++) {
      const y = TOP + (g.rows - 1 - layer) * g.row;
      const height = Math.max(g.row - (g.row >= 6 ? 2 : 1), 1);
      const width = (room * all[layer]) / scale, cold = (room * cpu[layer]) / scale;
      const chosen = this.chosen?.layer === layer;
      if (this.activity.hasDevice) {
        pen.fillStyle = ink.cool;
        pen.fillRect(left, y, width - cold, height);
        pen.fillStyle = ink.ember;
        pen.fillRect(left + width - cold, y, cold, height);
      } else {
        pen.fillStyle = chosen ? ink.ink : ink.ember;
        pen.fillRect(left, y, width, height);
      }
    }
  }

  drawAxes(pen, g, ink) {
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = ink.muted;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const every = [1, 2, 5, 10, 20, 50].find((step) => step * g.row >= 26) ?? 50;
    for (let layer = 0; layer < g.rows; layer += every) {
      pen.fillText(String(layer), LEFT - 6, TOP + (g.rows - layer - 0.5) * g.row);
    }
    pen.textBaseline = "alphabetic";
    pen.textAlign = "left";
    pen.fillText("layer", 0, TOP - 8);
    const right = LEFT + g.mapWidth + GAP;
    pen.fillText("mean", right, TOP - 8);
    const base = TOP + g.mapHeight + 14;
    pen.textAlign = "center";
    const step = [5, 10, 20, 50, 100, 200, 500].find((size) => size * g.column >= 44) ?? 1000;
    for (let token = step; token <= g.n; token += step) {
      const x = LEFT + (token - 0.5) * g.column - g.offset;
      if (x > LEFT + 8 && x < LEFT + g.mapWidth - 8) pen.fillText(String(token), x, base);
    }
    pen.textAlign = "left";
    if (g.offset === 0 && g.n) pen.fillText("1", LEFT + 1, base);
    pen.fillText(percent(Math.max(...this.activity.layerShares(), 0)), right, base);
  }

  drawChosen(pen, g, ink) {
    if (!this.chosen || this.chosen.token >= g.n) return;
    const { token, layer } = this.chosen;
    const [x, width] = this.edges(g, token), y = TOP + (g.rows - 1 - layer) * g.row;
    if (x < LEFT - 1 || x > LEFT + g.mapWidth) return;
    pen.strokeStyle = ink.ink;
    pen.lineWidth = 1;
    pen.globalAlpha = 0.35;
    pen.strokeRect(x - 0.5, TOP - 0.5, width, g.mapHeight);
    pen.strokeRect(LEFT - 0.5, y - 0.5, Math.min(g.mapWidth, Math.round(g.n * g.column)), g.row);
    pen.globalAlpha = 1;
    pen.lineWidth = 2;
    pen.strokeRect(x - 1, y - 1, width + 1, g.row + 1);
  }
}
