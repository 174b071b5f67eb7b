// Leaves in tiles: cells between cuts, each stored like a leaf.
import { check } from "./base/errors.mjs";
import { groupShape } from "./decode/laws.mjs";
import { Grid, itemBytes, product, standardChunk } from "./leaves.mjs";

const NOTHING = "0".repeat(32);

// Return the leaf in tiles that an entry of `tiles` describes.
export function tilesOf(path, entry, laneOf) {
  const { dtype, cuts, forms = null, codes = [] } = entry;
  check(Array.isArray(cuts) && cuts.length > 0, `cuts of ${path}`);
  for (const along of cuts) {
    const ascending = along[0] === 0 && along.every((cut, i) => Number.isSafeInteger(cut) && (i === 0 || cut > along[i - 1]));
    check(ascending, `cuts ${along} of ${path}`);
  }
  const counts = cuts.map((along) => along.length - 1);
  const count = product(counts);
  check(count <= 2 ** 24, `${count} tiles of ${path}`);
  check(entry.lanes.length === count, `${entry.lanes.length} lanes of ${count} tiles of ${path}`);
  check(entry.digests === null || entry.digests.length === 32 * count, `digests of the tiles of ${path}`);
  check(!entry.form || entry.form.length === count, `form of the tiles of ${path}`);
  const tiles = entry.lanes.map((lane, number) => {
    const index = position(counts, number);
    const origin = index.map((at, axis) => cuts[axis][at]);
    const shape = index.map((at, axis) => cuts[axis][at + 1] - cuts[axis][at]);
    const form = forms === null ? -1 : entry.form ? entry.form[number] : 0;
    check(form >= -1 && form < (forms?.length ?? 0), `form ${form} of a tile of ${path}`);
    const stored = form === -1 ? dtype : codes[form];
    const digest = entry.digests === null ? null : entry.digests.slice(32 * number, 32 * number + 32);
    return {
      path: `${path}%@${origin.join(",")}`, origin, shape, lane: laneOf(lane),
      rule: form === -1 ? null : forms[form], stated: entry.digests !== null,
      digest: digest === NOTHING ? undefined : digest,
      grid: stored === "" ? null : gridOf(stored, form === -1 ? null : forms[form], shape),
    };
  });
  return { dtype, shape: cuts.map((along) => along.at(-1)), cuts, tiles };
}

// The grid of what is stored of a tile.
function gridOf(dtype, rule, shape) {
  const stored = rule?.how === "group" ? groupShape(product(shape)) : shape;
  return new Grid(dtype, stored, standardChunk(stored, dtype));
}

function position(counts, number) {
  const index = [];
  for (let axis = counts.length - 1; axis >= 0; axis--) {
    index.unshift(number % counts[axis]);
    number = Math.floor(number / counts[axis]);
  }
  return index;
}

// Copy the bytes of a tile to their places in the bytes of its leaf.
export function placeTile(target, leaf, tile, bytes) {
  const item = itemBytes(leaf.dtype);
  const rowBytes = tile.shape.at(-1) * item;
  const rows = tile.shape.slice(0, -1);
  for (let row = 0; row < product(rows); row++) {
    const index = position(rows, row);
    let offset = 0;
    index.forEach((at, axis) => {
      offset = offset * leaf.shape[axis] + at + tile.origin[axis];
    });
    offset = offset * leaf.shape.at(-1) + tile.origin.at(-1);
    target.set(bytes.subarray(row * rowBytes, (row + 1) * rowBytes), offset * item);
  }
}
