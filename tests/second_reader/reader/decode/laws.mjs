// Groups and laws (section 4.6): predictions of a step of Adam, in float32.
import { check } from "../base/errors.mjs";

export const GRADIENT = 8;
export const MEAN = 9;
export const STEPS = 10;
export const LAW_BYTES = 64;

const f = Math.fround;
const word = new DataView(new ArrayBuffer(8));

// a * b + c, rounded once: the product is exact in float64, and the sum is rounded to odd there.
function fma(a, b, c) {
  const product = a * b;
  const total = product + c;
  const back = total - product;
  const error = (product - (total - back)) + (c - back);
  if (error === 0 || !Number.isFinite(total)) return f(total);
  word.setFloat64(0, total);
  const bits = word.getBigInt64(0);
  if ((bits & 1n) === 0n) word.setBigInt64(0, bits + (error > 0 === total > 0 ? 1n : -1n));
  return f(word.getFloat64(0));
}

const times = (a, b) => f(a * b);
const plus = (a, b) => f(a + b);

const MEANS = [
  (l, m, g) => plus(m, times(l.rest1, f(g - m))),
  (l, m, g) => fma(f(g - m), l.rest1, m),
  (l, m, g) => plus(times(l.beta1, m), times(l.rest1, g)),
  (l, m, g) => fma(g, l.rest1, times(l.beta1, m)),
  (l, m, g) => fma(m, l.beta1, times(l.rest1, g)),
];
const SQUARES = [
  (l, v, g) => plus(times(l.beta2, v), times(times(l.rest2, g), g)),
  (l, v, g) => fma(times(l.rest2, g), g, times(l.beta2, v)),
  (l, v, g) => plus(times(l.beta2, v), times(l.rest2, times(g, g))),
  (l, v, g) => fma(times(g, g), l.rest2, times(l.beta2, v)),
  (l, v, g) => fma(v, l.beta2, times(l.rest2, times(g, g))),
];
const WEIGHTS = [
  (l, w, u) => plus(times(w, l.keep), u),
  (l, w, u) => plus(w, plus(u, times(l.pull, w))),
];
const NUMBERS = [
  "beta1", "rest1", "inverse1", "beta2", "rest2", "eps", "rate", "earlier", "keep", "pull", "scale", "unscale",
];

// The law of a chunk.
export function readLaw(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  const [mean, square, weight, reserved] = [0, 4, 8, 12].map((at) => view.getUint32(at, true));
  check(mean < MEANS.length && square < SQUARES.length && weight < WEIGHTS.length && reserved === 0, "an unknown law");
  const law = { mean: MEANS[mean], square: SQUARES[square], weight: WEIGHTS[weight] };
  NUMBERS.forEach((name, i) => { law[name] = view.getFloat32(16 + 4 * i, true); });
  return law;
}

function direction(law, m, v) {
  const quotient = f(m / plus(f(Math.sqrt(v)), law.eps));
  return Number.isFinite(quotient) ? quotient : 0;
}

// A word of a prediction. JavaScript may write any NaN, so its bits are written.
function put(view, index, value) {
  if (Number.isNaN(value)) view.setUint32(4 * index, 0x7fc00000, true);
  else view.setFloat32(4 * index, value, true);
}

// The parts of a chunk as functions of the element.
function parts(bytes, count) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  return [0, 1, 2].map((part) => (i) => view.getFloat32(4 * (part * count + i), true));
}

// Write the prediction of one step: weight, m and v. `gradients`: bfloat16 words, or null if `next` has m.
export function predictStep(law, base, gradients, next, count) {
  const [w0, m0, v0] = parts(base, count);
  const m1 = parts(next, count)[1];
  const view = new DataView(next.buffer, next.byteOffset, next.length);
  for (let i = 0; i < count; i++) {
    let m;
    let g;
    if (gradients !== null) {
      word.setUint32(0, gradients[i] * 65536);
      g = times(word.getFloat32(0), law.scale);
      m = law.mean(law, m0(i), g);
      put(view, count + i, m);
    } else {
      m = m1(i);
      g = times(f(m - times(law.beta1, m0(i))), law.inverse1);
    }
    const v = law.square(law, v0(i), g);
    put(view, 2 * count + i, v);
    put(view, i, law.weight(law, w0(i), times(law.rate, direction(law, m, v))));
  }
}

// Write the prediction of v after several steps.
export function predictSquares(law, base, next, count) {
  const v0 = parts(base, count)[2];
  const view = new DataView(next.buffer, next.byteOffset, next.length);
  for (let i = 0; i < count; i++) put(view, 2 * count + i, times(law.beta2, v0(i)));
}

// Write the prediction of the weights after several steps, from m and v in `next`.
export function predictWeights(law, base, next, count) {
  const [w0, m0, v0] = parts(base, count);
  const [, m, v] = parts(next, count);
  const view = new DataView(next.buffer, next.byteOffset, next.length);
  for (let i = 0; i < count; i++) {
    const now = times(law.rate, direction(law, m(i), v(i)));
    const update = plus(now, times(law.earlier, direction(law, m0(i), v0(i))));
    put(view, i, law.weight(law, w0(i), update));
  }
}

// The shape of the group of a parameter.
export function groupShape(elements) {
  const blocks = Math.max(1, Math.ceil(elements / 87381));
  return [blocks, 3, Math.ceil(elements / blocks)];
}

// The bytes of one part of a group.
export function partOf(group, part, elements) {
  const [blocks, , size] = groupShape(elements);
  const result = new Uint8Array(4 * elements);
  for (let block = 0; block < blocks; block++) {
    const count = Math.min(size, elements - block * size);
    const from = 4 * size * (3 * block + part);
    result.set(group.subarray(from, from + 4 * count), 4 * size * block);
  }
  return result;
}
