// The methods of encoded chunks (section 4): one row and its streams become the chunk's bytes.
import { viewOf } from "../base/bytes.mjs";
import { check } from "../base/errors.mjs";
import { GRADIENT, LAW_BYTES, MEAN, predictSquares, predictStep, predictWeights, readLaw, STEPS } from "./laws.mjs";

const TILE_BYTES = 16384;

const ofBytes = (name) => Array.from({ length: 8 }, (_, k) => name + k);

// The streams, in the order in which they lie in an array.
export const STREAMS = ["tiles", "gaps", "bitmap", "values", "wide", ...ofBytes("diff"), ...ofBytes("plane"), "raw", "law"];

// The method whose streams ordered chunks have.
const PLAIN = { 6: 1, 7: 2 };

export function isOrdered(method) {
  return method in PLAIN;
}

export function isLaw(method) {
  return method === GRADIENT || method === MEAN || method === STEPS;
}

// Sizes in bytes of the streams of a row, in order.
export function streamSizes({ method, ...row }) {
  if (isLaw(method)) return lawSizes({ method, ...row });
  if (!isOrdered(method)) return plainSizes({ method, ...row });
  check(row.wordBytes === 2, `an ordered chunk of words of ${row.wordBytes} bytes`);
  return plainSizes({ method: PLAIN[method], ...row });
}

function plainSizes({ method, changed, gapBytes, wideCount, words, wordBytes }) {
  const tiles = 6 * Math.ceil(words / (TILE_BYTES / wordBytes));
  const wide = wideCount * wordBytes;
  const planes = (name) => Array.from({ length: wordBytes }, (_, k) => [name + k, words]);
  if (method === 1) return [["tiles", tiles], ["gaps", gapBytes], ["values", changed], ["wide", wide]];
  if (method === 2) {
    return [["tiles", tiles], ["bitmap", Math.ceil(words / 8)], ["values", changed], ["wide", wide]];
  }
  if (method === 3) return planes("diff");
  if (method === 4) return planes("plane");
  if (method === 5) return [["raw", words * wordBytes]];
  check(false, `unknown method ${method}`);
}

function lawSizes({ method, ...row }) {
  check(row.wordBytes === 4 && row.words % 3 === 0, `a law of ${row.words} words of ${row.wordBytes} bytes`);
  const planes = (name, count, words) => Array.from({ length: count }, (_, k) => [name + k, words]);
  const law = [["law", LAW_BYTES]];
  if (method === STEPS) return [...planes("diff", 4, row.words), ...law];
  const dense = method === GRADIENT ? planes("plane", 2, row.words / 3) : planes("diff", 4, row.words / 3);
  return [...plainSizes({ method: 1, ...row }), ...dense, ...law];
}

export function needsBase(method) {
  return method < 4 || isOrdered(method) || isLaw(method);
}

// Return the chunk. `base` is the chunk before (null if there is none), and stays as it is.
export function decodeChunk(row, streams, base) {
  if (isLaw(row.method)) return decodeByLaw(row, streams, base);
  if (!isOrdered(row.method)) return decodePlain(row, streams, base, (position) => position);
  check(base !== null, "a change without a base");
  const order = classOrder(base);
  return decodePlain({ ...row, method: PLAIN[row.method] }, streams, base, (position) => order[position]);
}

