// Markdown as nodes: CommonMark with tables, ~~struck~~ text and bare links. HTML, entities, link references, indented
// code and underlined headings stay text, images become links, and a link leads to http, https or mailto. Any text takes
// time in proportion to its length.

import { copyButton, element } from "./dom.js";

const MAX_DEPTH = 16; // lists and quotes within each other
const MAX_OPEN = 100; // delimiters that may still find their other half
const MAX_RUN = 10; // of * or _ in a row: more are text, as each two would be an element within another
const MAX_ADDED = 100; // columns up to which a row has the cells that its text lacks
const LINKS = ["http", "https", "mailto"];
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})[ \t]*(\S*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t](.*))?$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const FIRST_ITEM = /^ {0,3}(?:[-*+]|1[.)]) +\S/; // of the lists that may follow a text without an empty line
const TOKEN =
  /\\[!-/:-@[-`{-~\n]|`+|<(?:https?:\/\/|mailto:)[^\s<>]*>|https?:\/\/[^\s<>[\]`"|*]+|!?\[|\]|\*+|_+|~~/g;
const TARGET = /\((?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;

const drawn = new WeakMap();

// Let `place` show a text. Blocks that it shows already stay, so what is selected in them stays selected.
export function showMarkdown(place, text) {
  const old = drawn.get(place) ?? [];
  const now = [...blocks(text.split(/\r?\n/), 0)];
  let same = 0;
  while (same < old.length && same < now.length && old[same].source === now[same].source) {
    now[same] = old[same];
    same += 1;
  }
  old.slice(same).forEach(({ node }) => node.remove());
  for (const block of now.slice(same)) {
    block.node = block.make();
    place.append(block.node);
  }
  drawn.set(place, now);
}

function* blocks(lines, depth) {
  let end = 0;
  for (let at = 0; at < lines.length; at = Math.max(end, at + 1)) {
    if (lines[at].trim()) {
      const [next, make] = block(lines, at, depth);
      end = next;
      yield { source: lines.slice(at, end).join("\n"), make };
    }
  }
}

// Where the block that begins in a line ends, and how to make its node.
function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  const heading = HEADING.exec(line);
  if (fence) {
    return fenced(lines, at, fence);
  } else if (heading) {
    // The page's own headings are above those of an answer.
    const level = Math.min(6, heading[1].length + 2);
    return [at + 1, () => fill(element(`h${level}`), (heading[2] ?? "").trim().replace(/(^|[ \t])#+$/, ""))];
  } else if (RULE.test(line)) {
    return [at + 1, () => element("hr")];
  } else if (depth < MAX_DEPTH && QUOTE.test(line)) {
    return quote(lines, at, depth);
  } else if (depth < MAX_DEPTH && ITEM.test(line)) {
    return list(lines, at, depth);
  }
  return isTable(lines, at) ? table(lines, at) : paragraph(lines, at);
}

const interrupts = (line) => [FENCE, HEADING, RULE, QUOTE, FIRST_ITEM].some((kind) => kind.test(line));
const goesOn = (line, before) =>
  line.trim() && before.trim() && !interrupts(line) && ![FENCE, HEADING, RULE].some((kind) => kind.test(before));

function fenced(lines, at, [, marks, language]) {
  const indent = lines[at].search(/\S/);
  const closes = (line) => {
    const found = line.trim();
    return found.length >= marks.length && found === marks[0].repeat(found.length);
  };
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) {
    end += 1;
  }
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, line.search(/\S|$/))));
  return [Math.min(end + 1, lines.length), () => codeBlock(code.join("\n"), language)];
}

function codeBlock(code, language) {
  const head = element("figcaption", {}, element("span", { textContent: language || "text" }), copyButton(() => code));
  const text = element("pre", { tabIndex: 0, role: "group", ariaLabel: "Code" }, element("code", {}, code));
  return element("figure", { className: "code" }, head, text);
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    if (!QUOTE.test(lines[end]) && !goesOn(lines[end], inner[inner.length - 1])) {
      break;
    }
    inner.push(lines[end].replace(QUOTE, ""));
  }
  return [end, () => element("blockquote", {}, ...children(inner, depth))];
}

const children = (lines, depth) => [...blocks(lines, depth + 1)].map(({ make }) => make());

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at])[2];
  const items = [];
  let width = Infinity;
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const last = items[items.length - 1];
    if (!line.trim() || line.search(/\S/) >= width) {
      last.push(line.slice(width));
    } else if (item && item[2].slice(-1) === first.slice(-1) && !RULE.test(line)) {
      width = item[1].length + item[2].length + (item[3].length > 4 ? 1 : item[3].length || 1);
      items.push([line.slice(width)]);
    } else if (goesOn(line, last[last.length - 1])) {
      last.push(line);
    } else {
      break;
    }
  }
  while (!lines[end - 1].trim()) {
    end -= 1;
  }
  const number = parseInt(first, 10);
  const all = () => items.map((item) => element("li", {}, ...children(item, depth)));
  return [end, () => element(number >= 0 ? "ol" : "ul", number >= 0 ? { start: number } : {}, ...all())];
}

const cells = (line) =>
  line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("|")) {
    return false;
  }
  const marks = cells(lines[at + 1]);
  return marks.every((mark) => /^:?-+:?$/.test(mark)) && marks.length === cells(lines[at]).length;
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) {
    end += 1;
  }
  const columns = cells(lines[at]);
  const row = (tag, line) => {
    const found = cells(line);
    const shown = columns.slice(0, Math.max(found.length, MAX_ADDED));
    return element("tr", {}, ...shown.map((_, index) => fill(element(tag), found[index] ?? "")));
  };
  const make = () => {
    const rows = lines.slice(at + 2, end).map((line) => row("td", line));
    const whole = element("table", {}, element("thead", {}, row("th", lines[at])), element("tbody", {}, ...rows));
    return element("div", { className: "wide", tabIndex: 0, role: "group", ariaLabel: "Table" }, whole);
  };
  return [end, make];
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end]) && !isTable(lines, end)) {
    end += 1;
  }
  return [end, () => fill(element("p"), lines.slice(at, end).join("\n").trim())];
}

// Give `parent` a text's inline parts; returns it.
function fill(parent, text) {
  const token = new RegExp(TOKEN);
  const say = (words) => parent.appendChild(document.createTextNode(words));
  const unclosed = new Set();
  const open = [];
  let done = 0;
  for (let match; (match = token.exec(text)); done = token.lastIndex) {
    const [found] = match;
    if (match.index > done) {
      say(text.slice(done, match.index));
    }
    if (found[0] === "\\") {
      say(found[1]);
    } else if (found[0] === "`") {
      const end = unclosed.has(found.length) ? -1 : endOfCode(text, token.lastIndex, found.length);
      if (end < 0) {
        unclosed.add(found.length);
        say(found);
      } else {
        const code = text.slice(token.lastIndex, end).replaceAll("\n", " ");
        parent.append(element("code", {}, code.trim() ? code.replace(/^ (.*) $/, "$1") : code));
        token.lastIndex = end + found.length;
      }
    } else if (found[0] === "<") {
      parent.append(anchor(found.slice(1, -1)) ?? found);
    } else if (found[0] === "h") {
      const address = withoutPunctuation(found);
      parent.append(anchor(address) ?? address);
      token.lastIndex = match.index + address.length;
    } else if (found.endsWith("[")) {
      keep(open, { node: say(found), bracket: true });
    } else if (found === "]") {
      const end = closeLink(open, text, token.lastIndex);
      token.lastIndex = end || token.lastIndex;
      if (!end) {
        say(found);
      }
    } else {
      const run = delimiter(found, text[match.index - 1], text[token.lastIndex]);
      run.node = say(found);
      closeEmphasis(open, run);
      if (run.opens && run.count) {
        keep(open, run);
      }
    }
  }
  say(text.slice(done));
  return parent;
}

