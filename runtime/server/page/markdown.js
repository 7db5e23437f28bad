// Markdown to elements: marked reads it, and its tokens become elements here. There is no way from a text to markup: HTML
// in it stays text, links lead to the web or to mail, and images are links, for loading one tells its server that it was
// read.
import { copyButton, make } from "./dom.js";
import { Lexer, Tokenizer } from "./marked.esm.js";

// What takes marked more than linear time, or makes elements without end, is shown as plain text beyond these.
const LONGEST = 100_000; // characters of a text
const LONGEST_INLINE = 2_000; // characters of a paragraph or cell whose marks are read
const MOST_CELLS = 4_000; // of a table, which is made anew with each token that it gets
const MOST_ITEMS = 2_000; // of all lists, likewise
const MOST_BLOCKS = 4_000; // of all kinds, likewise
const MOST_MARKS = 12_000; // within all lines, likewise
const MOST_LINES = 8_000; // from the beginning of a list on
const DEPTH = 8; // of lists and quotes within each other
// Marked reads most of the rest of a text again for some blocks. A text that takes longer than this is plain, too.
const LONGEST_MS = 100;
const SLOW = new Error("a text takes too long to read");

/** Show `text` in `element`, leaving the blocks as they are that did not change. */
export function showMarkdown(element, text) {
  const blocks = readBlocks(text, element);
  const old = [...element.children];
  blocks.forEach((block, at) => {
    if (old[at]?.source === block.raw) return;
    const made = makeBlock(block);
    made.source = block.raw;
    if (old[at]) old[at].replaceWith(made);
    else element.append(made);
  });
  for (const gone of old.slice(blocks.length)) gone.remove();
}

/** Marked's tokenizer within the bounds above. */
class Bounded extends Tokenizer {
  depth = 0;
  blocks = 0;
  start = performance.now();

  /** The first rule of each block. */
  space(source) {
    this.check(++this.blocks > MOST_BLOCKS);
    return super.space(source);
  }

  check(isTooMuch) {
    if (isTooMuch || performance.now() - this.start > LONGEST_MS) throw SLOW;
  }

  table(source) {
    const head = source.indexOf("\n") + 1;
    if (!head || !/[ \t|:-]+(?:\n|$)/y.test(source.slice(head, head + LONGEST_INLINE))) return undefined;
    const rows = source.slice(0, LONGEST).split("\n", MOST_CELLS);
    const end = rows.findIndex((row) => !row.trim());
    const columns = rows[0].split("|").length;
    return (end < 0 ? rows.length : end) * columns > MOST_CELLS ? undefined : super.table(source);
  }

  list(source) {
    const isLong = source.split("\n", MOST_LINES).length === MOST_LINES;
    return isLong ? undefined : this.within(() => super.list(source));
  }

  blockquote(source) {
    return this.within(() => super.blockquote(source));
  }

  within(read) {
    if (this.depth === DEPTH) return undefined;
    this.depth += 1;
    try {
      return read();
    } finally {
      this.depth -= 1;
    }
  }
}

/** The blocks of a text that `element` shows; one that was too slow before is so, whatever follows. */
function readBlocks(text, element) {
  const source = text.replace(/\r\n?/g, "\n");
  const items = source.match(/^[ \t>]*(?:[-*+]|\d{1,9}[.)])(?=[ \t\n])/gm)?.length ?? 0;
  const plain = [{ type: "code", raw: source, text: source, lang: "" }];
  const isSlow = element.slow !== undefined && source.startsWith(element.slow);
  if (isSlow || source.length > LONGEST || items > MOST_ITEMS) return plain;
  try {
    return readTokens(source).filter(isShown);
  } catch (error) {
    if (error === SLOW) element.slow = source;
    return plain; // marked fails on some texts
  }
}

function readTokens(source) {
  const tokenizer = new Bounded();
  const lexer = new Lexer({ gfm: true, breaks: true, tokenizer });
  lexer.blockTokens(source, lexer.tokens);
  let marks = 0;
  for (const { src, tokens } of lexer.inlineQueue) {
    if (src.length > LONGEST_INLINE) tokens.push({ type: "text", raw: src, text: src });
    else lexer.inlineTokens(src, tokens);
    tokenizer.check((marks += tokens.length) > MOST_MARKS);
  }
  return lexer.tokens;
}

const isShown = ({ type }) => type !== "space" && type !== "def";

const BLOCKS = {
  code: ({ text, lang }) => makeCode(text, (lang ?? "").split(/\s/)[0]),
  // The page has headings of its own above: a title in an answer is one of the third level.
  heading: ({ depth, tokens }) => make(`h${Math.min(6, depth + 2)}`, {}, makeInline(tokens)),
  hr: () => make("hr"),
  blockquote: ({ tokens }) => make("blockquote", {}, tokens.filter(isShown).map(makeBlock)),
  list: ({ ordered, start, items }) =>
    make(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? String(start) : null }, items.map(makeItem)),
  table: ({ header, rows }) =>
    make("div", { class: "table", tabindex: "0" },
      make("table", {}, make("thead", {}, makeRow("th", header)),
        make("tbody", {}, rows.map((row) => makeRow("td", row))))),
  paragraph: ({ tokens }) => make("p", {}, makeInline(tokens)),
};

function makeBlock(token) {
  return BLOCKS[token.type]?.(token) ?? make("p", {}, token.tokens ? makeInline(token.tokens) : token.raw.trim());
}

function makeCode(code, language) {
  const head = make("figcaption", {}, make("span", {}, language || "text"), copyButton("Copy code", () => code));
  return make("figure", { class: "code" }, head, make("pre", { tabindex: "0" }, make("code", {}, code)));
}

/** An item; its first paragraph stands in it without an element of its own. */
function makeItem({ tokens }) {
  const [first, ...rest] = tokens.filter(isShown);
  const isText = first?.tokens && ["text", "paragraph"].includes(first.type);
  return make("li", {}, isText ? makeInline(first.tokens) : first ? makeBlock(first) : null, rest.map(makeBlock));
}

function makeRow(tag, cells) {
  const side = ({ align }) => (align === "center" || align === "right" ? align : null);
  return make("tr", {}, cells.map((cell) => make(tag, { class: side(cell) }, makeInline(cell.tokens))));
}

const INLINE = {
  strong: ({ tokens }) => make("strong", {}, makeInline(tokens)),
  em: ({ tokens }) => make("em", {}, makeInline(tokens)),
  del: ({ tokens }) => make("del", {}, makeInline(tokens)),
  codespan: ({ text }) => make("code", {}, text),
  br: () => make("br"),
  escape: ({ text }) => text,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  link: ({ href, tokens, raw }) => makeAnchor(href, makeInline(tokens)) ?? raw,
  image: ({ href, text, raw }) => makeAnchor(href, text || href) ?? raw,
};

/** The nodes of tokens within a line; what is none of the kinds above is text. */
function makeInline(tokens) {
  return tokens.map((token) => INLINE[token.type]?.(token) ?? (token.tokens ? makeInline(token.tokens) : token.raw)).flat();
}

/** A link to the web or to mail; null for any other address, also for a relative one, which would lead to this server. */
function makeAnchor(url, children) {
  if (!URL.canParse(url)) return null;
  const { href, protocol } = new URL(url);
  if (!["http:", "https:", "mailto:"].includes(protocol)) return null;
  return make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}