// A chunk that is stored as the difference to a prediction (4.6).
function decodeByLaw(row, streams, base) {
  check(base !== null, "a law without a base");
  for (const [name, size] of streamSizes(row)) {
    check(streams[name].length === size, `stream ${name} has ${streams[name].length} bytes, not ${size}`);
  }
  check(row.changed <= row.words, `${row.changed} changed words of ${row.words}`);
  check(row.method !== STEPS || (row.gapBytes === 0 && row.wideCount === 0), "gaps or wide differences under steps law");
  const law = readLaw(streams.law);
  const count = row.words / 3;
  const next = base.slice();
  // Adds the differences of a part, from the difference `from` on.
  const addPart = (part, from) => {
    const of = {};
    for (let k = 0; k < 4; k++) of[`diff${k}`] = streams[`diff${k}`].subarray(from, from + count);
    const addTo = adder(next, 4);
    return addPlanes({ words: count, wordBytes: 4 }, of, (position, z) => addTo(part * count + position, z));
  };
  if (row.method === STEPS) {
    let changed = addPart(1, count);
    predictSquares(law, base, next, count);
    changed += addPart(2, 2 * count);
    predictWeights(law, base, next, count);
    changed += addPart(0, 0);
    check(changed === row.changed, `${changed} changed words, not ${row.changed}`);
    return next;
  }
  let gradients = null;
  if (row.method === GRADIENT) {
    const joined = joinPlanes({ words: count, wordBytes: 2 }, streams);
    gradients = new Uint16Array(joined.buffer);
  } else addPart(1, 0);
  predictStep(law, base, gradients, next, count);
  const exceptions = { ...row, method: 1 };
  const addTo = adder(next, 4);
  addChanges(exceptions, streams, addTo);
  return next;
}

// The numbers of the words of 2 bytes in the order of their classes (4.1).
function classOrder(base) {
  const view = viewOf(base);
  const classes = Array.from({ length: 256 }, () => []);
  for (let word = 0; 2 * word < base.length; word++) {
    classes[(view.getUint16(2 * word, true) >>> 7) & 255].push(word);
  }
  return classes.flat();
}

function decodePlain(row, streams, base, wordAt) {
  for (const [name, size] of streamSizes(row)) {
    check(streams[name].length === size, `stream ${name} has ${streams[name].length} bytes, not ${size}`);
  }
  check(row.words < 2 ** 32, `${row.words} words`);
  check(row.changed <= row.words, `${row.changed} changed words of ${row.words}`);
  check(row.method === 1 || row.gapBytes === 0, `${row.gapBytes} gap bytes`);
  check(row.method < 3 || row.wideCount === 0, `${row.wideCount} wide differences`);
  if (row.method === 5) return streams.raw.slice();
  if (row.method === 4) return joinPlanes(row, streams);
  check(base !== null, "a change without a base");
  const result = base.slice();
  const addTo = adder(result, row.wordBytes);
  const add = (position, z) => addTo(wordAt(position), z);
  if (row.method === 3) {
    const changed = addPlanes(row, streams, add);
    check(changed === row.changed, `${changed} changed words, not ${row.changed}`);
  } else addChanges(row, streams, add);
  return result;
}

// Return a function that adds the difference with zigzag code `z` to a word.
function adder(bytes, wordBytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  if (wordBytes === 8) {
    return (word, z) => {
      const wide = BigInt(z);
      const difference = (wide >> 1n) ^ -(wide & 1n);
      view.setBigUint64(8 * word, BigInt.asUintN(64, view.getBigUint64(8 * word, true) + difference), true);
    };
  }
  const undo = (z) => (z >>> 1) ^ -(z & 1);
  if (wordBytes === 4) {
    return (word, z) => view.setUint32(4 * word, view.getUint32(4 * word, true) + undo(z), true);
  }
  if (wordBytes === 2) {
    return (word, z) => view.setUint16(2 * word, view.getUint16(2 * word, true) + undo(z), true);
  }
  return (word, z) => view.setUint8(word, view.getUint8(word) + undo(z));
}

function joinPlanes({ words, wordBytes }, streams) {
  const result = new Uint8Array(words * wordBytes);
  for (let k = 0; k < wordBytes; k++) {
    const plane = streams[`plane${k}`];
    for (let i = 0; i < words; i++) result[i * wordBytes + k] = plane[i];
  }
  if (wordBytes !== 2 && wordBytes !== 4) return result;
  // The word was rotated left by one bit.
  const view = new DataView(result.buffer);
  for (let i = 0; i < words; i++) {
    if (wordBytes === 2) {
      const word = view.getUint16(2 * i, true);
      view.setUint16(2 * i, (word >>> 1) | (word << 15), true);
    } else {
      const word = view.getUint32(4 * i, true);
      view.setUint32(4 * i, (word >>> 1) | (word << 31), true);
    }
  }
  return result;
}

