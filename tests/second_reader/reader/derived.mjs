// Derived leaves (section 3): rules that compute a leaf from stored content.
import { check, NotImplemented } from "./base/errors.mjs";
import { bitsFloat, drawn, lattice, nested, octaves, ratios } from "./decode/codes.mjs";
import { groupShape, partOf } from "./decode/laws.mjs";
import { itemBytes, product } from "./leaves.mjs";

export const CODES = {
  cast: [], same: [], drawn: [], lattice: ["int32", "uint8", "uint16"],
  octaves: ["uint8", "uint16"], ratio: ["int8"], group: ["float32"],
};
const word = new DataView(new ArrayBuffer(8));
const FORMATS = { bfloat16: [8, 7], float16: [5, 10], float32: [8, 23], float64: [11, 52] };

// Compute a leaf. `codes` is {dtype, bytes} or null; `other(path)` returns {dtype, shape, bytes}, and
// `stored(path)` what is stored under a path.
export async function derive(rule, shape, codes, other, stored) {
  if (rule.how === "group") return part(rule, shape, codes, stored);
  const expected = CODES[rule.how];
  if (expected === undefined) throw new NotImplemented(`derived leaf ${rule.how}`);
  check((codes !== null) === expected.length > 0, `${rule.how} ${codes ? "with" : "without"} stored codes`);
  check(codes === null || expected.includes(codes.dtype), `${rule.how} with codes of ${codes?.dtype}`);
  const of = "of" in rule ? await other(rule.of) : null;
  check(of === null || product(of.shape) === product(shape), `${rule.of} has another shape`);
  let bytes = unscaled(rule, codes, of);
  if ((rule.scale ?? 1) !== 1) bytes = scaled(rule, bytes);
  check(bytes.length === product(shape) * itemBytes(rule.dtype), `${bytes.length} bytes`);
  return bytes;
}

// A part of a group (4.6).
async function part(rule, shape, codes, stored) {
  const number = rule.part ?? 0;
  check(rule.dtype === "float32" && (rule.scale ?? 1) === 1, "a part of a group that is not float32");
  check(("of" in rule) === number > 0 && number < 3, `part ${number} of a group`);
  check((codes === null) === "of" in rule, "a group that is stored in another place");
  const group = codes ?? (await stored(rule.of));
  const expected = groupShape(product(shape));
  check(group.dtype === "float32" && String(group.shape) === String(expected), `a group of shape ${group.shape}`);
  return partOf(group.bytes, number, product(shape));
}

function unscaled(rule, codes, of) {
  const { how, dtype } = rule;
  if (how === "same") {
    check(of !== null && of.dtype === dtype, "same as a leaf of another dtype");
    return of.bytes;
  }
  if (how === "cast") return cast(of, dtype);
  check(dtype === "float32", `${how} of ${dtype}`);
  const weights = of?.dtype === "bfloat16" ? numbers("uint16", of.bytes) : null;
  if (how === "octaves") return bytesOf(octaves(numbers(codes.dtype, codes.bytes), rule));
  if (how === "lattice" && codes.dtype === "int32") {
    return bytesOf(lattice(numbers("int32", codes.bytes), weights, rule));
  }
  if (how === "ratio") {
    check(of?.dtype === "float32", "ratio without a float32 second moment");
    return bytesOf(ratios(numbers("int8", codes.bytes), numbers("float32", of.bytes), rule));
  }
  check(weights !== null, `${how} without bfloat16 weights`);
  if (how === "drawn") return bytesOf(drawn(weights, rule));
  const bits = 8 * itemBytes(codes.dtype);
  return bytesOf(nested(numbers(codes.dtype, codes.bytes), weights, rule, bits));
}

function scaled(rule, bytes) {
  check(rule.dtype === "float32", "scale of a leaf that is not float32");
  const scale = Math.fround(rule.scale);
  return bytesOf(Float32Array.from(numbers("float32", bytes), (x) => x * scale));
}

