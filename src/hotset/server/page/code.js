// Code in an answer: a block with its language, a copy button and syntax colours (highlight.js).

import { copyFrom, h } from "./dom.js";

const LONGEST = 30_000; // characters of a block with syntax colours
const LONGEST_NAME = 24;

let highlighter = null; // the module, loaded for the first complete code block

/** Return a code block. complete: it does not grow any more, so it gets syntax colours. */
export function codeBlock(text, language, complete) {
  const name = (language ?? "").trim().split(/\s/)[0].slice(0, LONGEST_NAME);
  const code = h("code", {}, text);
  const copy = h("button", { type: "button", class: "quiet", "aria-label": "Copy the code" }, h("span", {}, "Copy"));
  copy.addEventListener("click", () => copyFrom(copy, code.textContent));
  if (complete && name && text.length <= LONGEST) colour(code, text, name);
  return h(
    "div",
    { class: "code" },
    h("div", { class: "row" }, h("span", {}, name || "text"), copy),
    h("pre", { tabIndex: 0, role: "region", "aria-label": `Code, ${name || "text"}` }, code),
  );
}

async function colour(code, text, name) {
  try {
    highlighter ??= (await import("./vendor/highlight.min.js")).default;
    if (!highlighter.getLanguage(name)) return;
    const found = highlighter.highlight(text, { language: name, ignoreIllegals: true });
    // The syntax tree, from which highlight.js makes HTML, becomes elements here.
    if (!found.errorRaised) code.replaceChildren(...nodes(found._emitter.rootNode));
  } catch (error) {
    if (!(error instanceof RangeError)) console.error(error); // nested too deeply: stays plain
  }
}

const nodes = (tree) =>
  tree.children.map((child) => {
    if (typeof child === "string") return document.createTextNode(child);
    const scope = /^[a-z_]+/.exec(child.scope?.startsWith("language:") ? "" : (child.scope ?? ""))?.[0];
    return h("span", { class: scope ? `code-${scope}` : null }, nodes(child));
  });