const keep = (open, one) => open.length < MAX_OPEN && open.push(one);

function endOfCode(text, from, length) {
  const run = /`+/g;
  run.lastIndex = from;
  for (let match; (match = run.exec(text)); ) {
    if (match[0].length === length) {
      return match.index;
    }
  }
  return -1;
}

function withoutPunctuation(address) {
  const ends = address.includes("(") ? "?!.,:;_~'" : "?!.,:;_~')";
  let end = address.length;
  while (ends.includes(address[end - 1])) {
    end -= 1;
  }
  return address.slice(0, end);
}

// A link; nothing where it would lead elsewhere than to the web or to mail.
function anchor(address) {
  if (!URL.canParse(address)) {
    return null;
  }
  const { href, protocol } = new URL(address);
  const properties = { href, target: "_blank", rel: "noopener noreferrer" };
  return LINKS.includes(protocol.slice(0, -1)) ? element("a", properties, address) : null;
}

// At a "]": make a link of what is open since the last "[", if a target follows; returns where it ends.
function closeLink(open, text, at) {
  const index = open.findLastIndex(({ bracket }) => bracket);
  if (index < 0) {
    return 0;
  }
  const { node } = open[index];
  open.splice(index, 1);
  TARGET.lastIndex = at;
  const match = TARGET.exec(text);
  const link = match && anchor((match[1] ?? match[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1"));
  if (!link) {
    return 0;
  }
  if (node.nextSibling) {
    link.replaceChildren();
  }
  while (node.nextSibling) {
    link.append(node.nextSibling);
  }
  link.querySelectorAll("a").forEach((inner) => inner.replaceWith(...inner.childNodes));
  open.length = index;
  if (node.data === "[") {
    open.forEach((other) => (other.bracket = false)); // no link in a link, but an image may be in one
  }
  node.replaceWith(link);
  return at + match[0].length;
}

// CommonMark's rules of which run of * or _ may open or close.
function delimiter(found, before = " ", after = " ") {
  const [spaceBefore, spaceAfter] = [before, after].map((letter) => /\s/.test(letter));
  const [markBefore, markAfter] = [before, after].map((letter) => /[\p{P}\p{S}]/u.test(letter));
  const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
  const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
  const inWord = found[0] === "_";
  const short = found.length <= MAX_RUN;
  return {
    mark: found[0],
    count: found.length,
    length: found.length,
    opens: short && left && (!inWord || !right || markBefore),
    closes: short && right && (!inWord || !left || markAfter),
  };
}

function closeEmphasis(open, run) {
  for (let at = open.length - 1; run.closes && run.count && at >= 0; at -= 1) {
    const other = open[at];
    const uneven =
      (other.closes || run.opens) && (other.length + run.length) % 3 === 0 && (other.length % 3 || run.length % 3);
    if (other.mark !== run.mark || uneven) {
      continue;
    }
    const used = Math.min(2, other.count, run.count);
    const around = element(run.mark === "~" ? "del" : used === 2 ? "strong" : "em");
    while (other.node.nextSibling !== run.node) {
      around.append(other.node.nextSibling);
    }
    other.node.after(around);
    for (const one of [other, run]) {
      one.count -= used;
      one.node.data = one.mark.repeat(one.count);
    }
    open.length = other.count ? at + 1 : at;
    at += other.count ? 1 : 0;
  }
}
