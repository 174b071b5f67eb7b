// Manifests: what a step states, checked against itself.
import { check, located, Refused } from "./base/errors.mjs";
import { isCount, isDigest, isObject, readDocument } from "./documents.mjs";
import { expandCompact } from "./compact.mjs";
import { tilesOf } from "./tiles.mjs";
import { Grid } from "./leaves.mjs";
import { segmentSeq } from "./segments.mjs";
import { flatten } from "./tree.mjs";

const FEATURES = ["tiles", "derived", "partial", "types", "law"];

// Read the manifest in `folder`. `place` is {seq} in an engine root and {step} in a manager root.
export async function readManifest(files, folder, place) {
  const { document, file, digest } = await readDocument(files, folder, { features: FEATURES });
  return located({ file, step: document.step }, async () => {
    for (const [key, value] of Object.entries(place)) {
      check(document[key] === value, `${key} ${document[key]} in the place of ${value}`);
    }
    return new Manifest(document, file, digest);
  });
}

class Manifest {
  constructor(document, file) {
    Object.assign(this, { document, file, seq: document.seq, step: document.step });
    check(isCount(this.seq) && Number.isSafeInteger(this.step), `seq ${this.seq}, step ${this.step}`);
    check(isObject(document.leaves), "no leaves");
    this.skeleton = flatten(document.tree);
    const compact = "compact" in document ? expandCompact(document) : {};
    this.segments = compact.segments ?? document.segments;
    const tiles = compact.tiles ?? document.tiles ?? {};
    this.laneDigests = compact.laneDigests ?? null;
    this.lanes = document.lanes ?? null;
    this.derived = document.derived ?? {};
    this.checkSegments();
    this.checkLanes();
    this.leaves = new Map();
    for (const [path, entry] of Object.entries(document.leaves)) {
      check(isDigest(entry.digest), `digest of ${path}`);
      check(!("tiles" in document || "compact" in document) || !path.includes("%@"), `a leaf with the path of a tile: ${path}`);
      const lane = this.lane(entry.lane ?? -1);
      this.leaves.set(path, { grid: new Grid(entry.dtype, entry.shape, entry.chunk), digest: entry.digest, lane });
    }
    this.tiles = new Map();
    for (const [path, entry] of Object.entries(tiles)) {
      check(!this.leaves.has(path), `${path} is a leaf and in tiles`);
      this.tiles.set(path, tilesOf(path, entry, (lane) => this.lane(lane)));
    }
    this.checkFeatures(tiles);
    this.checkTree();
  }

  checkSegments() {
    check(Array.isArray(this.segments), "no segments");
    const tiled = "lanes" in this.document;
    let before = [-1, ""];
    for (const { id, digest } of this.segments) {
      const seq = segmentSeq(id);
      check(isDigest(digest), `digest of ${id}`);
      const ascending = seq > before[0] || (tiled && seq === before[0] && id > before[1]);
      check(ascending, `segment ${id} after ${before[1]}`);
      before = [seq, id];
    }
  }

  checkLanes() {
    if (this.lanes === null) return;
    const named = new Set();
    for (const lane of this.lanes) {
      lane.forEach((number, i) => {
        check(isCount(number) && number < this.segments.length, `segment ${number} in a lane`);
        check(i === 0 || number > lane[i - 1], "segments of a lane that do not ascend");
        named.add(number);
      });
    }
    check(named.size === this.segments.length, "lanes that leave a segment out");
  }

  lane(number) {
    const lanes = this.lanes?.length ?? 0;
    check(Number.isInteger(number) && number >= -1 && number < lanes, `lane ${number} of ${lanes}`);
    return number;
  }

  checkFeatures(tiles) {
    const { document } = this;
    const forms = Object.values(tiles).some((entry) => "forms" in entry);
    const tiled = "tiles" in document || "lanes" in document;
    const derived = "derived" in document || "contracts" in document || forms;
    const rules = [...Object.values(this.derived), ...Object.values(tiles).flatMap((entry) => entry.forms ?? [])];
    const law = rules.some((rule) => rule.how === "group");
    const expected = { tiles: tiled, derived, law, partial: "absent" in document };
    const named = document.must_understand ?? [];
    for (const [feature, needed] of Object.entries(expected)) {
      check(named.includes(feature) === needed, `the feature ${feature} does not agree with the content`);
    }
    if (this.skeleton.types && !named.includes("types")) throw new Refused("a node of the feature types");
  }

  checkTree() {
    for (const [path, node] of this.skeleton.arrays) {
      const owner = node.of ?? path;
      const known = [this.leaves, this.tiles].some((map) => map.has(owner)) || owner in this.derived;
      check(known, `no leaf for ${path}`);
    }
    const absent = this.document.absent ?? [];
    for (const path of absent) {
      check(this.skeleton.scalars.get(path)?.t === "none", `${path} is absent and in the tree`);
    }
  }
}
