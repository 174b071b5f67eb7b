// The compact form of a manifest with many tiles: rules in place of lists.
import { check, Damage } from "./base/errors.mjs";
import { isCount, isDigest, isObject } from "./documents.mjs";
import { xxh3 } from "./base/hash.mjs";
import { product } from "./leaves.mjs";
import { sortedByPoint } from "./base/json.mjs";
import { chainEntries } from "./chains.mjs";

// Numbers that a series stands for.
function series(items, limit) {
  check(Array.isArray(items), "a series that is no list");
  const numbers = [];
  for (const item of items) {
    const [first, step, count] = Array.isArray(item) ? item : [item, 0, 1];
    check([first, step, count].every(Number.isSafeInteger) && count >= 1, `a series with ${JSON.stringify(item)}`);
    check(numbers.length + count <= limit, "a series that is too long");
    for (let i = 0; i < count; i++) numbers.push(first + i * step);
  }
  return numbers;
}

function cutsOf(axis) {
  const { size } = axis;
  check(isCount(size), "an axis without its size");
  const kinds = ["step", "parts", "edges"].filter((kind) => kind in axis);
  check(kinds.length <= 1, `an axis with ${kinds}`);
  if ("edges" in axis) return [0, ...axis.edges, size];
  if ("step" in axis) {
    check(isCount(axis.step) && axis.step > 0, `an axis in steps of ${axis.step}`);
    const cuts = [];
    for (let cut = 0; cut < size; cut += axis.step) cuts.push(cut);
    return [...cuts, size];
  }
  const parts = axis.parts ?? 1;
  return Array.from({ length: parts + 1 }, (_, i) => Number((BigInt(size) * BigInt(i)) / BigInt(parts)));
}

// Tiles along an axis, counted before any cut is written out.
function countAlong(axis) {
  if ("edges" in axis) return axis.edges.length + 1;
  return "step" in axis ? Math.ceil(axis.size / axis.step) : axis.parts ?? 1;
}

function pieces(text, size) {
  check(typeof text === "string" && text.length % size === 0, "digits of another length");
  return text.match(new RegExp(`.{${size}}`, "g")) ?? [];
}

export function expandCompact(document) {
  const { compact } = document;
  check(isObject(compact) && document.segments.length === 0 && !("tiles" in document), "a compact manifest with segments or tiles");
  const fileBytes = JSON.stringify(document, (_, value) => (typeof value === "bigint" ? Number(value) : value)).length;
  const counts = Object.values(compact.leaves).map((leaf) => product(compact.cuts[leaf.cuts].map((axis) => countAlong(compact.axes[axis]))));
  check(counts.reduce((sum, count) => sum + count, 0) <= 64 * fileBytes, "more tiles than 64 for each byte");
  const nonces = pieces(compact.nonces, 8);
  const digests = pieces(compact.digests, 32);
  const seqs = series(compact.seqs, nonces.length);
  check(seqs.length === nonces.length && digests.length === nonces.length, "seqs, nonces and digests of different lengths");
  const segments = nonces.map((nonce, i) => ({ id: `s${String(seqs[i]).padStart(10, "0")}-${nonce}`, digest: digests[i] }));
  const tiles = Object.create(null);
  Object.entries(compact.leaves).forEach(([path, leaf], i) => {
    const entry = { ...leaf, digests: leaf.digests ?? null };
    entry.cuts = compact.cuts[leaf.cuts].map((axis) => cutsOf(compact.axes[axis]));
    entry.lanes = series(compact.places[leaf.lanes], counts[i]);
    if ("form" in leaf) entry.form = series(leaf.form, counts[i]);
    tiles[path] = entry;
  });
  const laneDigests = document.lane_digests;
  check(Array.isArray(laneDigests) && laneDigests.every(isDigest), "lane_digests");
  check(laneDigests.length === document.lanes.length, "lane_digests and lanes of different lengths");
  return { segments, tiles, laneDigests };
}

// Fill in the digests of the tiles of a lane from the tables of its segments, and verify them.
export function fillDigests(manifest, lane, segments) {
  const digests = [];
  for (const path of sortedByPoint([...manifest.tiles.keys()])) {
    for (const tile of manifest.tiles.get(path).tiles) {
      if (tile.lane !== lane || tile.stated) continue;
      const entry = chainEntries(tile.path, segments).at(-1);
      if (entry === undefined) throw new Damage(`lane ${lane} has no entry of ${tile.path}`, { leaf: path });
      tile.digest = entry.entry.digest;
      digests.push(tile.digest);
    }
  }
  const computed = xxh3(new TextEncoder().encode(digests.join("")));
  const stated = manifest.laneDigests[lane];
  check(computed === stated, `digest of lane ${lane} ${computed}, the manifest states ${stated}`, { file: manifest.file });
}
