// Documents: attributes of zarr groups, with format, version, features and checksum.
import { check, Damage, Refused } from "./base/errors.mjs";
import { xxh3 } from "./base/hash.mjs";
import { canonicalText, parseJson } from "./base/json.mjs";

const LIMIT = 2 ** 28;

// Read the document of the group `folder`, and the digest of its file.
export async function readDocument(files, folder, { features, checksum = true }) {
  const file = folder === "" ? "zarr.json" : `${folder}/zarr.json`;
  const bytes = await files.read(file, LIMIT);
  check(bytes !== null, "is missing", { file });
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    const document = openGroup(parseJson(text));
    checkHead(document, features);
    if (checksum) {
      const expected = xxh3(canonicalText(document, "checksum"));
      check(document.checksum === expected, `checksum ${document.checksum}, computed ${expected}`);
    }
    return { document, digest: xxh3(bytes), file };
  } catch (error) {
    if (error instanceof Refused) throw new Refused(error.message, { file });
    throw new Damage(error.message, { file });
  }
}

function openGroup(group) {
  check(isObject(group), "not a JSON object");
  check(group.zarr_format === 3 && group.node_type === "group", "not a zarr v3 group");
  const keys = Object.keys(group).sort().join();
  check(keys === "attributes,node_type,zarr_format", `a group with the keys ${keys}`);
  check(isObject(group.attributes), "attributes is not an object");
  check(Object.keys(group.attributes).join() === "deltacheck", "attributes other than deltacheck");
  check(isObject(group.attributes.deltacheck), "the document is not an object");
  return group.attributes.deltacheck;
}

function checkHead(document, features) {
  if (document.format !== "deltacheck") throw new Refused(`format ${document.format}`);
  if (document.version !== 1) throw new Refused(`version ${document.version}`);
  const needed = document.must_understand ?? [];
  check(Array.isArray(needed), "must_understand is not a list");
  for (const feature of needed) {
    if (!features.includes(feature)) throw new Refused(`unknown feature ${JSON.stringify(feature)}`);
  }
}

export function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function isCount(value) {
  return Number.isSafeInteger(value) && value >= 0;
}

export function isDigest(value) {
  return typeof value === "string" && /^[0-9a-f]{32}$/.test(value);
}
