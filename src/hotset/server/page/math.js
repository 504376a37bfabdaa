// TeX in an answer: where it begins and ends (extensions of the Markdown lexer), and MathML of it (Temml). A browser
// draws MathML itself: no fonts, no images. What Temml does not know stays the text that it is.

import { h } from "./dom.js";

const MOST_EXPANSIONS = 500; // of macros
const LARGEST = [20, 100]; // em, of rules and spaces
// A definition may stand for a thousand times its length: a formula of 5,000 characters would have millions of elements.
const DEFINES = /\\(?:[egx]?def|let|futurelet|global|long|(?:re)?newcommand|providecommand)(?![a-zA-Z])/;
const MATHML = "http://www.w3.org/1998/Math/MathML";
const NAMED = /^(?:id|href|src|name|xlink.*|on.*)$/i; // attributes that reach beyond a formula

// A dollar sign begins a formula where a character follows it, and ends it behind one, but not before a digit:
// "from $5 to $10" is text, and so is what has a backtick in it. A formula has 5,000 characters at most: a place where none ends costs no more than that.
const INLINE =
  /^\$\$([^$]{1,5000}?)\$\$|^\$(?!\s)((?:\\[^\n]|[^\\$\n`]){1,5000}?)(?<!\s)\$(?!\d)|^\\\(([^\n]{1,5000}?)\\\)|^\\\[([\s\S]{1,5000}?)\\\]/;
const BLOCK = /^ {0,3}(?:\$\$([^$]{1,5000}?)\$\$|\\\[([\s\S]{1,5000}?)\\\])[ \t]*(?:\n|$)/;

// The lexer asks before each piece of text where a formula may begin in it. It stops by itself at the next character
// that may mean something, and at an empty line: a look at all that follows would cost the square of the text's length.
const IN_TEXT = /^([`~]*[^\\<![`*~_\n$]*)(?:\$|\\[([])/;
const IN_PARAGRAPH = /^((?:(?!\n\n)[\s\S])*?)\n {0,3}(?:\$\$|\\\[)/;

/** What the lexer of marked gets: tokens {type: "math", text, display}. */
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

let temml = null; // its module, once a formula was there

/** An element with a formula; until Temml is loaded, with its source. */
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
    return; // no TeX that it knows, or nested too deeply
  }
  for (const element of drawn.querySelectorAll("*")) {
    if (element.namespaceURI !== MATHML && element.localName !== "span") return;
    for (const { name } of [...element.attributes]) if (NAMED.test(name)) element.removeAttribute(name);
  }
  node.replaceChildren(...drawn.childNodes);
}
