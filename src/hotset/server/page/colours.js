// The colours of the pictures. Idle layers have the page's background: light on a light page, dark on a dark one.
// Lightness changes monotonically, so that the scale is readable without seeing hues.

const RAMPS = {
  light: ["#f4ede2", "#f8d9ab", "#f2ac66", "#dd7130", "#ab3a14", "#62170b"],
  dark: ["#211d1a", "#4b2417", "#8d3a18", "#d4641f", "#f3a54a", "#ffefc2"],
};
const STEPS = 128;

const channels = (hex) => [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));

function table(stops) {
  const colours = stops.map(channels);
  return Array.from({ length: STEPS + 1 }, (_, i) => {
    const at = (i / STEPS) * (colours.length - 1), low = Math.min(Math.floor(at), colours.length - 2);
    return colours[low].map((from, c) => Math.round(from + (colours[low + 1][c] - from) * (at - low)));
  });
}

const TABLES = { light: table(RAMPS.light), dark: table(RAMPS.dark) };
const NAMES = of((mix) => `rgb(${mix.join(" ")})`);
const PIXELS = of((mix) => new Uint32Array(new Uint8Array([...mix, 255]).buffer)[0]);

function of(made) {
  return { light: TABLES.light.map(made), dark: TABLES.dark.map(made) };
}

const DARK = window.matchMedia("(prefers-color-scheme: dark)");

/** Return the page's current scheme, "light" or "dark". */
export function scheme() {
  return document.documentElement.dataset.theme || (DARK.matches ? "dark" : "light");
}

const step = (value) => Math.round(STEPS * Math.min(Math.max(value, 0), 1));

/** Return the colour of a value from 0 to 1. */
export const heat = (value) => NAMES[scheme()][step(value)];

/** The same as pixels of an image, for thousands of values. */
export function heatPixels() {
  const pixels = PIXELS[scheme()];
  return (value) => pixels[step(value)];
}

/** Return the colours of the scale, for a legend. */
export const heatStops = () => RAMPS[scheme()];

/** Call the listener when the scheme changes. */
export function onSchemeChange(listener) {
  DARK.addEventListener("change", listener);
  new MutationObserver(listener).observe(document.documentElement, { attributeFilter: ["data-theme"] });
}

// Other colours that a canvas draws with; the style sheet has the same ones for the rest of the page.
const INKS = {
  light: { ink: "#221c17", muted: "#6a5f54", line: "#ded3c4", cool: "#2c6d94", ember: "#c2531c", glow: "#f8e2cb" },
  dark: { ink: "#efe7dc", muted: "#a79b8e", line: "#3a332d", cool: "#74b6dc", ember: "#f08a45", glow: "#432818" },
};

export const inks = () => INKS[scheme()];

/** The possible ends of a scale of shares. */
export const ENDS = [0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1];
