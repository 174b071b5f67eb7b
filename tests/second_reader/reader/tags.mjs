// Tags: names of checkpoints.
import { check } from "./base/errors.mjs";
import { isCount, readDocument } from "./documents.mjs";

// Read all tags of a store: name -> {step, seq}, those of the manifest with the tag's nonce.
export async function readTags(files, base, manifests) {
  const tags = {};
  const folder = `${base}control/tags`;
  for (const name of await files.names(folder)) {
    if (!/^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$/.test(name) || /^[0-9]+$/.test(name) || name === "latest") continue;
    const file = `${folder}/${name}/zarr.json`;
    if ((await files.read(file, 2 ** 28)) === null) continue;
    const { document } = await readDocument(files, `${folder}/${name}`, { features: [] });
    check(document.name === name, `the tag ${JSON.stringify(document.name)} in the place of ${name}`, { file });
    check(isCount(document.seq) && typeof document.nonce === "string", "a tag of another form", { file });
    const named = manifests.filter((manifest) => manifest.document.nonce === document.nonce);
    check(named.length > 0, `no checkpoint has the nonce ${document.nonce} of the tag`, { file });
    const newest = named.reduce((a, b) => (a.seq > b.seq ? a : b));
    tags[name] = { step: newest.step, seq: newest.seq };
  }
  return tags;
}
