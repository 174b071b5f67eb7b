// Codes of derived leaves (section 4.5). A JavaScript number is a float64, and Math.fround rounds
// it to float32, to nearest, ties to even.
import { check } from "../base/errors.mjs";

const LARGEST = 3.4028234663852886e38;
const word = new DataView(new ArrayBuffer(4));

export function floatBits(value) {
  word.setFloat32(0, value);
  return word.getUint32(0);
}

export function bitsFloat(bits) {
  word.setUint32(0, bits);
  return word.getFloat32(0);
}

// The number u of element i, from 0 to 1.
export function phase(seed, i) {
  const wrap = (value) => BigInt.asUintN(64, value);
  let h = wrap(BigInt(seed) + BigInt(i));
  h = wrap((h ^ (h >> 30n)) * 0xbf58476d1ce4e5b9n);
  h = wrap((h ^ (h >> 27n)) * 0x94d049bb133111ebn);
  h ^= h >> 31n;
  return Number(h >> 40n) * 2 ** -24;
}

function limited(value) {
  return Math.fround(Math.min(LARGEST, Math.max(-LARGEST, value)));
}

// The nearest finite float32 to `x` that rounds to the bfloat16 with these bits.
export function moveTo(x, bits) {
  const size = bits & 0x7fff;
  if (size > 0x7f80) return x;
  const odd = size & 1;
  const least = size === 0 ? 0 : size * 65536 - 0x8000 + odd;
  const most = Math.min(0x7f7fffff, size * 65536 + 0x8000 - odd);
  const negative = bits >> 15 === 1;
  const along = negative ? -x : x;
  const magnitude = along > 0 ? floatBits(along) : 0;
  const nearest = bitsFloat(Math.min(most, Math.max(least, magnitude)));
  return negative ? -nearest : nearest;
}

function checkSpacing(spacing) {
  check(spacing >= 2 ** -149 && spacing <= LARGEST, `spacing ${spacing}`);
}

// The parameters of a lattice that was halved: the spacing before, and 2 ** n.
function checkHalved(spacing, n, f) {
  checkSpacing(spacing);
  const scale = 2 ** n;
  check(Number.isInteger(f) && f >= 0 && f <= 7, `spare_bits ${f}`);
  check(Number.isInteger(n) && n >= 0 && n <= 31 && spacing * scale <= LARGEST, `halvings ${n}`);
  return { S: spacing * scale, scale };
}

// 4.5.1. `weights` are the bits of bfloat16 elements, or null.
export function lattice(codes, weights, { spacing, seed = 0, halvings: n = 0, spare_bits: f = 0 }) {
  const { S, scale } = checkHalved(spacing, n, f);
  return Float32Array.from(codes, (code, i) => {
    const q = code / 2 ** f;
    check(Number.isInteger(q), `element ${i}: code ${code} with ${f} spare bits`);
    const x = limited((q / scale - phase(seed, i) + 0.5 / scale) * S);
    return weights === null ? x : moveTo(x, weights[i]);
  });
}

// 4.5.3. A point of the cell of each weight.
export function drawn(weights, { seed = 0 }) {
  return Float32Array.from(weights, (bits, i) => {
    const exponent = (bits >> 7) & 0xff;
    check(exponent !== 0xff, `element ${i}: a weight that is not finite`);
    return point(bits, exponent, phase(seed, i));
  });
}

function point(bits, exponent, u) {
  const W = 2 ** (Math.max(1, exponent) - 134);
  return moveTo(Math.fround(bitsFloat(bits * 65536) + (u - 0.5) * W), bits);
}

// 4.5.3. A code is a word of `size` bits.
export function nested(codes, weights, { spacing, seed = 0, halvings: n = 0, spare_bits: f = 0 }, size) {
  const { S, scale } = checkHalved(spacing, n, f);
  // The largest integer whose power of two is at most S. A logarithm can be one too large or small.
  let e = Math.floor(Math.log2(S));
  while (2 ** e > S) e--;
  while (2 ** (e + 1) <= S) e++;
  return Float32Array.from(weights, (bits, i) => {
    const exponent = (bits >> 7) & 0xff;
    check(exponent !== 0xff, `element ${i}: a weight that is not finite`);
    const b = bitsFloat(bits * 65536);
    const E = Math.max(1, exponent);
    const W = 2 ** (E - 134);
    const width = Math.max(0, E - 133 - e + n);
    check(width + f <= size, `element ${i}: ${width} bits`);
    const r = codes[i] / 2 ** f;
    check(Number.isInteger(r) && r < 2 ** width, `element ${i}: code ${codes[i]} of ${width} bits`);
    const u = phase(seed, i);
    if (width === 0) return point(bits, exponent, u);
    const a = Math.floor(((b - 0.5 * W) / S + u) * scale);
    const q = a + (r - a - 2 ** width * Math.floor((r - a) / 2 ** width));
    const x = ((q + 0.5) / scale - u) * S;
    return moveTo(limited(x), bits);
  });
}

// 4.5.2.
export function octaves(codes, { fraction_bits: f = 0 }) {
  check(Number.isInteger(f) && f >= 0 && f <= 7, `fraction_bits ${f}`);
  const e0 = -149 * 2 ** f;
  const top = f === 0 ? 255 : 277 * 2 ** f;
  return Float32Array.from(codes, (code, i) => {
    check(code <= top, `element ${i}: code ${code}`);
    if (code === 0) return 0;
    const limit = (code - 1 + e0) * 2 ** (23 - f) + 2 ** (22 - f);
    return limit >= -126 * 2 ** 23
      ? bitsFloat(limit + 127 * 2 ** 23)
      : Math.floor(bitsFloat(limit + 276 * 2 ** 23)) * 2 ** -149;
  });
}

// 4.5.4. `second` are the elements of the second moment.
export function ratios(codes, second, { spacing, limit = 0 }) {
  check(spacing >= 2 ** -32 && spacing <= 2 ** 32, `spacing ${spacing}`);
  check(limit >= 0 && limit < Infinity, `limit ${limit}`);
  const most = limit > 0 ? Math.sqrt(limit) : Infinity;
  return Float32Array.from(codes, (code, i) => {
    const v = second[i];
    check(code === 0 || (code !== -128 && v >= 2 ** -126 && v < Infinity), `element ${i}: code ${code}`);
    if (code === 0) return 0;
    const root = Math.sqrt(v);
    const bound = most * root;
    return Math.fround(Math.max(-bound, Math.min(bound, code * spacing * root)));
  });
}
