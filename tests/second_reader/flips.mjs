// node flips.mjs ROOT [SAMPLE]: flip single bits of every file of a root and read it again.
//
// Without SAMPLE, every bit of every file that is read is flipped. With it, SAMPLE seeded bits of
// the documents (zarr.json) that are read and SAMPLE of the chunks. A flip in a file is tried on
// the steps that open the file: the other steps cannot depend on it. Of a file that no step
// opens, one bit is tried, to see that it changes nothing.
//
// A flip passes if an error is reported. It also passes if all leaves and scalars are as before and
// the format page says that no digest covers the bit (section 5). Any other flip counts as silent,
// and the exit status is then 1.
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { canonicalText, parseJson } from "./reader/base/json.mjs";
import { errorsOf, readRoot } from "./reader/roots.mjs";

// Files that no digest covers: metadata of arrays and inner groups, control, files of Orbax; and
// chunks that no step needs. They count only if no step opens them.
const UNCOVERED = [
  /^(deltacheck\/)?(segments|checkpoints)\/zarr\.json$/,
  /^(deltacheck\/)?segments\/s[^/]+\/.+\/zarr\.json$/,
  /^(deltacheck\/)?control\/(?!tags\/[^/]+\/)/,
  /^(deltacheck\/)?segments\/.+\/c(\.[0-9]+)*$/,
  /^(.*\/)?(_CHECKPOINT_METADATA|_METADATA|commit_success\.txt)$/,
];

class MemoryFiles {
  constructor(contents) {
    this.contents = contents;
    this.opened = new Set();
  }

  async read(path) {
    this.opened.add(path);
    return this.contents.get(path)?.slice() ?? null;
  }

  async names(folder) {
    const start = folder === "" ? "" : `${folder}/`;
    const below = [...this.contents.keys()].filter((path) => path.startsWith(start));
    const rests = below.map((path) => path.slice(start.length).split("/"));
    return [...new Set(rests.filter((rest) => rest.length > 1).map(([name]) => name))].sort();
  }
}

function load(root, folder = "", contents = new Map()) {
  for (const entry of readdirSync(join(root, folder), { withFileTypes: true })) {
    const path = folder === "" ? entry.name : `${folder}/${entry.name}`;
    if (entry.isDirectory()) load(root, path, contents);
    else contents.set(path, new Uint8Array(readFileSync(join(root, path))));
  }
  return contents;
}

// A small generator of uniform numbers below `limit` (mulberry32), the same in every run.
function generator(state) {
  return (limit) => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return Math.floor((((t ^ (t >>> 14)) >>> 0) / 2 ** 32) * limit);
  };
}

const [root, sample] = process.argv.slice(2);
const contents = load(root);
const text = (result) => JSON.stringify(result, (_, value) => (typeof value === "bigint" ? String(value) : value));
const known = new Map(); // step (null: none) -> files that it opens, and its result
const first = await readRoot(new MemoryFiles(contents));
for (const { step } of first.steps) {
  const files = new MemoryFiles(contents);
  known.set(step, { text: text(await readRoot(files, step)), opened: files.opened });
}
const before = errorsOf(first).filter(({ kind }) => kind !== "not implemented");
if (before.length > 0 || first.steps.length === 0) {
  console.error(`the root is not whole: ${text(before)}`);
  process.exit(2);
}

// Try a flip; return "reported", "unchanged" or "silent".
async function attempt(path, bit) {
  const bytes = contents.get(path).slice();
  bytes[bit >> 3] ^= 1 << (bit & 7);
  const flipped = new Map(contents).set(path, bytes);
  const opening = [...known].filter(([, { opened }]) => opened.has(path));
  let same = true;
  for (const [step, { text: expected }] of opening.length > 0 ? opening : [...known].slice(0, 1)) {
    const result = await readRoot(new MemoryFiles(flipped), step);
    const errors = errorsOf(result).filter(({ kind }) => kind !== "not implemented");
    if (errors.length > 0) {
      if (errors.every(hasPlace)) return "reported";
      console.error(`an error without a place: ${text(errors)}`);
      return "silent";
    }
    same &&= text(result) === expected;
  }
  return same && documented(path, bytes) ? "unchanged" : "silent";
}

// Whether an error names its file, and of a leaf that cannot be read also leaf and step.
function hasPlace(error) {
  const ofStep = !("leaf" in error);
  return typeof error.file === "string" && (ofStep || (error.leaf !== undefined && Number.isInteger(error.step)));
}

// Whether the page excepts a flip that gives `bytes`: an uncovered file, or equal values in JSON.
function documented(path, bytes) {
  if (!isRead(path)) return UNCOVERED.some((pattern) => pattern.test(path));
  if (!path.endsWith("zarr.json")) return false;
  const [before, after] = [contents.get(path), bytes].map((each) => canonicalText(parseJson(Buffer.from(each).toString())));
  return before === after;
}

const isRead = (path) => [...known.values()].some(({ opened }) => opened.has(path));
const random = generator(20261123);
const flips = [];
const unread = [...contents].filter(([path, bytes]) => !isRead(path) && bytes.length > 0);
for (const [path, bytes] of unread) flips.push([path, random(8 * bytes.length)]);
for (const documents of [true, false]) {
  const chosen = [...contents].filter(([path]) => isRead(path) && path.endsWith("zarr.json") === documents);
  const bits = chosen.reduce((sum, [, bytes]) => sum + 8 * bytes.length, 0);
  const count = sample === undefined ? bits : Math.min(bits, Number(sample));
  for (let i = 0; i < count; i++) flips.push(locate(chosen, sample === undefined ? i : random(bits)));
}

// The file of a bit that is counted over all of `files`, and its number in the file.
function locate(files, bit) {
  for (const [path, bytes] of files) {
    if (bit < 8 * bytes.length) return [path, bit];
    bit -= 8 * bytes.length;
  }
  throw new RangeError("no such bit");
}

const counts = { tried: 0, reported: 0, unchanged: 0, silent: 0 };
const exceptions = {};
for (const [path, bit] of flips) {
  const outcome = await attempt(path, bit);
  counts.tried++;
  counts[outcome]++;
  if (outcome === "reported") continue;
  const kind = `${outcome}, ${isRead(path) ? "read" : "not read"}: ${path.replace(/[0-9a-f]{8,}/g, "*")}`;
  exceptions[kind] = (exceptions[kind] ?? 0) + 1;
  if (isRead(path)) console.error(`${outcome}: bit ${bit} of ${root}/${path}`);
}
console.log(JSON.stringify({ ...counts, files: contents.size, filesNotRead: unread.length, exceptions }, null, 1));
process.exitCode = counts.silent > 0 ? 1 : 0;
