// The data of the page from a folder of this machine, read in the browser by the second reader.
// The documents are those of `source.mjs`, without what follows from policies and tables.
import { Damage, NotImplemented } from "./reader/base/errors.mjs";
import { itemBytes, product } from "./reader/leaves.mjs";
import { readManifest } from "./reader/manifests.mjs";
import { describe, Restore } from "./reader/restore.mjs";
import { listPlaces, openRoot } from "./reader/roots.mjs";
import { readTags } from "./reader/tags.mjs";
import { SourceError } from "./source.mjs";
import { changeMap, drift, texts } from "./values.mjs";

const MOST_VALUES = 4096;

// Files that a user has chosen, by their paths in the folder.
class ChosenFiles {
  constructor(files) {
    this.files = new Map();
    this.folders = new Map();
    this.sizes = new Map();
    for (const file of files) {
      const parts = file.webkitRelativePath.split("/").slice(1);
      this.files.set(parts.join("/"), file);
      for (let count = 1; count < parts.length; count++) {
        const [parent, folder] = [count - 1, count].map((end) => parts.slice(0, end).join("/"));
        this.sizes.set(folder, (this.sizes.get(folder) ?? 0) + file.size);
        if (!this.folders.has(parent)) this.folders.set(parent, new Set());
        this.folders.get(parent).add(parts[count - 1]);
      }
    }
  }

  async read(path, limit) {
    const file = this.files.get(path);
    if (file === undefined) return null;
    if (file.size > limit) throw new Damage(`${file.size} bytes, at most ${limit} expected`, { file: path });
    try {
      return new Uint8Array(await file.arrayBuffer());
    } catch (error) {
      throw new Damage(`cannot be read: ${error.name}`, { file: path });
    }
  }

  async names(folder) {
    return [...(this.folders.get(folder) ?? [])].sort();
  }

  bytesBelow(folder) {
    return this.sizes.get(folder) ?? 0;
  }
}

function failed(error) {
  if (error instanceof SourceError) return error;
  const { error: message, kind, ...place } = describe(error);
  const where = Object.entries(place).map(([key, value]) => `${key} ${value}`).join(", ");
  const name = { damaged: "Damaged", refused: "UnsupportedFormat", "not implemented": "ReplayNeeded" }[kind];
  return new SourceError({ kind: name, message: where ? `${where}: ${message}` : message });
}

export class Folder {
  constructor(files) {
    this.name = files[0]?.webkitRelativePath.split("/")[0] ?? "";
    this.files = new ChosenFiles(files);
    this.opened = new Map();
    this.reading = null;
  }

  // Read all manifests, once: the files are those of the moment when the folder was chosen.
  read() {
    this.reading ??= this.readAll().catch((error) => {
      throw failed(error);
    });
    return this.reading;
  }

  async readAll() {
    const root = await openRoot(this.files);
    const [manifests, problems] = [[], []];
    for (const { folder, place, item } of await listPlaces(this.files, root)) {
      try {
        const manifest = await readManifest(this.files, folder, place);
        manifests.push({ manifest, item: item ?? null, folder });
      } catch (error) {
        problems.push(failed(error).message);
      }
    }
    manifests.sort((a, b) => a.manifest.seq - b.manifest.seq);
    let tags = {};
    try {
      tags = await readTags(this.files, root.base, manifests.map(({ manifest }) => manifest));
    } catch (error) {
      problems.push(failed(error).message);
    }
    return { base: root.base, manifests, problems, tags };
  }

  async restore(word) {
    const { base, manifests, tags } = await this.read();
    const chosen = manifests.findLast(({ manifest: { seq, step } }) =>
      word === "latest" || (word.startsWith("@") ? tags[word.slice(1)]?.seq === seq : String(step) === word));
    if (chosen === undefined) throw new SourceError({ kind: "StepNotFound", message: `the folder has no step ${word}` });
    return new Restore(this.files, base, chosen.manifest, this.opened);
  }

