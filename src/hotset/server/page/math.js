// TeX in an answer: extensions of the Markdown lexer that find formulas, and their MathML (Temml). The browser draws
// MathML without extra fonts or images. Anything that Temml rejects stays text.

import { h } from "./dom.js";

const MOST_EXPANSIONS = 500; // of macros
const LARGEST = [20, 100]; // em, of rules and spaces
// A macro can expand to a thousand times its length: a formula of 5,000 characters would have millions of elements.
const DEFINES = /\\(?:[egx]?def|let|futurelet|global|long|(?:re)?newcommand|providecommand)(?![a-zA-Z])/;
const MATHML = "http://www.w3.org/1998/Math/MathML";
const NAMED = /^(?:id|href|src|name|xlink.*|on.*)$/i; // attributes with effects outside the formula

// A dollar sign begins a formula if a character follows, and ends it if a character precedes and no digit follows:
// "from $5 to $10" is text, and so is text with a backtick. A formula has at most 5,000 characters, which limits the
// cost of an unclosed one.
const INLINE =
  /^\$\$([^$]{1,5000}?)\$\$|^\$(?!\s)((?:\\[^\n]|[^\\$\n`]){1,5000}?)(?<!\s)\$(?!\d)|^\\\(([^\n]{1,5000}?)\\\)|^\\\[([\s\S]{1,5000}?)\\\]/;
const BLOCK = /^ {0,3}(?:\$\$([^$]{1,5000}?)\$\$|\\\[([\s\S]{1,5000}?)\\\])[ \t]*(?:\n|$)/;

// The lexer asks before each piece of text where a formula may begin. It stops at the next special character and at an
// empty line by itself. Searching all remaining text would be quadratic.
const IN_TEXT = /^([`~]*[^\\<![`*~_\n$]*)(?:\$|\\[([])/;
const IN_PARAGRAPH = /^((?:(?!\n\n)[\s\S])*?)\n {0,3}(?:\$\$|\\\[)/;

/** The extensions of marked's lexer: tokens {type: "math", text, display}. */
export const mathExtensions = [
  {
    name: "math",
    level: "inline",
    start: (text) => IN_TEXT.exec(text)?.[1].length,
    tokenizer: (text) => {
      const found = INLINE.exec(text);
      if (!found) return undefined;
      const display = found[1] ?? found[4];
      return { type: "math", raw: found[0], text: (display ?? found[2] ?? found[3]).trim(), display: display !== undefined };
    },
  },
  {
    name: "math-block",
    level: "block",
    start: (text) => IN_PARAGRAPH.exec(text)?.[1].length,
    tokenizer: (text) => {
      const found = BLOCK.exec(text);
      return found ? { type: "math-block", raw: found[0], text: (found[1] ?? found[2]).trim(), display: true } : undefined;
    },
  },
];

let temml = null; // its module, loaded for the first formula

/** Return an element with a formula; until Temml is loaded, with its source. */
export function mathNode(token) {
  const node = h("span", { class: token.display ? "math display" : "math", title: token.text }, token.text);
  if (temml) draw(node, token);
  else load().then(() => draw(node, token), () => {});
  return node;
}

async function load() {
  temml ??= (await import("./vendor/temml.min.js")).default;
}

function draw(node, { text, display }) {
  if (DEFINES.test(text)) return;
  const drawn = h("span");
  try {
    const options = { displayMode: display, throwOnError: true, trust: false, maxExpand: MOST_EXPANSIONS, maxSize: LARGEST };
    temml.render(text, drawn, options);
  } catch {
    return; // unknown TeX, or nested too deeply
  }
  for (const element of drawn.querySelectorAll("*")) {
    if (element.namespaceURI !== MATHML && element.localName !== "span") return;
    for (const { name } of [...element.attributes]) if (NAMED.test(name)) element.removeAttribute(name);
  }
  node.replaceChildren(...drawn.childNodes);
}