const ARRAYS = {
  int8: Int8Array, uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, int32: Int32Array,
  float32: Float32Array, float64: Float64Array,
};

function numbers(dtype, bytes) {
  return new ARRAYS[dtype](bytes.slice().buffer);
}

function bytesOf(array) {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

// Round to nearest, ties to even. NaN keeps its sign, and what nanFraction keeps of its payload.
export function cast(of, dtype) {
  const [target, source] = [FORMATS[dtype], FORMATS[of.dtype]];
  if (of.dtype === dtype) return of.bytes;
  if (!target || !source) throw new NotImplemented(`cast of ${of.dtype} to ${dtype}`);
  const values = of.dtype === "float32" || of.dtype === "float64"
    ? numbers(of.dtype, of.bytes)
    : Float64Array.from(numbers("uint16", of.bytes), (bits) => widened(bits, of.dtype));
  const size = itemBytes(of.dtype);
  const stored = new DataView(of.bytes.buffer, of.bytes.byteOffset, of.bytes.length);
  const result = new DataView(new ArrayBuffer(values.length * itemBytes(dtype)));
  values.forEach((x, i) => {
    if (Number.isNaN(x)) {
      let bits = 0n;
      for (let k = size - 1; k >= 0; k--) bits = (bits << 8n) | BigInt(stored.getUint8(i * size + k));
      writeBits(result, i, dtype, nanBits(bits, source, target, of.dtype, dtype));
    } else if (dtype === "float64") result.setFloat64(8 * i, x, true);
    else writeBits(result, i, dtype, BigInt(roundedBits(x, target)));
  });
  return new Uint8Array(result.buffer);
}

function writeBits(view, i, dtype, bits) {
  for (let k = 0; k < itemBytes(dtype); k++) view.setUint8(i * itemBytes(dtype) + k, Number((bits >> BigInt(8 * k)) & 255n));
}

// The page defines the NaN of bfloat16. The others are those of NumPy; a digest verifies them.
function nanBits(bits, source, target, from, dtype) {
  const [sourceFraction, targetFraction] = [BigInt(source[1]), BigInt(target[1])];
  const sign = bits >> BigInt(source[0] + source[1]);
  const payload = bits & ((1n << sourceFraction) - 1n);
  const wider = targetFraction - sourceFraction;
  let fraction = wider >= 0n ? payload << wider : payload >> -wider;
  const quiet = 1n << (targetFraction - 1n);
  if (dtype === "bfloat16" || (from === "bfloat16" && dtype === "float16")) fraction = quiet;
  else if (dtype === "float16") fraction ||= 1n;
  else if (source[1] >= 23 || (from === "bfloat16" && dtype === "float64")) fraction |= quiet;
  return (((sign << BigInt(target[0])) | ((1n << BigInt(target[0])) - 1n)) << targetFraction) | fraction;
}

function widened(bits, dtype) {
  if (dtype === "bfloat16") return bitsFloat(bits * 65536);
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  const sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
}

function roundedBits(x, [exponentBits, fractionBits]) {
  const top = 2 ** exponentBits - 1;
  const bias = (top - 1) / 2;
  const sign = x < 0 || Object.is(x, -0) ? 2 ** (exponentBits + fractionBits) : 0;
  const size = Math.abs(x);
  if (size === Infinity) return sign + top * 2 ** fractionBits;
  word.setFloat64(0, size);
  const exponent = Math.max(1 - bias, (word.getUint16(0) >> 4) - 1023);
  // Units in the last place: an integer after rounding, carried into the exponent by addition.
  const units = size / 2 ** (exponent - fractionBits);
  let whole = Math.floor(units);
  const rest = units - whole;
  if (rest > 0.5 || (rest === 0.5 && whole % 2 === 1)) whole++;
  const result = (exponent + bias - 1) * 2 ** fractionBits + whole;
  return sign + Math.min(result, top * 2 ** fractionBits);
}
