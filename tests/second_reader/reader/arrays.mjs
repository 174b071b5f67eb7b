// Zarr arrays, opened with the metadata that a table implies: chunk files, shards and codecs.
import { decompress } from "../vendor/fzstd.mjs";
import { unblosc } from "./decode/blosc.mjs";
import { concat } from "./base/bytes.mjs";
import { check, Damage } from "./base/errors.mjs";
import { crc32c } from "./base/hash.mjs";
import { product } from "./leaves.mjs";

const MISSING = 0xffffffffffffffffn;

// An array of chunks; `shard` is the number of chunks of a shard by axis, or null.
export class StoredArray {
  constructor(files, path, { itemBytes, counts, chunk, shard = null, codec }) {
    Object.assign(this, { files, path, counts, shard, codec });
    this.chunkBytes = product(chunk) * itemBytes;
    this.opened = new Map(); // path of a shard -> its bytes and index
  }

  // Return the decoded bytes of the chunk at `index`, padding included.
  async chunk(index) {
    const [file, stored] = await this.stored(index);
    try {
      return await this.decode(withoutCrc(stored));
    } catch (error) {
      throw new Damage(`chunk ${index}: ${error.message}`, { file });
    }
  }

  async stored(index) {
    // A chunk is at most as large as under a codec that has failed to compress it.
    const limit = this.chunkBytes + Math.ceil(this.chunkBytes / 128) + 512;
    if (this.shard === null) {
      const file = this.file(index);
      const bytes = await this.files.read(file, limit);
      check(bytes !== null, "is missing", { file });
      return [file, bytes];
    }
    const outer = index.map((at, axis) => Math.floor(at / this.shard[axis]));
    const inner = index.map((at, axis) => at % this.shard[axis]);
    const file = this.file(outer);
    const count = product(this.shard);
    if (!this.opened.has(file)) this.opened.set(file, await this.openShard(file, count, limit));
    const { bytes, places } = this.opened.get(file);
    const number = inner.reduce((result, at, axis) => result * this.shard[axis] + at, 0);
    const [offset, size] = [places[2 * number], places[2 * number + 1]];
    check(offset !== MISSING, `chunk ${index} is missing`, { file });
    check(offset + size <= BigInt(bytes.length), `chunk ${index} is cut`, { file });
    check(size <= BigInt(limit), `chunk ${index} has ${size} bytes`, { file });
    return [file, bytes.subarray(Number(offset), Number(offset + size))];
  }

  // The index of a shard is at its end: offset and size of each chunk, then crc32c.
  async openShard(file, count, limit) {
    const indexBytes = 16 * count + 4;
    const bytes = await this.files.read(file, count * limit + indexBytes);
    check(bytes !== null, "is missing", { file });
    check(bytes.length >= indexBytes, "is cut", { file });
    let index;
    try {
      index = withoutCrc(bytes.subarray(bytes.length - indexBytes));
    } catch (error) {
      throw new Damage(`index of the shard: ${error.message}`, { file });
    }
    return { bytes, places: new BigUint64Array(index.slice().buffer) };
  }

  file(index) {
    return `${this.path}/${["c", ...index].join(".")}`;
  }

  async decode(bytes) {
    if (this.codec === "store") {
      check(bytes.length === this.chunkBytes, `${bytes.length} bytes of ${this.chunkBytes}`);
      return bytes;
    }
    const decoded = this.codec === "zstd" ? this.zstd(bytes) : this.blosc(bytes);
    check(decoded.length === this.chunkBytes, `${decoded.length} bytes of ${this.chunkBytes}`);
    return decoded;
  }

  zstd(bytes) {
    const size = contentSize(bytes);
    check(size === BigInt(this.chunkBytes), `a zstd frame of ${size} bytes, not ${this.chunkBytes}`);
    return decompress(bytes);
  }

  blosc(bytes) {
    check(bytes.length >= 16, "is cut");
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
    const size = view.getUint32(4, true);
    check(size === this.chunkBytes, `a blosc header of ${size} bytes, not ${this.chunkBytes}`);
    check(view.getUint32(12, true) === bytes.length, "a blosc header of another length");
    return unblosc(bytes);
  }
}

function withoutCrc(bytes) {
  check(bytes.length >= 4, "is cut");
  const content = bytes.subarray(0, bytes.length - 4);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  check(view.getUint32(bytes.length - 4, true) === crc32c(content), "wrong crc32c");
  return content;
}

// The content size that the header of a zstd frame states (RFC 8878, section 3.1.1.1).
function contentSize(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  check(bytes.length >= 9 && view.getUint32(0, true) === 0xfd2fb528, "no zstd frame");
  const descriptor = bytes[4];
  check((descriptor & 3) === 0, "a zstd frame with a dictionary");
  const single = (descriptor >> 5) & 1;
  const at = single ? 5 : 6;
  const flag = descriptor >> 6;
  check(flag > 0 || single, "a zstd frame without its content size");
  if (flag === 0) return BigInt(bytes[at]);
  if (flag === 1) return BigInt(view.getUint16(at, true) + 256);
  return flag === 2 ? BigInt(view.getUint32(at, true)) : view.getBigUint64(at, true);
}

// A 1-D array of `n` elements: chunks of about 1 MiB, up to 32 in a shard.
export function runArray(files, path, n, itemBytes, codec) {
  const count = Math.max(1, Math.ceil((n * itemBytes) / 2 ** 20));
  const chunk = Math.ceil(n / count);
  const shard = count > 1 ? [Math.min(32, count)] : null;
  return new StoredArray(files, path, { itemBytes, counts: [count], chunk: [chunk], shard, codec });
}

// Bytes `start` to `end` of a 1-D array of `n` elements.
export async function readRun(array, start, end) {
  const parts = [];
  for (let at = start; at < end; ) {
    const number = Math.floor(at / array.chunkBytes);
    const bytes = await array.chunk([number]);
    const from = at - number * array.chunkBytes;
    const to = Math.min(array.chunkBytes, from + end - at);
    parts.push(bytes.subarray(from, to));
    at += to - from;
  }
  return parts.length === 1 ? parts[0] : concat(parts);
}