  // The bytes of the segments that the save of a step wrote.
  storedBytes(base, manifest) {
    const own = manifest.segments.filter(({ id }) => Number(id.slice(1, 11)) === manifest.seq);
    return own.reduce((sum, { id }) => sum + this.files.bytesBelow(`${base}segments/${id}`), 0);
  }

  row(base, manifest, item, tags) {
    return { ...row(manifest, item, tags), stored_bytes: this.storedBytes(base, manifest) };
  }

  async steps() {
    const { base, manifests, problems, tags } = await this.read();
    return { root: this.name, problems, steps: manifests.map(({ manifest, item }) => this.row(base, manifest, item, tags)) };
  }

  async log() {
    const { base, manifests, problems } = await this.read();
    const written = ({ manifest, folder }) => this.storedBytes(base, manifest) + this.files.files.get(`${folder}/zarr.json`).size;
    return { root: this.name, problems, steps: manifests.map((entry) => ({ step: entry.manifest.step, written_bytes: written(entry) })) };
  }

  async show(step) {
    const restore = await this.restore(step);
    const { manifest } = restore;
    const { document } = manifest;
    const leaves = [...manifest.skeleton.arrays].map(([path, node]) => leafRow(manifest, path, node.of ?? path));
    const { replay } = document;
    return {
      ...this.row(restore.base, manifest, null, {}), root: this.name, writer: document.writer, digest: null, contract: document.contract,
      absent: document.absent ?? [], stage: document.stage ?? "", stage_reason: document.stage_reason ?? "",
      replay: replay ? { base_step: replay.base_step, update: replay.update, steps: replay.steps.length } : null,
      leaves, groups: groups(leaves),
      scalars: [...manifest.skeleton.scalars].map(([path, node]) => ({ path, type: node.t, value: shownValue(node) })),
      segments: manifest.segments.map(({ id }) => ({ id, stored_bytes: this.files.bytesBelow(`${restore.base}segments/${id}`) })),
    };
  }

  async leaf(step, path) {
    const restore = await this.restore(step);
    const node = restore.manifest.skeleton.arrays.get(path);
    if (node === undefined) throw new SourceError({ kind: "LeafNotFound", message: `step ${step} has no leaf ${path}` });
    try {
      return await restore.leaf(node.of ?? path);
    } catch (error) {
      throw failed(error);
    }
  }

  async values(step, path, text) {
    const { dtype, shape, bytes } = await this.leaf(step, path);
    const box = boxOf(text, shape);
    const sizes = box.map(([start, stop]) => stop - start);
    if (product(sizes) > MOST_VALUES) {
      throw new SourceError({ kind: "Misuse", message: `the slice has ${product(sizes)} values, more than ${MOST_VALUES}; name a smaller one` });
    }
    const strides = shape.map((_, axis) => product(shape.slice(axis + 1)));
    const part = new Uint8Array(product(sizes) * itemBytes(dtype));
    for (let number = 0; number < product(sizes); number++) {
      let [at, rest] = [0, number];
      for (let axis = sizes.length - 1; axis >= 0; axis--) {
        at += (box[axis][0] + (rest % sizes[axis])) * strides[axis];
        rest = Math.floor(rest / sizes[axis]);
      }
      part.set(bytes.subarray(at * itemBytes(dtype), (at + 1) * itemBytes(dtype)), number * itemBytes(dtype));
    }
    return { path, dtype, leaf_shape: shape, box, shape: sizes, values: texts(dtype, part) };
  }

