// The part of Markdown that models write, as DOM nodes. Everything ends in text nodes: markup inside a text is shown,
// never run. Links lead to http and https only.

import { button, make } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// `code`, **bold**, *italic*, [text](link)
const INLINE = /(`+)([^`](?:.*?[^`])?)\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|(?<![\w*])\*([^\s*](?:[^*\n]*[^\s*])?)\*(?![\w*])|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/s;
// Longer paragraphs stay plain: matching marks in them could take the page's time.
const LONGEST_INLINE = 8000;

/** Show `text` in `element`. Blocks that did not change since the last call keep their nodes, and so a selection. */
export function renderMarkdown(element, text) {
  const blocks = splitBlocks(text);
  const shown = [...element.children];
  blocks.forEach((block, index) => {
    const key = block.kind + "\n" + block.lines.join("\n");
    const old = shown[index];
    if (old?.markdownKey === key) return;
    const fresh = RENDERERS[block.kind](block);
    fresh.markdownKey = key;
    if (old) old.replaceWith(fresh);
    else element.append(fresh);
  });
  shown.slice(blocks.length).forEach((old) => old.remove());
}

/** Runs of lines that belong together: { kind, lines }. */
function splitBlocks(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  const takeWhile = (holds) => {
    const start = at;
    while (at < lines.length && holds(lines[at])) at += 1;
    return lines.slice(start, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) {
      at += 1;
    } else if (FENCE.test(line)) {
      blocks.push({ kind: "code", lines: takeFenced() });
    } else if (HEADING.test(line)) {
      blocks.push({ kind: "heading", lines: [lines[at++]] });
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule", lines: [lines[at++]] });
    } else if (QUOTE.test(line)) {
      blocks.push({ kind: "quote", lines: takeWhile((next) => QUOTE.test(next)) });
    } else if (ITEM.test(line)) {
      blocks.push({ kind: "list", lines: takeList() });
    } else if (isTable()) {
      blocks.push({ kind: "table", lines: takeWhile((next) => next.includes("|")) });
    } else {
      blocks.push({ kind: "paragraph", lines: [lines[at++], ...takeWhile((next) => !beginsBlock(next))] });
    }
  }
  return blocks;

  /** The opening fence and what follows, up to and without its closing one. */
  function takeFenced() {
    const mark = FENCE.exec(lines[at])[1];
    const taken = [lines[at++], ...takeWhile((next) => !(next.trim().startsWith(mark) && /^[`~]+$/.test(next.trim())))];
    at += 1;
    return taken;
  }

  /** Items with the lines that go on with them; a blank line between two items does not end the list. */
  function takeList() {
    const taken = [];
    while (at < lines.length) {
      const next = lines[at].trim() ? lines[at] : lines[at + 1] ?? "";
      const goesOn = lines[at].trim() ? !beginsBlock(next) || ITEM.test(next) : ITEM.test(next) && !RULE.test(next);
      if (!goesOn) break;
      if (lines[at].trim()) taken.push(lines[at]);
      at += 1;
    }
    return taken;
  }

  function isTable() {
    return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1]);
  }

  function beginsBlock(next) {
    return !next.trim() || [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(next));
  }
}

const RENDERERS = {
  paragraph: ({ lines }) => make("p", {}, ...inline(lines.join("\n"))),
  rule: () => make("hr"),
  quote: ({ lines }) => make("blockquote", {}, ...inline(lines.map((line) => QUOTE.exec(line)[1]).join("\n"))),

  heading({ lines }) {
    const [, marks, text] = HEADING.exec(lines[0]);
    // The page's own headings end at h2.
    return make("h" + Math.min(marks.length + 2, 6), {}, ...inline(text));
  },

  code({ lines }) {
    const language = FENCE.exec(lines[0])[2];
    const code = make("code", {}, lines.slice(1).join("\n"));
    const copy = button("Copy", () => copyText(copy, code.textContent), { className: "small" });
    const head = make("div", { className: "code-head" }, make("span", {}, language || "text"), copy);
    return make("div", { className: "code" }, head, make("pre", { tabIndex: 0 }, code));
  },

  list({ lines }) {
    const isOrdered = ITEM.exec(lines[0])[3] !== undefined;
    const list = make(isOrdered ? "ol" : "ul");
    for (const line of lines) {
      const item = ITEM.exec(line);
      if (!item) {
        list.lastChild.append("\n", ...inline(line.trim()));
        continue;
      }
      const [, indent, , number, text] = item;
      const level = Math.min(Math.floor(indent.length / 2), 3);
      const entry = make("li", { className: `level-${level}` }, ...inline(text));
      if (number === undefined && isOrdered) entry.classList.add("bullet");
      if (number !== undefined && isOrdered) entry.value = Number(number);
      list.append(entry);
    }
    return list;
  },

  table({ lines }) {
    const [head, , ...rows] = lines.map((line) => line.trim().replace(/^\||\|$/g, "").split("|"));
    const row = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, {}, ...inline(cell.trim()))));
    const table = make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, ...rows.map((cells) => row("td", cells))));
    return make("div", { className: "table", tabIndex: 0 }, table);
  },
};

/** Strings and elements for a piece of running text. */
function inline(text) {
  if (text.length > LONGEST_INLINE) return [text];
  const nodes = [];
  let rest = text;
  for (let match = INLINE.exec(rest); match; match = INLINE.exec(rest)) {
    const [whole, , code, bold, italic, label, link] = match;
    nodes.push(rest.slice(0, match.index));
    if (code !== undefined) nodes.push(make("code", {}, code));
    else if (bold !== undefined) nodes.push(make("strong", {}, ...inline(bold)));
    else if (italic !== undefined) nodes.push(make("em", {}, ...inline(italic)));
    else nodes.push(make("a", { href: link, target: "_blank", rel: "noopener noreferrer" }, label));
    rest = rest.slice(match.index + whole.length);
  }
  nodes.push(rest);
  return nodes;
}

/** Copy, and say so on the button. */
export async function copyText(copyButton, text) {
  let word = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    word = "Not allowed";
  }
  copyButton.textContent = word;
  setTimeout(() => (copyButton.textContent = "Copy"), 1500);
}