function addPlanes({ words, wordBytes }, streams, add) {
  let changed = 0;
  for (let i = 0; i < words; i++) {
    let z = 0;
    if (wordBytes === 8) {
      z = 0n;
      for (let k = 7; k >= 0; k--) z = (z << 8n) | BigInt(streams[`diff${k}`][i]);
    } else for (let k = wordBytes - 1; k >= 0; k--) z = ((z << 8) | streams[`diff${k}`][i]) >>> 0;
    if (z != 0) {
      changed++;
      add(i, z);
    }
  }
  return changed;
}

// Methods sparse and bitmap. All positions and differences are found and checked, then applied.
function addChanges(row, streams, add) {
  const { words, wordBytes } = row;
  const tileWords = TILE_BYTES / wordBytes;
  const tiles = new DataView(streams.tiles.buffer, streams.tiles.byteOffset, streams.tiles.length);
  const changes = [];
  const used = { changed: 0, gaps: 0, wide: 0 };
  for (let tile = 0; tile * tileWords < words; tile++) {
    const [changed, gaps, wide] = [0, 2, 4].map((at) => tiles.getUint16(6 * tile + at, true));
    const first = tile * tileWords;
    const size = Math.min(tileWords, words - first);
    const found = row.method === 1
      ? gapPositions(streams.gaps.subarray(used.gaps, used.gaps + gaps), changed, size)
      : bitPositions(streams.bitmap, first, size);
    check(found.length === changed, `tile ${tile}: ${found.length} changed words, not ${changed}`);
    check(row.method === 1 || gaps === 0, `tile ${tile}: gap bytes under bitmap`);
    const values = streams.values.subarray(used.changed, used.changed + changed);
    check(values.length === changed, `tile ${tile}: values are cut`);
    let next = used.wide;
    found.forEach((position, i) => {
      let z = values[i] + 1;
      if (values[i] === 255) {
        check(next < row.wideCount, `tile ${tile}: too many wide differences`);
        z = readWord(streams.wide, next++, wordBytes);
        check(z > 255, `tile ${tile}: a wide difference of ${z}`);
      }
      changes.push([first + position, z]);
    });
    check(next - used.wide === wide, `tile ${tile}: ${next - used.wide} wide differences, not ${wide}`);
    used.changed += changed;
    used.gaps += gaps;
    used.wide = next;
  }
  check(used.changed === row.changed, `tiles have ${used.changed} changed words, not ${row.changed}`);
  check(used.gaps === row.gapBytes, `tiles have ${used.gaps} gap bytes, not ${row.gapBytes}`);
  check(used.wide === row.wideCount, `tiles have ${used.wide} wide differences, not ${row.wideCount}`);
  if (row.method === 2) {
    for (let bit = words; bit < 8 * streams.bitmap.length; bit++) {
      check(!bitAt(streams.bitmap, bit), "an unused bit of the bitmap is set");
    }
  }
  for (const [position, z] of changes) add(position, z);
}

function gapPositions(gaps, changed, size) {
  const positions = [];
  let position = -1;
  let gap = 0;
  for (const byte of gaps) {
    gap += byte;
    if (byte === 255) continue;
    position += gap + 1;
    check(position < size, `a position ${position} outside its tile`);
    positions.push(position);
    gap = 0;
  }
  check(gap === 0, "gaps end with 255");
  return positions;
}

function bitAt(bitmap, bit) {
  return (bitmap[bit >> 3] >> (bit & 7)) & 1;
}

function bitPositions(bitmap, first, size) {
  const positions = [];
  for (let i = 0; i < size; i++) if (bitAt(bitmap, first + i)) positions.push(i);
  return positions;
}

function readWord(bytes, number, wordBytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  if (wordBytes === 8) return view.getBigUint64(8 * number, true);
  if (wordBytes === 4) return view.getUint32(4 * number, true);
  return wordBytes === 2 ? view.getUint16(2 * number, true) : view.getUint8(number);
}
