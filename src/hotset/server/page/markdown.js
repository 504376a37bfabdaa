// Markdown of an answer, as nodes. The vendored lexer (marked) says what the text means; here each kind of token
// becomes an element, and what is not listed stays the text that it is: HTML is text, an image is a link (a model
// must not make the browser call another host), a link leads to the web or to mail or nowhere.

import { Lexer, Marked } from "./vendor/marked.esm.js";
import { codeBlock } from "./code.js";
import { h } from "./dom.js";
import { mathExtensions, mathNode } from "./math.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const PART = 32; // blocks that the browser lays out and paints together, or not at all: style.css
const MAX_DEPTH = 40; // of quotes in lists in quotes: beyond it the rest is plain text
const OPTIONS = new Marked({ gfm: true, breaks: true, extensions: mathExtensions }).defaults;

/** Where a link may lead; null: nowhere. */
export function safeUrl(href) {
  try {
    const url = new URL(href); // no base: what is relative would be a place of this server
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** Shows a text that grows. Blocks before the last one do not change any more: they keep their elements, so that a
 * selection in them stays, and neither they nor their text are looked at again. Code whose fence is open gets new lines
 * as text. So the work of an update does not grow with the answer, but with its last block. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.shown = []; // of each element what it was made from
    this.settled = 0; // characters of the blocks that do not change
    this.nSettled = 0; // their elements
    this.links = {}; // definitions of links in them
    this.fence = null; // of code that is open: {end, node, at, tail}
    this.lexed = 0; // characters that the lexer has read, in all updates
  }

  /** text: begins with the one before. complete: no more is to come; then it is read once as a whole, since a link may
   * be defined behind the place where it is used. */
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
      return [{ type: "plain", raw: text }]; // nested beyond what a parser bears
    }
  }

  /** Shows blocks from the element `first` on; elements that are right stay. */
  replace(blocks, first, complete) {
    const seen = blocks.filter(isShown), isWhole = (i) => complete || i < seen.length - 1;
    const keys = seen.map((block, i) => (block.type === "code" && isWhole(i) ? "whole " : "") + block.raw);
    let same = 0;
    while (same < keys.length && this.shown[first + same] === keys[same]) same++;
    this.cut(first + same);
    for (let i = same; i < seen.length; i++) this.append(first + i, blockNode(seen[i], 0, isWhole(i)));
    this.shown.splice(first, Infinity, ...keys);
  }

  /** Removes the blocks from the one of that number on. */
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

  /** Blocks before the last one are as they will be. */
  settle(blocks, source) {
    const last = blocks.findLastIndex(isShown), before = blocks.slice(0, Math.max(last, 0));
    const length = (some) => some.reduce((sum, block) => sum + block.raw.length, 0);
    if (last < 0 || length(blocks) !== source.length - this.settled) return; // the lexer has changed the text
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
    else this.shown[this.nSettled] = null; // its element goes on without the lexer
  }

  /** Adds what is new of code that is open; false: it is closed now. */
  growCode(source) {
    const { end, node, at, tail } = this.fence;
    const lines = source.slice(at).split("\n");
    if (lines.some((line) => end.test(line))) return false;
    // The last line is written anew each time, and not before it can no longer become the end.
    const last = lines.pop(), whole = lines.map((line) => `${line}\n`).join("");
    const unfinished = /^ {0,3}[`~]*$/.test(last) ? "" : last;
    node.replaceData(node.length - tail, tail, whole + unfinished);
    this.fence.at += whole.length;
    this.fence.tail = unfinished.length;
    return true;
  }
}

const isShown = (block) => block.type !== "space" && block.type !== "def";

/** whole: no more of the block is to come. */
function blockNode(token, depth, whole) {
  if (depth > MAX_DEPTH) return h("p", {}, token.raw ?? "");
  switch (token.type) {
    case "heading":
      // The page's own headings end at the second level.
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
    // A tight list has its words in the item itself.
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
