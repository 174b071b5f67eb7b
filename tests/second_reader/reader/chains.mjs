// Chains: the last keyframe of a stored leaf and the deltas after it, each step verified.
import { check, located } from "./base/errors.mjs";
import { isDigest } from "./documents.mjs";
import { leafDigest, xxh3 } from "./base/hash.mjs";
import { decodeChunk, needsBase } from "./decode/methods.mjs";
import { storageType } from "./leaves.mjs";

// Return the bytes of the stored leaf `path`. `segments` are those that it may need, in order.
export async function readChain(path, grid, digest, segments) {
  const entries = chainEntries(path, segments);
  check(entries.length > 0, "no segment has a keyframe of it");
  const state = { bytes: new Uint8Array(grid.bytes), digests: [] };
  for (const [number, { segment, entry }] of entries.entries()) {
    await located({ file: segment.file }, async () => {
      for (const key of ["dtype", "shape", "chunk"]) {
        const [stored, stated] = [entry[key], grid[key]].map((value) => JSON.stringify(value));
        check(stored === stated, `${key} ${stored}, the manifest states ${stated}`);
      }
      if (number > 0) {
        const before = entries[number - 1].entry.digest;
        check(entry.base === before, `the chain is broken: base ${entry.base} after ${before}`);
      }
      if ("key" in entry) await readKeyframe(segment, entry, grid, state);
      else await applyDelta(segment, entry, grid, state);
      const computed = leafDigest(state.digests);
      check(computed === entry.digest, `digest of the leaf ${computed}, stated ${entry.digest}`);
    });
  }
  const last = entries.at(-1);
  check(last.entry.digest === digest, `digest ${last.entry.digest}, the manifest states ${digest}`, { file: last.segment.file });
  return state.bytes;
}

export function chainEntries(path, segments) {
  let entries = [];
  for (const segment of segments) {
    const entry = segment.table.leaves[path];
    if (entry === undefined) continue;
    if ("since" in entry) entries = entries.filter((other) => other.segment.seq < entry.since);
    if ("key" in entry || !("base" in entry)) entries = [];
    entries.push({ segment, entry });
  }
  const first = entries[0]?.entry;
  return first !== undefined && !("key" in first) && "base" in first ? [] : entries;
}

async function readKeyframe(segment, entry, grid, state) {
  const { key } = entry;
  state.digests = await segment.digests(entry.digests, grid.chunks);
  if ("packed" in key) {
    check(key.packed === storageType(grid.dtype), `packed as ${key.packed}`);
    const start = (key.offset ?? 0) * grid.itemBytes;
    if (grid.bytes > 0) state.bytes.set(await segment.packed(key.packed, start, start + grid.bytes));
    const file = `${segment.folder}/packed/${key.packed}`;
    for (let number = 0; number < grid.chunks; number++) compareChunk(state, grid, number, file);
    return;
  }
  const array = segment.keyframe(key.array, grid);
  for (let number = 0; number < grid.chunks; number++) {
    const [start, end] = grid.range(number);
    state.bytes.set((await array.chunk(grid.index(number))).subarray(0, end - start), start);
    compareChunk(state, grid, number, array.path);
  }
}

function compareChunk(state, grid, number, file) {
  const [start, end] = grid.range(number);
  const computed = xxh3(state.bytes.subarray(start, end));
  check(computed === state.digests[number], `chunk ${number} has the digest ${computed}, stated ${state.digests[number]}`, { file });
}

async function applyDelta(segment, entry, grid, state) {
  const whole = !("base" in entry);
  check(Array.isArray(entry.delta) && (whole || isDigest(entry.base)), "a delta of another form");
  const rows = [];
  for (const [part, first, count] of entry.delta) {
    const all = await segment.part(part);
    check(first >= 0 && count > 0 && first + count <= all.length, `rows ${first}+${count} of ${all.length}`);
    for (let number = first; number < first + count; number++) rows.push([part, all[number]]);
  }
  check(new Set(rows.map(([, row]) => row.chunk)).size === rows.length, "two rows of one chunk");
  if (whole) {
    check(rows.length === grid.chunks, `a keyframe of ${rows.length} chunks, not ${grid.chunks}`);
    state.digests = Array(grid.chunks).fill(null);
  }
  const digests = await segment.digests(entry.digests, rows.length);
  for (const [number, [part, row]] of rows.entries()) {
    const file = `${segment.folder}/delta.${part}`;
    await located({ file }, async () => {
      check(row.chunk < grid.chunks, `chunk ${row.chunk} of ${grid.chunks}`);
      check(row.wordBytes === Math.min(8, grid.itemBytes), `words of ${row.wordBytes} bytes`);
      const [start, end] = grid.range(row.chunk);
      check(row.words * row.wordBytes === end - start, `${row.words} words in chunk ${row.chunk}`);
      check(!whole || !needsBase(row.method), `method ${row.method} in a keyframe`);
      const base = whole ? null : state.bytes.subarray(start, end);
      state.bytes.set(decodeChunk(row, await segment.streams(part, row), base), start);
      state.digests[row.chunk] = digests[number];
      compareChunk(state, grid, row.chunk, file);
    });
  }
}
