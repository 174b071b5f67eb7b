// The skeleton of a step: paths of its arrays and scalars.
import { check, Refused } from "./base/errors.mjs";
import { isBase64 } from "./base/bytes.mjs";
import { isObject } from "./documents.mjs";

const CONTAINERS = ["dict", "odict", "list", "tuple", "deque", "fields", "object", "tensor"];
const SCALARS = ["none", "bool", "int", "float", "complex", "str", "bytes", "enum", "json"];

// Return the arrays (path -> node) and scalars (path -> node) of a skeleton, and whether it has
// a node or field of the feature `types`.
export function flatten(tree) {
  const result = { arrays: new Map(), scalars: new Map(), containers: new Set(), types: false };
  visit(tree, [], result);
  return result;
}

function visit(node, keys, result) {
  check(isObject(node), `a node at ${keys.join("/")} is no object`);
  check(keys.length <= 128, "containers nest deeper than 128");
  const path = keys.join("/");
  const dtypeTag = node.t === "array" && typeof node.tag === "string" && node.tag.startsWith("dtype:");
  const classed = "c" in node && node.t !== "fields";
  if ("a" in node || classed || dtypeTag || ["object", "tensor", "enum"].includes(node.t)) result.types = true;
  if (node.t === "array") {
    result.arrays.set(path, node);
    return;
  }
  if (SCALARS.includes(node.t)) {
    checkScalar(node, path);
    result.scalars.set(path, node);
    return;
  }
  if (!CONTAINERS.includes(node.t)) throw new Refused(`unknown node ${JSON.stringify(node.t)} at ${path}`);
  result.containers.add(path);
  const children = "k" in node ? node.k : (node.n ?? []).map((child, i) => [i, child]);
  check(Array.isArray(children), `children of ${path}`);
  const texts = children.map(([key]) => keyText(key));
  check(new Set(texts).size === texts.length, `a key of ${path} twice`);
  children.forEach(([, child], i) => visit(child, [...keys, texts[i]], result));
  for (const [, child] of node.a ?? []) {
    const inner = flatten(child);
    check(inner.arrays.size === 0, `an array among the attributes of ${path}`);
  }
}

function checkScalar({ t, v }, path) {
  const good = {
    none: () => v === undefined || v === null,
    bool: () => typeof v === "boolean",
    int: () => /^-?(0|[1-9][0-9]*)$/.test(v),
    float: () => isFloat(v),
    complex: () => Array.isArray(v) && v.length === 2 && v.every(isFloat),
    bytes: () => typeof v === "string" && isBase64(v),
    str: () => typeof v === "string",
    enum: () => typeof v === "string",
    json: () => isLongList(v),
  };
  check(good[t](), `the ${t} at ${path} is ${JSON.stringify(v)}`);
}

function isLongList(text) {
  try {
    const list = JSON.parse(text);
    return Array.isArray(list) && list.length >= 256;
  } catch {
    return false;
  }
}

function isFloat(text) {
  const hexadecimal = /^-?0x[01](\.[0-9a-f]+)?p[+-][0-9]+$/;
  return typeof text === "string" && (hexadecimal.test(text) || /^(-?inf|nan:[0-9a-f]{16})$/.test(text));
}

// A key as a part of a path.
export function keyText(key) {
  if (typeof key === "number" || typeof key === "bigint") return String(key);
  check(typeof key === "string", `a key ${JSON.stringify(key)}`);
  if (key === "") return "%";
  const text = key.replace(/[/%\u0000-\u001f\u007f]/g, escaped);
  return /^-?[0-9]+$/.test(key) ? escaped(text[0]) + text.slice(1) : text;
}

function escaped(character) {
  return `%${character.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0")}`;
}
