// Builds elements. Strings become text nodes: this page never parses HTML, whatever a model generates (and the content
// security policy forbids innerHTML).

/** Create an element. properties: class, dataset, on (listeners by event), element properties and attributes.
 * children: nodes and strings; null and false are skipped. */
export function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") element.className = value;
    else if (key === "dataset") Object.assign(element.dataset, value);
    else if (key === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (key.includes("-") || !(key in element)) element.setAttribute(key, value === true ? "" : value);
    else element[key] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

/** Return a 16 × 16 icon of one path. It is hidden from screen readers, because a name is next to it. */
export function icon(path) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", path);
  svg.append(line);
  return svg;
}

export const ICONS = {
  copy: "M5.5 5.5v-3h8v8h-3M2.5 5.5h8v8h-8z",
  again: "M13 8a5 5 0 1 1-1.5-3.6M13 2v3h-3",
  edit: "M3 13l.6-2.7L10.8 3a1.2 1.2 0 0 1 1.7 0l.5.5a1.2 1.2 0 0 1 0 1.7L5.700 12.400z",
  remove: "M3 4.500h10M6.500 4.500v-2h3v2M4.500 4.500l.5 9h6l.5-9",
  close: "M4 4l8 8M12 4l-8 8",
  back: "M10 3.500 5.500 8 10 12.500",
  folder: "M2.500 4h4l1.500 1.800h5.500v6.700h-11z",
  forth: "M6 3.500 10.500 8 6 12.500",
  more: "M3.500 8h.01M8 8h.01M12.500 8h.01",
  pin: "M5.500 2.500h5M6.500 2.500v4l-2 2.500h7l-2-2.500v-4M8 9v4.500",
  save: "M8 2.500v8M4.500 7 8 10.500 11.500 7M3 13.500h10",
};

/** Announce a message to screen readers. A repeated message is announced again. */
export function announce(message) {
  const live = byId("live");
  live.replaceChildren();
  window.setTimeout(() => live.replaceChildren(message), 60);
}

/** Copy a text, and show the success on the button. */
export async function copyFrom(button, text) {
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    said = copiedByHand(text) ? "Copied" : "Not allowed";
  }
  const label = button.querySelector("span") ?? button;
  const before = button.dataset.label ?? label.textContent;
  button.dataset.label = before;
  label.textContent = said;
  announce(said);
  window.setTimeout(() => (label.textContent = before), 1600);
}

// Without a secure origin (http on another host) the clipboard is missing: use the old command.
function copiedByHand(text) {
  const area = h("textarea", { class: "hidden", value: text, "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

/** Let the browser save a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  link.click();
  window.setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
