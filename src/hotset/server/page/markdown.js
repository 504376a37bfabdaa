// Markdown of an answer, as nodes. The vendored lexer (marked) says what the text means; here each kind of token
// becomes an element, and what is not listed stays the text that it is: HTML is text, an image is a link (a model
// must not make the browser call another host), a link leads to the web or to mail or nowhere.

import { lexer } from "./vendor/marked.esm.js";
import { copyFrom, h } from "./dom.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const MAX_DEPTH = 40; // of quotes in lists in quotes: beyond it the rest is plain text

/** Where a link may lead; null: nowhere. */
export function safeUrl(href) {
  try {
    const url = new URL(href); // no base: what is relative would be a place of this server
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** Shows a text that grows: blocks that stay the same keep their elements, so that a selection in them stays. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.shown = []; // source of each block that is shown
  }

  update(text) {
    let blocks;
    try {
      blocks = lexer(text, { gfm: true, breaks: true });
    } catch {
      blocks = [{ type: "plain", raw: text }]; // nested beyond what a parser bears
    }
    blocks = blocks.filter((block) => block.type !== "space" && block.type !== "def");
    let same = 0;
    while (same < blocks.length && same < this.shown.length && this.shown[same] === blocks[same].raw) same++;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of blocks.slice(same)) this.element.append(blockNode(block, 0));
    this.shown = blocks.map((block) => block.raw);
  }
}

function blockNode(token, depth) {
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
      return codeBlock(token.text, token.lang);
    case "blockquote":
      return h("blockquote", {}, blocks(token.tokens, depth));
    case "list":
      return list(token, depth);
    case "table":
      return table(token, depth);
    case "hr":
      return h("hr");
    default:
      return h("p", { class: "plain" }, token.raw ?? "");
  }
}

const blocks = (tokens, depth) =>
  tokens.filter((token) => token.type !== "space" && token.type !== "def").map((token) => blockNode(token, depth + 1));

function list(token, depth) {
  const items = token.items.map((item) => {
    const box = item.task ? h("span", { class: "box" }, item.checked ? "☑ " : "☐ ") : null;
    const parts = item.tokens.filter((part) => part.type !== "space" && part.type !== "checkbox");
    // A tight list has its words in the item itself.
    const nodes = parts.map((part) =>
      part.type === "text" && !item.loose
        ? h("span", {}, part.tokens ? inline(part.tokens, depth) : part.text)
        : blockNode(part, depth + 1),
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

function codeBlock(text, language) {
  const name = (language ?? "").trim().split(/\s/)[0].slice(0, 24);
  const copy = h("button", { type: "button", class: "quiet", "aria-label": "Copy the code" }, h("span", {}, "Copy"));
  copy.addEventListener("click", () => copyFrom(copy, text));
  return h(
    "div",
    { class: "code" },
    h("div", { class: "row" }, h("span", {}, name || "text"), copy),
    h("pre", { tabIndex: 0, role: "region", "aria-label": `Code, ${name || "text"}` }, h("code", {}, text)),
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
  if (url === null) return h("span", { class: "nowhere", title: `Leads nowhere from here: ${href}` }, children);
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, children);
}
