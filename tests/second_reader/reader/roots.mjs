// Roots: which checkpoints there are, in engine roots and in manager roots.
import { check, Damage } from "./base/errors.mjs";
import { readDocument } from "./documents.mjs";
import { readManifest } from "./manifests.mjs";
import { readTags } from "./tags.mjs";
import { describe, report, Restore } from "./restore.mjs";

// Return the kind of a root and the folder of its store.
export async function openRoot(files) {
  for (const [kind, base] of [["engine", ""], ["manager", "deltacheck/"]]) {
    if ((await files.read(`${base}zarr.json`, 2 ** 28)) === null) continue;
    const { document, file } = await readDocument(files, base.slice(0, -1), { features: [], checksum: false });
    // Without a checksum, its absence would hide a damaged key.
    check("must_understand" in document, "no must_understand", { file });
    return { kind, base };
  }
  throw new Damage("no root of deltacheck", { file: "zarr.json" });
}

async function exists(files, folder) {
  return (await files.read(`${folder}/zarr.json`, 2 ** 28)) !== null;
}

// The places of manifests: {folder, place}, in ascending order.
export async function listPlaces(files, { kind, base }) {
  const places = [];
  if (kind === "engine") {
    for (const name of await files.names("checkpoints")) {
      const match = /^c([0-9]{10})$/.exec(name);
      const folder = `checkpoints/${name}`;
      if (match === null || !(await exists(files, folder))) continue;
      places.push({ folder, place: { seq: Number(match[1]) }, base });
    }
    return places;
  }
  for (const step of (await files.names("")).filter((name) => /^(0|[1-9][0-9]*)$/.test(name))) {
    for (const item of await files.names(step)) {
      const folder = `${step}/${item}`;
      if (!(await exists(files, folder))) continue;
      places.push({ folder, place: { step: Number(step) }, base, item });
    }
  }
  return places;
}

// Read a root: {kind, tags, steps: [{step, seq, file, leaves} or {error, ...}]}, ascending by seq.
// If several checkpoints have the same step, only the newest is reported.
export async function readRoot(files, wanted = null) {
  let root;
  let places;
  try {
    root = await openRoot(files);
    places = await listPlaces(files, root);
  } catch (error) {
    return { error: describe(error), steps: [] };
  }
  const steps = [];
  const opened = new Map();
  for (const { folder, place, base, item } of places) {
    try {
      const manifest = await readManifest(files, folder, place);
      steps.push({ step: manifest.step, seq: manifest.seq, item, file: manifest.file, manifest, base });
    } catch (error) {
      steps.push({ ...describe(error), file: `${folder}/zarr.json` });
    }
  }
  const newest = new Map();
  for (const entry of steps) {
    const key = `${entry.step} ${entry.item}`;
    if (entry.manifest && !(newest.get(key)?.seq > entry.seq)) newest.set(key, entry);
  }
  const chosen = steps.filter((entry) => {
    if (!entry.manifest) return true;
    return newest.get(`${entry.step} ${entry.item}`) === entry && (wanted === null || entry.step === wanted);
  });
  const result = [];
  for (const { manifest, base: store, ...entry } of chosen) {
    if (!manifest) {
      result.push(entry);
      continue;
    }
    const restore = new Restore(files, store, manifest, opened);
    const leaves = await report(restore, manifest.skeleton.arrays);
    const scalars = Object.fromEntries(manifest.skeleton.scalars);
    result.push({ ...entry, absent: manifest.document.absent, scalars, leaves });
  }
  try {
    const manifests = steps.flatMap(({ manifest }) => manifest ?? []);
    return { kind: root.kind, tags: await readTags(files, root.base, manifests), steps: result };
  } catch (error) {
    return { kind: root.kind, error: describe(error), steps: result };
  }
}

// The errors of a result of `readRoot`.
export function errorsOf(result) {
  const errors = result.error ? [result.error] : [];
  for (const step of result.steps) {
    if (step.error) errors.push(step);
    const leaves = Object.values(step.leaves ?? {});
    errors.push(...leaves.filter((leaf) => leaf.error));
  }
  return errors;
}
