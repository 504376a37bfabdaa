// Renders the Markdown of an answer as nodes. The vendored lexer (marked) parses it; each kind of token becomes an
// element here, and everything else stays plain text. HTML is shown as text. An image becomes a link, because a model
// must not make the browser call another host. A link may lead only to the web or to mail.

import { Lexer, Marked } from "./vendor/marked.esm.js";
import { codeBlock } from "./code.js";
import { h } from "./dom.js";
import { mathExtensions, mathNode } from "./math.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const PART = 32; // blocks that the browser lays out and paints together (see style.css)
const MAX_DEPTH = 40; // of nested quotes and lists, beyond which the rest is plain text
const OPTIONS = new Marked({ gfm: true, breaks: true, extensions: mathExtensions }).defaults;

/** Return a safe link target; null if the link is not allowed. */
export function safeUrl(href) {
  try {
    const url = new URL(href); // no base: relative links would address this server
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** Shows a growing text. Blocks before the last one are final: their elements stay, so that a selection in them
 * stays, and their text is not parsed again. Open code blocks get new lines as plain text. So the work of an
 * update depends on the last block, not on the length of the answer. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.shown = []; // source text of each element
    this.settled = 0; // characters in final blocks
    this.nSettled = 0; // elements of final blocks
    this.links = {}; // their link definitions
    this.fence = null; // the open code block: {end, node, at, tail}
    this.lexed = 0; // characters parsed in all updates
  }

  /** text: extends the previous text. complete: it is final; then it is parsed once as a whole, because a link may
   * be used before its definition. */
  update(text, complete = false) {
    const source = text.replace(/\r\n?/g, "\n");
    if (complete) {
      const blocks = this.lex(source, {});
      this.fence = null;
      if (Object.keys(blocks.links ?? {}).length) this.shown = [];
      return this.replace(blocks, 0, true);
    }
    if (this.fence && this.growCode(source)) return;
    this.fence = null;
    const blocks = this.lex(source.slice(this.settled), this.links);
    this.replace(blocks, this.nSettled, false);
    this.settle(blocks, source);
  }

  lex(text, links) {
    this.lexed += text.length;
    try {
      const lexer = new Lexer(OPTIONS);
      Object.assign(lexer.tokens.links, links);
      return lexer.lex(text);
    } catch {
      return [{ type: "plain", raw: text }]; // nested too deeply for the parser
    }
  }

  /** Show blocks from the element `first` on; unchanged elements stay. */
  replace(blocks, first, complete) {
    const seen = blocks.filter(isShown), isWhole = (i) => complete || i < seen.length - 1;
    const keys = seen.map((block, i) => (block.type === "code" && isWhole(i) ? "whole " : "") + block.raw);
    let same = 0;
    while (same < keys.length && this.shown[first + same] === keys[same]) same++;
    this.cut(first + same);
    for (let i = same; i < seen.length; i++) this.append(first + i, blockNode(seen[i], 0, isWhole(i)));
    this.shown.splice(first, Infinity, ...keys);
  }

  /** Remove the blocks from number n on. */
  cut(n) {
    const { children } = this.element;
    while (children.length > Math.ceil(n / PART)) this.element.lastChild.remove();
    const kept = n - PART * (children.length - 1);
    while (this.element.lastChild?.childNodes.length > kept) this.element.lastChild.lastChild.remove();
  }

  append(n, node) {
    if (n % PART === 0) this.element.append(h("div", { class: "part" }));
    this.element.lastChild.append(node);
  }

  /** Mark the blocks before the last one as final. */
  settle(blocks, source) {
    const last = blocks.findLastIndex(isShown), before = blocks.slice(0, Math.max(last, 0));
    const length = (some) => some.reduce((sum, block) => sum + block.raw.length, 0);
    if (last < 0 || length(blocks) !== source.length - this.settled) return; // the lexer has normalised the text
    this.settled += length(before);
    this.nSettled += before.filter(isShown).length;
    this.links = { ...blocks.links };
    const open = blocks[last].type === "code" ? /^(`{3,}|~{3,})[^\n]*\n/.exec(blocks[last].raw) : null;
    if (open) this.openCode(open, source);
  }

  openCode([head, marks], source) {
    const end = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*$`);
    const node = this.element.lastChild.lastChild.querySelector("code")?.firstChild;
    this.fence = { end, node, at: this.settled + head.length, tail: node?.length ?? 0 };
    if (!node || !this.growCode(source)) this.fence = null;
    else this.shown[this.nSettled] = null; // its element grows without the lexer
  }

  /** Add new lines to an open code block; false: it is closed now. */
  growCode(source) {
    const { end, node, at, tail } = this.fence;
    const lines = source.slice(at).split("\n");
    if (lines.some((line) => end.test(line))) return false;
    // The last line is rewritten each time, and only when it cannot become the closing fence.
    const last = lines.pop(), whole = lines.map((line) => `${line}\n`).join("");
    const unfinished = /^ {0,3}[`~]*$/.test(last) ? "" : last;
    node.replaceData(node.length - tail, tail, whole + unfinished);
    this.fence.at += whole.length;
    this.fence.tail = unfinished.length;
    return true;
  }
}

const isShown = (block) => block.type !== "space" && block.type !== "def";

/** Return the element of a block. whole: the block is final. */
function blockNode(token, depth, whole) {
  if (depth > MAX_DEPTH) return h("p", {}, token.raw ?? "");
  switch (token.type) {
    case "heading":
      // The page itself uses the first two heading levels.
      return h(`h${Math.min(token.depth + 2, 6)}`, {}, inline(token.tokens, depth));
    case "paragraph":
      return h("p", {}, inline(token.tokens, depth));
    case "text":
      return h("p", {}, token.tokens ? inline(token.tokens, depth) : token.text);
    case "code":
      return codeBlock(token.text, token.lang, whole);
    case "blockquote":
      return h("blockquote", {}, blocks(token.tokens, depth, whole));
    case "list":
      return list(token, depth, whole);
    case "table":
      return table(token, depth);
    case "hr":
      return h("hr");
    case "math-block":
      return mathNode(token);
    default:
      return h("p", { class: "plain" }, token.raw ?? "");
  }
}

const blocks = (tokens, depth, whole) =>
  tokens.filter(isShown).map((token) => blockNode(token, depth + 1, whole));

function list(token, depth, whole) {
  const items = token.items.map((item) => {
    const box = item.task ? h("span", { class: "box" }, item.checked ? "☑ " : "☐ ") : null;
    const parts = item.tokens.filter((part) => part.type !== "space" && part.type !== "checkbox");
    // A tight list has its text in the item itself.
    const nodes = parts.map((part) =>
      part.type === "text" && !item.loose
        ? h("span", {}, part.tokens ? inline(part.tokens, depth) : part.text)
        : blockNode(part, depth + 1, whole),
    );
    return h("li", {}, box, nodes);
  });
  const start = token.ordered && Number.isInteger(token.start) ? token.start : 1;
  return token.ordered ? h("ol", { start }, items) : h("ul", {}, items);
}

function table(token, depth) {
  const cell = (name, data, i) =>
    h(name, { class: token.align[i] ?? "", scope: name === "th" ? "col" : null }, inline(data.tokens, depth));
  return h(
    "div",
    { class: "wide", tabIndex: 0, role: "region", "aria-label": "Table" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, token.header.map((data, i) => cell("th", data, i)))),
      h("tbody", {}, token.rows.map((row) => h("tr", {}, row.map((data, i) => cell("td", data, i))))),
    ),
  );
}

function inline(tokens, depth) {
  if (depth > MAX_DEPTH) return (tokens ?? []).map((token) => token.raw);
  return (tokens ?? []).flatMap((token) => {
    const inner = () => inline(token.tokens, depth + 1);
    switch (token.type) {
      case "strong":
        return h("strong", {}, inner());
      case "em":
        return h("em", {}, inner());
      case "del":
        return h("del", {}, inner());
      case "math":
        return mathNode(token);
      case "codespan":
        return h("code", {}, token.text);
      case "br":
        return h("br");
      case "link":
        return link(token.href, inner());
      case "image":
        return link(token.href, [`Image: ${token.text || token.href}`]);
      case "text":
        return token.tokens ? inner() : token.text;
      case "escape":
        return token.text;
      default:
        return token.raw ?? "";
    }
  });
}

function link(href, children) {
  const url = safeUrl(href);
  if (url === null) return h("span", { class: "nowhere", title: `This link cannot be opened: ${href}` }, children);
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, children);
}
