// Formats numbers like units.py.

const SIZES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

/** 98.4 MiB, 4.3 GiB. */
export function size(bytes) {
  for (const [unit, scale] of SIZES) if (bytes >= scale) return `${(bytes / scale).toFixed(1)} ${unit}`;
  return `${bytes.toFixed(0)} B`;
}

/** 1.3 of 4.1 GiB; the unit once if both have the same. */
export function sizeOf(part, whole) {
  const [number, unit] = size(part).split(" ");
  const second = size(whole);
  if (`${number} ${unit}` === second) return second;
  return `${second.endsWith(` ${unit}`) ? number : `${number} ${unit}`} of ${second}`;
}

/** 31%, 0.4%. */
export function percent(share) {
  return share >= 0.0995 || share === 0 ? `${(100 * share).toFixed(0)}%` : `${(100 * share).toFixed(1)}%`;
}

/** 31.2%, for one cell. */
export const finePercent = (share) => `${(100 * share).toFixed(1)}%`;

/** 58, 5.2, for tokens per second. */
export const rate = (perSecond) => (perSecond >= 9.95 ? perSecond.toFixed(0) : perSecond.toFixed(1));

export const count = (n) => n.toLocaleString("en-US");

/** 1 token, 1,024 tokens. */
export const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** Show a token in one line: outer spaces visible, line ends as signs. */
export function shownToken(text) {
  return text === "" ? "·" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}
