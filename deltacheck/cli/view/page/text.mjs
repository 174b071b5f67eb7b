// Text and elements. Everything that comes from a root becomes a text node, never markup.

// Control and format characters (those that change the direction of text, too), lone surrogates,
// unassigned characters, and spaces and line ends other than the plain space.
const UNPRINTABLE = /(?! )[\p{C}\p{Z}]/gu;

// Return text with unprintable characters escaped, as the tables of the command have them.
export function visible(value) {
  return String(value).replace(UNPRINTABLE, (character) => {
    const code = character.codePointAt(0).toString(16);
    if (character === "\n") return "\\n";
    if (character === "\t") return "\\t";
    return code.length <= 2 ? `\\x${code.padStart(2, "0")}` : `\\u{${code}}`;
  });
}

// Return an element with attributes and children. Texts become text nodes.
export function element(tag, attributes = {}, ...children) {
  const result = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") result.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) {
      result.setAttribute(name, value === true ? "" : value);
    }
  }
  result.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined).map(node));
  return result;
}

function node(child) {
  return child instanceof Node ? child : document.createTextNode(visible(child));
}

// A name or value of the root.
export function name(text) {
  return element("bdi", { class: "name" }, text === "" ? "(empty)" : text);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function size(count) {
  if (count === null || count === undefined) return "-";
  let value = count;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit++;
  }
  return unit === 0 ? `${value} B` : `${value.toFixed(1)} ${UNITS[unit]}`;
}

export function share(fraction) {
  return typeof fraction === "number" ? `${Number((100 * fraction).toPrecision(3))} %` : "-";
}

// A number of the root; texts such as "NaN" stay as they are.
export function number(value) {
  if (value === null || value === undefined) return "-";
  return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
}

export function shape(sizes) {
  return `[${sizes.join(", ")}]`;
}

export function time(iso) {
  if (iso === null || iso === undefined) return "-";
  const moment = new Date(iso);
  return Number.isNaN(moment.getTime()) ? iso : `${iso.slice(0, 19).replace("T", " ")} UTC`;
}

export function count(quantity, noun, plural = `${noun}s`) {
  return `${quantity} ${quantity === 1 ? noun : plural}`;
}

// A table. Each column is [title, function of a row -> text or node, is it a text].
export function table(columns, rows) {
  const heads = columns.map(([title, , word]) => element("th", { scope: "col", class: word && "word" }, title));
  const body = rows.map((row) =>
    element("tr", {}, columns.map(([, cell, word]) => element("td", { class: word ? "word" : "number" }, cell(row) ?? "-"))),
  );
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, heads)), element("tbody", {}, body)));
}

// A table with the columns that some row has a value in.
export function tableOfPresent(columns, rows) {
  const present = columns.filter(([, , , key]) => key === undefined || rows.some((row) => row[key] !== null && row[key] !== undefined));
  return table(present, rows);
}

export function facts(pairs) {
  return element("dl", {}, pairs.map(([term, value]) => element("div", {}, element("dt", {}, term), element("dd", {}, value))));
}

export function problems(title, list) {
  if (list.length === 0) return null;
  return element("div", { class: "problems", role: "alert" }, element("p", {}, title), element("ul", {}, list.map((text) => element("li", {}, text))));
}
