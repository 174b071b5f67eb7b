// Restore the leaves of a step.
import { check, located, NotImplemented, Refused } from "./base/errors.mjs";
import { readChain } from "./chains.mjs";
import { fillDigests } from "./compact.mjs";
import { derive } from "./derived.mjs";
import { leafDigest, sha256, xxh3 } from "./base/hash.mjs";
import { Grid, itemBytes, product, standardChunk } from "./leaves.mjs";
import { Segment } from "./segments.mjs";
import { placeTile } from "./tiles.mjs";

export class Restore {
  // `opened` keeps segments of a root: id and digest -> promise.
  constructor(files, base, manifest, opened = new Map()) {
    Object.assign(this, { files, base, manifest, opened });
    this.place = { step: manifest.step, file: manifest.file };
    this.results = new Map();
    this.lanesFilled = new Map();
  }

  segment(number) {
    const reference = this.manifest.segments[number];
    const key = `${reference.id} ${reference.digest}`;
    if (!this.opened.has(key)) this.opened.set(key, Segment.open(this.files, this.base, reference));
    return this.opened.get(key);
  }

  async segments(lane) {
    const { manifest } = this;
    const numbers = lane === -1 ? manifest.segments.keys() : manifest.lanes[lane];
    const segments = [];
    for (const number of numbers) segments.push(await this.segment(number));
    return segments;
  }

  // The stored content of a leaf or tile.
  async stored({ path, grid, digest, lane }) {
    return { dtype: grid.dtype, shape: grid.shape, bytes: await readChain(path, grid, digest, await this.segments(lane)) };
  }

  // A leaf of the tree: {dtype, shape, bytes}.
  leaf(path, depth = 0) {
    check(depth <= 8, `${path} follows from more than 8 others in a row`);
    if (!this.results.has(path)) {
      this.results.set(path, located({ leaf: path, ...this.place }, () => this.compute(path, depth)));
    }
    return this.results.get(path);
  }

  async compute(path, depth) {
    const { manifest } = this;
    if (manifest.tiles.has(path)) return this.tiled(manifest.tiles.get(path), depth);
    const stored = manifest.leaves.get(path);
    const content = stored && (await this.stored({ path, ...stored }));
    const rule = manifest.derived[path];
    if (rule === undefined) {
      check(stored !== undefined, "no entry");
      return content;
    }
    const other = (source) => this.leaf(source, depth + 1);
    const bytes = await derive(rule, rule.shape, content ?? null, other, (source) => this.group(source));
    const leaf = { dtype: rule.dtype, shape: rule.shape, bytes };
    if ("digest" in rule) compareDerived(leaf, rule.digest);
    return leaf;
  }

  // The group that is stored under the path of a leaf.
  group(path) {
    const stored = this.manifest.leaves.get(path);
    check(stored !== undefined && this.manifest.derived[path]?.how === "group", `${path} is no group`);
    return this.stored({ path, ...stored });
  }

  async tiled(leaf, depth) {
    const bytes = new Uint8Array(product(leaf.shape) * itemBytes(leaf.dtype));
    for (const number of leaf.tiles.keys()) {
      const tile = await this.tile(leaf, number, depth);
      placeTile(bytes, leaf, leaf.tiles[number], tile.bytes);
    }
    return { dtype: leaf.dtype, shape: leaf.shape, bytes };
  }

  tile(leaf, number, depth) {
    const tile = leaf.tiles[number];
    return located({ tile: tile.path }, async () => {
      check(depth <= 8, `${tile.path} follows from more than 8 others in a row`);
      if (this.manifest.laneDigests !== null) await this.fillLane(tile.lane);
      const content = tile.grid && (await this.stored(tile));
      if (tile.rule === null) return content;
      const other = (path) => {
        const cut = this.manifest.tiles.get(path);
        check(cut !== undefined && JSON.stringify(cut.cuts) === JSON.stringify(leaf.cuts), `${path} has other cuts`);
        return this.tile(cut, number, depth + 1);
      };
      const derived = { dtype: tile.rule.dtype, shape: tile.shape };
      const group = (path) => {
        const cut = this.manifest.tiles.get(path);
        check(cut !== undefined && JSON.stringify(cut.cuts) === JSON.stringify(leaf.cuts), `${path} has other cuts`);
        check(cut.tiles[number].rule?.how === "group", `${path} is no group`);
        return this.stored(cut.tiles[number]);
      };
      derived.bytes = await derive(tile.rule, tile.shape, content, other, group);
      if (tile.grid === null && tile.digest) compareDerived(derived, tile.digest);
      return derived;
    });
  }

  async fillLane(lane) {
    if (lane === -1 || this.lanesFilled.has(lane)) return this.lanesFilled.get(lane);
    const filling = this.segments(lane).then((segments) => fillDigests(this.manifest, lane, segments));
    this.lanesFilled.set(lane, filling);
    return filling;
  }
}

function compareDerived({ dtype, shape, bytes }, stated) {
  const grid = new Grid(dtype, shape, standardChunk(shape, dtype));
  const digests = Array.from({ length: grid.chunks }, (_, number) => xxh3(bytes.subarray(...grid.range(number))));
  const computed = leafDigest(digests);
  check(computed === stated, `digest of the derived leaf ${computed}, stated ${stated}`);
}

// Restore `arrays` (path -> node of the skeleton), and report path -> {dtype, shape, sha256} or {error, ...}.
export async function report(restore, arrays) {
  const leaves = {};
  for (const [path, node] of arrays) {
    try {
      const { dtype, shape, bytes } = await restore.leaf(node.of ?? path);
      const flat = /^flat:([0-9,]*)$/.exec(node.tag ?? "");
      const outer = flat ? flat[1].split(",").filter(Boolean).map(Number) : shape;
      leaves[path] = { dtype, shape: outer, sha256: await sha256(bytes) };
    } catch (error) {
      leaves[path] = describe(error);
    }
  }
  return leaves;
}

export function describe(error) {
  const kind = error instanceof Refused ? "refused" : error instanceof NotImplemented ? "not implemented" : "damaged";
  return { error: error.message, kind, ...error.place };
}
