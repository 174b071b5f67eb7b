// Segments: the table, the digests of stored chunks, and the rows and streams of deltas.
import { check, Damage, located, Refused } from "./base/errors.mjs";
import { viewOf } from "./base/bytes.mjs";
import { isCount, isDigest, isObject, readDocument } from "./documents.mjs";
import { readRun, runArray, StoredArray } from "./arrays.mjs";
import { isLaw, isOrdered, STREAMS, streamSizes } from "./decode/methods.mjs";
import { itemBytes, storageType } from "./leaves.mjs";

const NAME = /^s([0-9]{10})-([0-9a-f]{8})$/;

export function segmentSeq(id) {
  const match = typeof id === "string" ? NAME.exec(id) : null;
  if (match === null) throw new Refused(`a segment's name of another form: ${JSON.stringify(id)}`);
  return Number(match[1]);
}

export class Segment {
  // Open the segment that a manifest refers to by `id` and `digest` (of its zarr.json).
  static async open(files, base, { id, digest }) {
    const seq = segmentSeq(id);
    const folder = `${base}segments/${id}`;
    const read = await readDocument(files, folder, { features: ["merged", "ordered", "law"] });
    return located({ file: read.file }, async () => {
      check(read.digest === digest, `digest ${read.digest}, the manifest states ${digest}`);
      check(read.document.id === id, `the table of ${read.document.id}`);
      return new Segment(files, folder, seq, read.document);
    });
  }

  constructor(files, folder, seq, table) {
    check(isObject(table.leaves), "a table without leaves");
    Object.assign(this, { files, folder, seq, table, file: `${folder}/zarr.json` });
    this.cache = new Map();
    let merged = false;
    for (const [leaf, entry] of Object.entries(table.leaves)) {
      check(isObject(entry) && isDigest(entry.digest), `entry of ${leaf}`);
      check(("key" in entry) !== ("delta" in entry), `${leaf} needs either key or delta`);
      if ("since" in entry) {
        check("delta" in entry && "base" in entry, `${leaf}: since without a base`);
        check(isCount(entry.since) && entry.since <= seq, `${leaf}: since ${entry.since}`);
        merged = true;
      }
    }
    const features = table.must_understand ?? [];
    check(merged === features.includes("merged"), "the feature merged does not agree with the entries");
    this.features = features;
  }

  once(key, make) {
    if (!this.cache.has(key)) this.cache.set(key, make());
    return this.cache.get(key);
  }

  // Digests of `count` stored chunks from row `first`.
  async digests(first, count) {
    const bytes = this.once("digests", () => rowsOf(this.table.digests, 16, this.file));
    const rows = bytes.length / 16;
    check(isCount(first) && first + count <= rows, `digests ${first}+${count} of ${rows}`, { file: this.file });
    const view = viewOf(bytes);
    return Array.from({ length: count }, (_, i) => {
      const at = 16 * (first + i);
      const halves = [view.getBigUint64(at, true), view.getBigUint64(at + 8, true)];
      return halves.map((half) => half.toString(16).padStart(16, "0")).join("");
    });
  }

  // The array of a keyframe, for the grid of its leaf.
  keyframe(name, grid) {
    check(/^[^/\u0000]+$/.test(name) && name !== "." && name !== "..", `an array ${JSON.stringify(name)}`, { file: this.file });
    check(grid.shape.length <= 32, `${grid.shape.length} axes`);
    return this.once(`leaves/${name}`, () => new StoredArray(this.files, `${this.folder}/leaves/${name}`, {
      itemBytes: grid.itemBytes, counts: grid.counts, chunk: grid.chunk, shard: shardOf(grid), codec: "blosc",
    }));
  }

  // Bytes `start` to `end` of packed leaves.
  packed(type, start, end) {
    const n = this.table.packed?.[type];
    check(isCount(n) && storageType(type) === type, `no packed ${type}`, { file: this.file });
    check(end <= n * itemBytes(type), `packed ${type} ends at ${n}`, { file: this.file });
    const path = `${this.folder}/packed/${type}`;
    return readRun(this.once(path, () => runArray(this.files, path, n, itemBytes(type), "blosc")), start, end);
  }

