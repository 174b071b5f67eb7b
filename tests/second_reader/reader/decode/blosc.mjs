// Blosc chunks of version 1 (C-Blosc's README_CHUNK_FORMAT.rst) with the settings that the format
// has: lz4 with bits shuffled, or zstd with bytes shuffled.
import { decompress } from "../../vendor/fzstd.mjs";
import { check } from "../base/errors.mjs";
import { viewOf } from "../base/bytes.mjs";

const SHUFFLE = 1;
const STORED = 2;
const BITSHUFFLE = 4;
const ONE_STREAM = 16;
const CODERS = { 1: unlz4, 4: unzstd };
// Streams of a block: one for each byte of an element, unless blocks are small or elements wide.
const MOST_STREAMS = 16;
const LEAST_ELEMENTS = 128;

// Return the decoded bytes. The caller has compared both sizes of the header.
export function unblosc(bytes) {
  const view = viewOf(bytes);
  const [version, , flags, typeBytes] = bytes;
  const size = view.getUint32(4, true);
  const blockBytes = view.getUint32(8, true);
  check(version === 2, `blosc version ${version}`);
  if (flags & STORED) {
    check(bytes.length === 16 + size, "stored blosc content of another length");
    return bytes.slice(16);
  }
  const decode = CODERS[flags >> 5];
  check(decode !== undefined, `blosc codec ${flags >> 5}`);
  check(blockBytes > 0 && typeBytes > 0, `blosc blocks of ${blockBytes} bytes, elements of ${typeBytes}`);
  const result = new Uint8Array(size);
  const blocks = Math.ceil(size / blockBytes);
  check(bytes.length >= 16 + 4 * blocks, "blosc blocks are cut");
  for (let block = 0; block < blocks; block++) {
    const target = result.subarray(block * blockBytes, Math.min(size, (block + 1) * blockBytes));
    const whole = target.length === blockBytes;
    const split = !(flags & ONE_STREAM) && whole && typeBytes <= MOST_STREAMS && blockBytes / typeBytes >= LEAST_ELEMENTS;
    readBlock(bytes, view, view.getUint32(16 + 4 * block, true), target, split ? typeBytes : 1, decode);
    if (flags & SHUFFLE) unshuffleBytes(target, typeBytes);
    if (flags & BITSHUFFLE) unshuffleBits(target, typeBytes);
  }
  return result;
}

function readBlock(bytes, view, at, target, streams, decode) {
  const streamBytes = target.length / streams;
  for (let stream = 0; stream < streams; stream++) {
    check(at + 4 <= bytes.length, "a blosc block is cut");
    const size = view.getUint32(at, true);
    at += 4;
    check(at + size <= bytes.length, "a blosc stream is cut");
    const source = bytes.subarray(at, at + size);
    const part = target.subarray(stream * streamBytes, (stream + 1) * streamBytes);
    if (size === part.length) part.set(source);
    else decode(source, part);
    at += size;
  }
}

function unzstd(source, target) {
  const decoded = decompress(source);
  check(decoded.length === target.length, `zstd: ${decoded.length} bytes, not ${target.length}`);
  target.set(decoded);
}

// The block format of lz4: literals and copies of earlier bytes.
function unlz4(source, target) {
  let [at, to] = [0, 0];
  const next = () => {
    check(at < source.length, "lz4: is cut");
    return source[at++];
  };
  const length = (start) => {
    let result = start;
    for (let byte = start === 15 ? 255 : 0; byte === 255; ) {
      byte = next();
      result += byte;
    }
    return result;
  };
  while (at < source.length) {
    const token = next();
    const literals = length(token >> 4);
    check(at + literals <= source.length && to + literals <= target.length, "lz4: literals are cut");
    target.set(source.subarray(at, at + literals), to);
    at += literals;
    to += literals;
    if (at === source.length) break;
    const offset = next() | (next() << 8);
    const copied = length(token & 15) + 4;
    check(offset > 0 && offset <= to && to + copied <= target.length, "lz4: a copy from outside");
    // Byte by byte: a copy may repeat what it has just written.
    for (const end = to + copied; to < end; to++) target[to] = target[to - offset];
  }
  check(to === target.length, `lz4: ${to} bytes, not ${target.length}`);
}

// Undo the shuffle of bytes: plane p has byte p of each element. Bytes of no whole element are last.
function unshuffleBytes(bytes, typeBytes) {
  const elements = Math.floor(bytes.length / typeBytes);
  const planes = bytes.slice(0, elements * typeBytes);
  for (let byte = 0; byte < typeBytes; byte++) {
    for (let element = 0; element < elements; element++) {
      bytes[element * typeBytes + byte] = planes[byte * elements + element];
    }
  }
}

// Undo bitshuffle: plane p of bits has bit p of each element.
function unshuffleBits(bytes, typeBytes) {
  const elements = Math.floor(bytes.length / typeBytes);
  // Blocks of another number of elements are not shuffled.
  if (elements % 8 !== 0) return;
  const planes = bytes.slice(0, elements * typeBytes);
  const planeBytes = elements / 8;
  bytes.fill(0, 0, planes.length);
  for (let byte = 0; byte < typeBytes; byte++) {
    for (let bit = 0; bit < 8; bit++) {
      const start = (8 * byte + bit) * planeBytes;
      for (let group = 0; group < planeBytes; group++) {
        const bits = planes[start + group];
        if (bits === 0) continue;
        let at = 8 * group * typeBytes + byte;
        for (let i = 0; i < 8; i++, at += typeBytes) bytes[at] |= ((bits >> i) & 1) << bit;
      }
    }
  }
}
