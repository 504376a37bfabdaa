// The plot for a dense model, where every neuron counts for every token: the speed of tokens and the bytes that each
// one read.

import { inks, onSchemeChange } from "./colours.js";
import { announce, h } from "./dom.js";
import { rate } from "./units.js";

const LEFT = 34, TOP = 10, BOTTOM = 20, HEIGHT = 190;
const SMOOTH = 8; // tokens averaged in a point of the curve

export class SpeedPlot {
  constructor(root, onChoose) {
    this.onChoose = onChoose;
    this.activity = null;
    this.chosen = null;
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.element = h(
      "div",
      {
        class: "speed",
        tabIndex: 0,
        role: "application",
        "aria-roledescription": "plot",
        "aria-label": "Tokens per second, token by token. Arrow keys move from token to token.",
        "aria-describedby": "readout",
      },
      this.canvas,
    );
    root.replaceChildren(this.element);
    this.element.addEventListener("pointermove", (event) => this.choose(this.tokenAt(event)));
    this.element.addEventListener("pointerleave", () => this.choose(null));
    this.element.addEventListener("click", (event) => this.choose(this.tokenAt(event)));
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.redraw()).observe(this.element);
    onSchemeChange(() => this.redraw());
  }

  show(activity) {
    if (activity !== this.activity) this.chosen = null;
    this.activity = activity;
    this.redraw();
  }

  redraw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  choose(token, byKeys = false) {
    this.chosen = token;
    if (byKeys) announce(this.activity.describe(token));
    this.onChoose(token, null);
    this.redraw();
  }

  tokenAt(event) {
    const n = this.activity?.length ?? 0;
    if (n < 2) return null;
    const box = this.element.getBoundingClientRect();
    const at = (event.clientX - box.left - LEFT) / (box.width - LEFT);
    return Math.min(Math.max(Math.round(at * (n - 2)) + 1, 1), n - 1);
  }

  onKey(event) {
    const last = (this.activity?.length ?? 0) - 1;
    if (last < 1) return;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.choose(Math.min(Math.max((this.chosen ?? last) + steps[event.key], 1), last), true);
  }

  /** Return the tokens per second at a token, averaged over the last few. */
  speedAt(token) {
    const { tokens } = this.activity;
    const from = Math.max(token - SMOOTH, 0);
    const seconds = tokens[token].seconds - tokens[from].seconds;
    return seconds > 0 ? (token - from) / seconds : 0;
  }

  draw() {
    const width = this.element.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!this.activity || !width) return;
    this.element.style.height = `${HEIGHT}px`;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const ink = inks(), n = this.activity.length;
    // At most one point per pixel, for answers of any length.
    const points = Math.min(Math.max(n - 1, 0), Math.ceil(width)), last = Math.max(n - 2, 0);
    const places = Array.from({ length: points }, (_, i) => Math.round((i * last) / Math.max(points - 1, 1)));
    const speeds = places.map((at) => this.speedAt(at + 1));
    const most = niceEnd(Math.max(...speeds, 1)), bottom = HEIGHT - BOTTOM;
    const x = (at) => LEFT + ((width - LEFT - 2) * at) / Math.max(last, 1);
    const y = (speed) => bottom - ((bottom - TOP) * speed) / most;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const part of [0, 0.5, 1]) {
      pen.fillStyle = ink.muted;
      pen.fillText(rate(part * most).replace(".0", ""), LEFT - 6, y(part * most));
      pen.fillStyle = ink.line;
      pen.fillRect(LEFT, Math.round(y(part * most)), width - LEFT, 1);
    }
    if (speeds.length > 1) {
      pen.beginPath();
      for (const [i, speed] of speeds.entries()) pen.lineTo(x(places[i]), y(speed));
      pen.strokeStyle = ink.ember;
      pen.lineWidth = 2;
      pen.lineJoin = "round";
      pen.stroke();
      pen.lineTo(x(last), bottom);
      pen.lineTo(x(0), bottom);
      pen.fillStyle = ink.glow;
      pen.globalCompositeOperation = "destination-over";
      pen.fill();
      pen.globalCompositeOperation = "source-over";
    }
    pen.fillStyle = ink.muted;
    pen.textBaseline = "alphabetic";
    pen.textAlign = "left";
    pen.fillText("token 2", LEFT, HEIGHT - 5);
    pen.textAlign = "right";
    if (n > 2) pen.fillText(String(n), width, HEIGHT - 5);
    if (this.chosen !== null && this.chosen >= 1 && this.chosen < n) {
      pen.fillStyle = ink.ink;
      pen.fillRect(Math.round(x(this.chosen - 1)), TOP, 1, bottom - TOP);
      pen.beginPath();
      pen.arc(x(this.chosen - 1), y(this.speedAt(this.chosen)), 3.5, 0, 7);
      pen.fill();
    }
  }
}

/** Return a round number that is not below the value. */
function niceEnd(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 6, 8, 10].map((times) => times * power).find((end) => end >= value);
}
