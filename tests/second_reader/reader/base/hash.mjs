// Checksums: xxh3 of 128 bits as 32 hexadecimal digits (high half first), and crc32c.
import "../../vendor/crc32.mjs";
import "../../vendor/xxhash128.mjs";
import { fromHex, toHex } from "./bytes.mjs";

const { createCRC32, createXXHash128 } = globalThis.hashwasm;
const xxh = await createXXHash128();
const crc = await createCRC32(0x82f63b78);

export function xxh3(...parts) {
  xxh.init();
  for (const part of parts) xxh.update(part);
  return xxh.digest();
}

export function crc32c(bytes) {
  return Number.parseInt(crc.init().update(bytes).digest(), 16);
}

// The digest of a leaf follows from the digests of its chunks, 16 big-endian bytes each.
export function leafDigest(chunkDigests) {
  return xxh3(fromHex(chunkDigests.join("")));
}

export async function sha256(bytes) {
  return toHex(new Uint8Array(await crypto.subtle.digest("SHA-256", bytes)));
}