  async diff(before, after) {
    const [old, recent] = [(await this.restore(before)).manifest, (await this.restore(after)).manifest];
    const [olds, recents] = [old, recent].map((manifest) => new Map(
      [...manifest.skeleton.arrays].filter(([, node]) => node.of === undefined).map(([path]) => [path, { ...leafRow(manifest, path, path), mark: mark(manifest, path) }])));
    const result = { unchanged: 0, changed: [], added: [], removed: [], reshaped: [] };
    for (const path of [...new Set([...olds.keys(), ...recents.keys()])].sort()) {
      const [a, b] = [olds.get(path), recents.get(path)];
      if (a === undefined) result.added.push(b);
      else if (b === undefined) result.removed.push(a);
      else if (a.dtype !== null && b.dtype !== null && JSON.stringify([a.dtype, a.shape]) !== JSON.stringify([b.dtype, b.shape])) result.reshaped.push({ path, before: a, after: b });
      else if (a.mark !== null && a.mark === b.mark) result.unchanged++;
      else result.changed.push(b);
    }
    return { ...result, scalars: scalarsOf(old, recent) };
  }

  async change(before, after, path) {
    const [old, recent] = [await this.leaf(before, path), await this.leaf(after, path)];
    if (old.dtype !== recent.dtype || String(old.shape) !== String(recent.shape)) throw new SourceError({ kind: "Misuse", message: "the leaf has another type or shape" });
    return { path, ...drift(recent.dtype, old.bytes, recent.bytes), map: changeMap(recent.shape, itemBytes(recent.dtype), old.bytes, recent.bytes) };
  }

  // There is no check but that of every byte.
  async verify(step) {
    const { manifests, problems } = await this.read();
    const words = step === "" ? manifests.map(({ manifest }) => manifest) : [(await this.restore(step)).manifest];
    const findings = problems.map((problem) => ({ step: null, leaf: null, problem }));
    let [checked, skipped] = [0, 0];
    for (const manifest of words) {
      const restore = new Restore(this.files, (await this.read()).base, manifest, this.opened);
      for (const [path, node] of manifest.skeleton.arrays) {
        if (node.of !== undefined) continue;
        try {
          checked += (await restore.leaf(path)).bytes.length;
        } catch (error) {
          if (error instanceof NotImplemented) skipped++;
          else findings.push({ step: manifest.step, leaf: path, problem: failed(error).message });
        }
      }
    }
    return { deep: true, steps: words.map(({ step: number }) => number), ok: findings.length === 0, findings, redundant: [], contracts: [], checked_bytes: checked, skipped };
  }
}

function row(manifest, item, tags) {
  const { document, seq, step } = manifest;
  const owners = [...manifest.skeleton.arrays].filter(([, node]) => node.of === undefined);
  return {
    step, seq, item, problem: null, durability: document.durability ?? "power", chain_depth: null,
    time: timeOf(Number(document.time)),
    tags: Object.keys(tags).filter((name) => tags[name].seq === seq),
    raw_bytes: owners.reduce((sum, [path]) => sum + (specOf(manifest, path)?.bytes ?? 0), 0),
    replayed_steps: document.replay?.steps.length ?? 0, metrics: { ...document.metrics },
  };
}

// The time of a manifest is for people and may be any number.
function timeOf(seconds) {
  // Rounded to microseconds, as Python's times are, and then cut.
  const moment = new Date(Math.floor(Math.round(1e6 * seconds) / 1000));
  return Number.isNaN(moment.getTime()) ? null : moment.toISOString();
}

function specOf(manifest, path) {
  const { dtype, shape } = manifest.tiles.get(path) ?? manifest.derived[path] ?? manifest.leaves.get(path)?.grid ?? {};
  return dtype === undefined ? null : { dtype, shape, bytes: product(shape) * itemBytes(dtype) };
}

