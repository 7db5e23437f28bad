// Markdown to elements. There is no way from a text to markup: HTML in it stays text, links lead to the web or to mail,
// and images are links, for loading one would tell its server that it was read. Every step takes linear time.
import { copyButton, make } from "./dom.js";

const DEPTH = 8; // of lists and quotes within each other; what is deeper is a paragraph

/** Show `text` in `element`, leaving the blocks as they are that did not change. */
export function showMarkdown(element, text) {
  const blocks = splitBlocks(text.replace(/\r\n?/g, "\n").split("\n"), 0);
  const old = [...element.children];
  blocks.forEach((block, at) => {
    if (old[at]?.source === block.source) return;
    const made = block.make();
    made.source = block.source;
    if (old[at]) old[at].replaceWith(made);
    else element.append(made);
  });
  for (const gone of old.slice(blocks.length)) gone.remove();
}

// The kinds of blocks; the first that answers takes its lines, and a paragraph takes what is left.
const BLOCKS = [readFence, readHeading, readRule, readQuote, readList, readTable];

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;

/** Whether a line begins a block, and so ends a paragraph; a number in running text is no list. */
function begins(lines, at) {
  const line = lines[at];
  const item = ITEM.exec(line);
  const isItem = item && (item[2].length === 1 || /^1[.)]/.test(item[2]));
  return isItem || [FENCE, HEADING, QUOTE].some((start) => start.test(line)) || isRule(line) || readTable(lines, at);
}

/** Blocks as { source, make }: a block with the same source is the same block. */
function splitBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = readBlock(lines, at, depth) ?? readParagraph(lines, at);
    blocks.push({ source: lines.slice(at, block.end).join("\n"), make: block.make });
    at = block.end;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  for (const read of BLOCKS) {
    const block = read(lines, at, depth);
    if (block) return block;
  }
  return null;
}

const makeBlocks = (lines, depth) => splitBlocks(lines, depth).map((block) => block.make());
const isRule = (line) => /^(-{3,}|\*{3,}|_{3,})$/.test(line.replace(/[ \t]/g, ""));

function readFence(lines, at) {
  const fence = FENCE.exec(lines[at]);
  if (!fence) return null;
  const [, indent, marks, info] = fence;
  const closes = (line) => line.trim().length >= marks.length && line.trim() === marks[0].repeat(line.trim().length);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent.length, line.search(/\S|$/))));
  return { end: end + 1, make: () => makeCode(code.join("\n"), info.trim().split(/\s/)[0]) };
}

function makeCode(code, language) {
  const head = make("figcaption", {}, make("span", {}, language || "text"), copyButton("Copy code", () => code));
  return make("figure", { class: "code" }, head, make("pre", { tabindex: "0" }, make("code", {}, code)));
}

function readHeading(lines, at) {
  const heading = HEADING.exec(lines[at]);
  if (!heading) return null;
  const text = heading[2].replace(/[ \t]#+[ \t]*$/, "");
  // The page has headings of its own above: a title in an answer is one of the third level.
  return { end: at + 1, make: () => make(`h${Math.min(6, heading[1].length + 2)}`, {}, makeInline(text)) };
}

function readRule(lines, at) {
  return isRule(lines[at]) ? { end: at + 1, make: () => make("hr") } : null;
}

function readQuote(lines, at, depth) {
  if (depth === DEPTH || !QUOTE.test(lines[at])) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { end, make: () => make("blockquote", {}, makeBlocks(inner, depth + 1)) };
}

function readList(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (depth === DEPTH || !first) return null;
  const ordered = first[2].length > 1;
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    if (item && item[2].length > 1 === ordered && item[1].length < first[1].length + 2) {
      items.push([line.slice(item[0].length)]);
      continue;
    }
    const indent = line.search(/\S|$/);
    const goesOn = indent > first[1].length + 1 || !line.trim() || (lines[end - 1].trim() && !item && !begins(lines, end));
    if (!goesOn) break;
    items.at(-1).push(line.slice(Math.min(indent, first[0].length)));
  }
  const start = ordered && parseInt(first[2], 10) !== 1 ? String(parseInt(first[2], 10)) : null;
  return { end, make: () => make(ordered ? "ol" : "ul", { start }, items.map((item) => makeItem(item, depth))) };
}

function makeItem(lines, depth) {
  const blocks = makeBlocks(lines, depth + 1);
  const [first] = blocks;
  return make("li", {}, first?.tagName === "P" ? [...first.childNodes] : (first ?? null), blocks.slice(1));
}

const splitCells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function readTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-")) return null;
  const head = splitCells(lines[at]);
  const marks = splitCells(lines[at + 1]);
  if (marks.length !== head.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null));
  const row = (tag, cells) => make("tr", {}, align.map((side, i) => make(tag, { class: side }, makeInline(cells[i] ?? ""))));
  const makeTable = () =>
    make("table", {},
      make("thead", {}, row("th", head)),
      make("tbody", {}, lines.slice(at + 2, end).map((line) => row("td", splitCells(line)))));
  return { end, make: () => make("div", { class: "table", tabindex: "0" }, makeTable()) };
}

function readParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return { end, make: () => make("p", {}, makeInline(text)) };
}

// Within a line -------------------------------------------------------------------------------------------------------

const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };
const ESCAPE = /\\([!-/:-@[-`{-~])/y;
const LINK = /!?\[([^[\]\n]{0,300})\]\(((?:[^\s()<>]|\([^\s()<>]{0,200}\)){1,1000})(?:[ \t]+"[^"\n]{0,200}")?\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`]{1,1000}/y;
const MARKS = /\*\*?|__?|~~/y;
const PLAIN = /[^\\`![*_~h\n]+/y; // "h" may begin an address

/** The nodes of a text: each mark opens an element or closes the one that it opened; left open, it is text. */
export function makeInline(text, links = true) {
  const open = [{ mark: "", nodes: [] }]; // no mark is open twice, so this is never deeper than there are marks
  const unclosed = new Set(); // lengths of backticks that nothing closes
  let at = 0;
  const match = (pattern) => {
    pattern.lastIndex = at;
    return pattern.exec(text);
  };
  const readers = [
    () => text[at] === "\n" && { node: make("br"), length: 1 },
    () => match(ESCAPE) && { node: text[at + 1], length: 2 },
    () => readCode(text, at, unclosed),
    () => links && readLink(match(LINK)),
    () => links && !/\w/.test(text[at - 1] ?? "") && readAddress(match(ADDRESS)),
    () => readMark(open, text, at, match(MARKS)?.[0]),
  ];
  while (at < text.length) {
    const plain = match(PLAIN)?.[0];
    const found = plain ? { node: plain, length: plain.length } : readFirst(readers) || { node: text[at], length: 1 };
    if (found.node) put(open.at(-1).nodes, found.node);
    at += found.length;
  }
  while (open.length > 1) giveUp(open);
  return open[0].nodes;
}

function readFirst(readers) {
  for (const read of readers) {
    const found = read();
    if (found) return found;
  }
  return null;
}

/** Add a node; texts in a row are one. */
function put(nodes, node) {
  if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes.push(nodes.pop() + node);
  else nodes.push(node);
}

function readCode(text, at, unclosed) {
  if (text[at] !== "`" || text[at - 1] === "`") return null;
  const marks = /`+/y;
  marks.lastIndex = at;
  const { length } = marks.exec(text)[0];
  if (unclosed.has(length)) return null;
  const runs = /`+/g;
  runs.lastIndex = at + length;
  for (let run = runs.exec(text); run; run = runs.exec(text)) {
    if (run[0].length !== length) continue;
    const code = text.slice(at + length, run.index).replace(/\n/g, " ");
    return { node: make("code", {}, trimCode(code)), length: run.index + length - at };
  }
  unclosed.add(length);
  return null;
}

/** A blank at either end lets code begin or end with a backtick. */
const trimCode = (code) => (code.trim() && code.startsWith(" ") && code.endsWith(" ") ? code.slice(1, -1) : code);

function readAddress(found) {
  const url = found?.[0].replace(/[.,;:!?*_~)\]]+$/, "");
  return url && { node: makeAnchor(url, url) ?? url, length: url.length };
}

function readLink(found) {
  if (!found) return null;
  const [whole, text, url] = found;
  return { node: makeAnchor(url, makeInline(text || url, false)) ?? whole, length: whole.length };
}

/** A link to the web or to mail; null for any other address, also for a relative one, which would lead to this server. */
function makeAnchor(url, children) {
  if (!URL.canParse(url)) return null;
  const { href, protocol } = new URL(url);
  if (!["http:", "https:", "mailto:"].includes(protocol)) return null;
  return make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

/** Open or close the element of a mark, or take the mark as text. */
function readMark(open, text, at, found) {
  if (!found) return null;
  const isOpen = (marks) => open.some((level) => level.mark === marks);
  const marks = found === "**" && open.at(-1).mark === "*" && isOpen("**") ? "*" : found; // the inner one of ***
  const [before, after] = [text[at - 1] ?? " ", text[at + marks.length] ?? " "];
  const inWord = marks[0] === "_" && /\w/.test(before) && /\w/.test(after);
  if (!inWord && isOpen(marks) && /\S/.test(before)) return { node: close(open, marks), length: marks.length };
  if (inWord || isOpen(marks) || /\s/.test(after)) return { node: marks, length: marks.length };
  open.push({ mark: marks, nodes: [] });
  return { node: null, length: marks.length };
}

function close(open, marks) {
  while (open.at(-1).mark !== marks) giveUp(open);
  return make(TAGS[marks], {}, open.pop().nodes);
}

/** The innermost mark was never closed, so it is text. */
function giveUp(open) {
  const { mark, nodes } = open.pop();
  for (const node of [mark, ...nodes]) put(open.at(-1).nodes, node);
}