  // The rows of a part, each with the places of its streams.
  part(number) {
    return this.once(`part ${number}`, async () => {
      const part = this.table.parts?.[number];
      check(isObject(part) && isObject(part.streams), `no part ${number}`, { file: this.file });
      const bytes = rowsOf(part.index, 32, this.file);
      return located({ file: this.file }, async () => layRows(bytes, part, this.features));
    });
  }

  async streams(number, row) {
    const part = this.table.parts[number];
    const arrays = this.once(`arrays ${number}`, () => layArrays(part.streams));
    const streams = {};
    for (const [name, start, size] of row.places) {
      if (size === 0) { streams[name] = new Uint8Array(0); continue; }
      const { codec, begin } = arrays.places.get(name);
      const path = `${this.folder}/delta.${number}.${codec}`;
      if (codec !== "stream" && codec !== "store") throw new Refused(`codec ${codec}`, { file: this.file });
      const bytes = arrays.lengths.get(codec);
      const array = this.once(path, () => runArray(this.files, path, bytes, 1, codec === "store" ? "store" : "zstd"));
      streams[name] = await readRun(array, begin + start, begin + start + size);
    }
    return streams;
  }
}

// The bytes of a base64 text, which are whole rows of `rowBytes`.
function rowsOf(text, rowBytes, file) {
  check(typeof text === "string", "rows that are no text", { file });
  let characters;
  try {
    characters = atob(text);
  } catch {
    throw new Damage("rows that are no base64", { file });
  }
  const bytes = Uint8Array.from(characters, (character) => character.charCodeAt(0));
  check(bytes.length % rowBytes === 0, `rows of ${rowBytes} bytes that end within one`, { file });
  return bytes;
}

function layRows(bytes, part, features) {
  const ends = new Map();
  const rows = [];
  const view = viewOf(bytes);
  for (let at = 0; at < bytes.length; at += 32) {
    const numbers = Array.from({ length: 8 }, (_, i) => view.getUint32(at + 4 * i, true));
    const [leaf, chunk, words, wordBytes, method, changed, gapBytes, wideCount] = numbers;
    check([1, 2, 4, 8].includes(wordBytes), `words of ${wordBytes} bytes`);
    check(features.includes("ordered") || !isOrdered(method), "an ordered chunk without the feature");
    check(features.includes("law") || !isLaw(method), "a chunk with a law without the feature");
    const row = { leaf, chunk, words, wordBytes, method, changed, gapBytes, wideCount };
    row.places = streamSizes(row).map(([name, size]) => {
      const start = ends.get(name) ?? 0;
      ends.set(name, start + size);
      return [name, start, size];
    });
    rows.push(row);
  }
  for (const name of new Set([...ends.keys(), ...Object.keys(part.streams)])) {
    const stated = part.streams[name]?.[0] ?? 0;
    if (stated !== (ends.get(name) ?? 0)) throw new Damage(`stream ${name}: ${stated} bytes, rows have ${ends.get(name)}`);
  }
  return rows;
}

// Where each stream begins in the array of its codec, and the lengths of the arrays.
function layArrays(streams) {
  const places = new Map();
  const lengths = new Map();
  for (const name of STREAMS) {
    if (!(name in streams)) continue;
    const [bytes, codec] = streams[name];
    const begin = lengths.get(codec) ?? 0;
    places.set(name, { codec, begin });
    lengths.set(codec, begin + bytes);
  }
  return { places, lengths };
}

// The shards of a keyframe, about 32 MiB of whole chunks.
function shardOf(grid) {
  let budget = Math.max(1, Math.floor(2 ** 25 / (grid.chunk.reduce((a, b) => a * b, 1) * grid.itemBytes)));
  const shard = grid.counts.map(() => 1);
  for (let axis = shard.length - 1; axis >= 0; axis--) {
    shard[axis] = Math.max(1, Math.min(grid.counts[axis], budget));
    budget = Math.floor(budget / shard[axis]);
  }
  return shard.every((size) => size === 1) ? null : shard;
}