function leafRow(manifest, path, owner) {
  const spec = specOf(manifest, owner);
  const contract = manifest.document.contracts?.[owner];
  const terms = contract?.terms;
  const age = contract?.from_step === undefined ? null : contract.age_steps ?? manifest.step - contract.from_step;
  const drifted = terms?.max_drift === undefined ? 0 : contract.measured / terms.max_drift;
  const bounded = terms?.contract === "bounded";
  return {
    path, tied_to: path === owner ? null : owner, dtype: spec?.dtype ?? null, shape: spec?.shape ?? null, raw_bytes: spec?.bytes ?? null,
    contract: terms?.contract ?? "exact", measured: contract?.measured ?? null, from_step: contract?.from_step ?? null, age_steps: age,
    limit: terms ? (bounded ? `${terms.limit} ${terms.norm}` : `${terms.max_drift === undefined ? "" : `${terms.max_drift} octaves, `}${terms.max_age_steps} steps`) : null,
    used: terms ? (bounded ? contract.measured / terms.limit : Math.max(drifted, (age ?? 0) / Math.max(1, terms.max_age_steps))) : null,
    derived: manifest.derived[owner]?.how ?? null, chain_depth: null, density: null,
    kind: owner in (manifest.document.replay?.digests ?? {}) ? "replayed" : null,
  };
}

// A text that is equal for equal bytes only; null if the manifest has none.
function mark(manifest, path) {
  // What is stored of a replayed leaf is its content at another step.
  const replayed = manifest.document.replay?.digests[path];
  if (replayed !== undefined) return replayed;
  const stored = manifest.leaves.get(path);
  return path in manifest.derived || !stored ? null : stored.digest;
}

// Leaves whose paths differ in numbers only, in the order of the first of each.
function groups(leaves) {
  const byName = new Map();
  for (const leaf of leaves) {
    const name = leaf.path.replace(/(^|[/.])[0-9]+(?=[/.]|$)/g, "$1*");
    if (!byName.has(name)) byName.set(name, []);
    byName.get(name).push(leaf);
  }
  const each = (members, key) => [...new Set(members.map((leaf) => leaf[key]).filter((value) => value !== null))].sort().join(", ") || null;
  return [...byName].map(([path, members]) => ({
    path, members: members.map((leaf) => leaf.path), ...Object.fromEntries(["dtype", "contract", "derived", "kind"].map((key) => [key, each(members, key)])),
    chain_depth: null, density: null, raw_bytes: members.reduce((sum, leaf) => sum + (leaf.raw_bytes ?? 0), 0),
  }));
}

function shownValue(node) {
  return node.t === "json" ? `a list of ${JSON.parse(node.v).length} items` : node.v ?? null;
}

function scalarsOf(before, after) {
  const [old, recent] = [before, after].map(({ skeleton }) => skeleton.scalars);
  const described = (node) => (node === undefined ? null : { type: node.t, value: shownValue(node) });
  return [...new Set([...old.keys(), ...recent.keys()])].sort()
    .filter((path) => JSON.stringify(old.get(path)) !== JSON.stringify(recent.get(path)))
    .map((path) => ({ path, before: described(old.get(path)), after: described(recent.get(path)) }));
}

// The bounds of a slice such as "0:8, 3, :", as NumPy reads it.
export function boxOf(text, shape) {
  const parts = text.trim() === "" ? [] : text.split(",").map((part) => part.trim());
  const wrong = (message) => new SourceError({ kind: "Misuse", message });
  if (parts.length > shape.length) throw wrong(`${parts.length} slices are too many for the shape [${shape}]`);
  return shape.map((size, axis) => {
    const match = /^(-?[0-9]{1,15})?(?:\s*(:)\s*(-?[0-9]{1,15})?)?$/.exec(parts[axis] ?? ":");
    if (match === null || parts[axis] === "") throw wrong(`a slice is like 0:8, 3, : and not ${text}`);
    const [, first, colon, stop] = match;
    const bounded = (value, missing) => (value === undefined ? missing : Math.min(size, Math.max(0, Number(value) + (Number(value) < 0 ? size : 0))));
    if (colon === undefined) {
      if (!(Number(first) >= -size && Number(first) < size)) throw wrong(`index ${first} is out of range for an axis of ${size}`);
      const at = (Number(first) + size) % size;
      return [at, at + 1];
    }
    const start = bounded(first, 0);
    return [start, Math.max(start, bounded(stop, size))];
  });
}
