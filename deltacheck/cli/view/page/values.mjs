// Elements as texts and numbers, and what has changed between two contents of a leaf.

const FLOATS = { float16: [5, 10], bfloat16: [8, 7] };
const INTEGERS = {
  int8: Int8Array, uint8: Uint8Array, int2: Int8Array, int4: Int8Array, uint2: Uint8Array, uint4: Uint8Array,
  int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array, int64: BigInt64Array, uint64: BigUint64Array,
};

// Elements as numbers (BigInt for 64-bit integers); null for types without a number here.
export function elements(dtype, bytes) {
  const { buffer } = bytes.slice();
  if (dtype in INTEGERS) return new INTEGERS[dtype](buffer);
  if (dtype === "float32" || dtype === "complex64") return new Float32Array(buffer);
  if (dtype === "float64" || dtype === "complex128") return new Float64Array(buffer);
  if (dtype in FLOATS) return Float32Array.from(new Uint16Array(buffer), (bits) => small(bits, FLOATS[dtype]));
  return null;
}

function small(bits, [exponentBits, fractionBits]) {
  const top = 2 ** exponentBits - 1;
  const exponent = (bits >> fractionBits) & top;
  const fraction = bits & (2 ** fractionBits - 1);
  const sign = bits >> (exponentBits + fractionBits) ? -1 : 1;
  const bias = (top - 1) / 2;
  if (exponent === top) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (2 ** fractionBits + fraction) * 2 ** (exponent - bias - fractionBits) : fraction * 2 ** (1 - bias - fractionBits));
}

export function texts(dtype, bytes) {
  if (dtype === "bool") return Array.from(bytes, (byte) => (byte ? "True" : "False"));
  const numbers = elements(dtype, bytes);
  if (numbers === null) return Array.from(bytes, (byte) => `0x${byte.toString(16).padStart(2, "0")}`);
  const rounded = dtype === "float64" || dtype === "complex128" ? (x) => x : Math.fround;
  const written = Array.from(numbers, (x) => (dtype in INTEGERS ? String(x) : text(x, rounded)));
  if (!dtype.startsWith("complex")) return written;
  return Array.from({ length: written.length / 2 }, (_, i) => {
    const [real, imaginary] = [written[2 * i], written[2 * i + 1]];
    return `(${real}${imaginary.startsWith("-") ? "" : "+"}${imaginary}j)`;
  });
}

// The shortest digits that read back as the same number.
function text(x, rounded) {
  if (Number.isNaN(x)) return "nan";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "-inf";
  if (Object.is(x, -0)) return "-0";
  for (let digits = 1; digits <= 17; digits++) {
    const short = Number(x.toPrecision(digits));
    if (rounded(short) === x) return String(short);
  }
  return String(x);
}

// The numbers of a change: those of `deltacheck diff`, in float64.
export function drift(dtype, before, after) {
  const old = elements(dtype, before);
  const recent = old && elements(dtype, after);
  const size = old ? before.length / Math.max(1, old.length) : 1;
  const result = { elements: 0, changed: 0, density: 0, relative_l2: null, max_abs: null, nonfinite_before: 0, nonfinite_after: 0 };
  const parts = dtype.startsWith("complex") ? 2 : 1;
  result.elements = before.length / (size * parts);
  for (let at = 0; at < before.length; at += size * parts) {
    for (let i = at; i < at + size * parts; i++) {
      if (before[i] !== after[i]) {
        result.changed++;
        break;
      }
    }
  }
  result.density = result.elements ? result.changed / result.elements : 0;
  // Norms of complex numbers and of types without a number are not computed here.
  if (old === null || parts === 2) return result;
  let [norm, difference, most, finite] = [0, 0, 0, 0];
  old.forEach((x, i) => {
    const [a, b] = [Number(x), Number(recent[i])];
    if (!Number.isFinite(a)) result.nonfinite_before++;
    if (!Number.isFinite(b)) result.nonfinite_after++;
    if (!Number.isFinite(a) || !Number.isFinite(b)) return;
    finite++;
    // Differences of integers are exact.
    const distance = Math.abs(Number(recent[i] - x));
    norm = Math.hypot(norm, a);
    difference = Math.hypot(difference, distance);
    most = Math.max(most, distance);
  });
  if (finite > 0) {
    result.max_abs = most;
    result.relative_l2 = norm > 0 ? difference / norm : difference > 0 ? "Infinity" : 0;
  }
  return result;
}

// The share of changed elements by cells, as deltacheck/report/change_map.py counts it.
export function changeMap(shape, itemBytes, before, after) {
  const width = shape.at(-1) ?? 1;
  const height = shape.slice(0, -1).reduce((product, size) => product * size, 1);
  const [rows, columns] = [Math.min(height, 48), Math.min(width, 96)];
  const edges = (size, cells) => Array.from({ length: cells + 1 }, (_, i) => Math.floor((i * size) / Math.max(1, cells)));
  const [rowEdges, columnEdges] = [edges(height, rows), edges(width, columns)];
  const cellOf = (cuts, size) => {
    const cells = new Uint32Array(size);
    for (let cell = 0; cell + 1 < cuts.length; cell++) cells.fill(cell, cuts[cell], cuts[cell + 1]);
    return cells;
  };
  const [rowCells, columnCells] = [cellOf(rowEdges, height), cellOf(columnEdges, width)];
  const counts = new Float64Array(rows * columns);
  let changed = 0;
  let at = 0;
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++, at += itemBytes) {
      let same = true;
      for (let i = at; same && i < at + itemBytes; i++) same = before[i] === after[i];
      if (same) continue;
      changed++;
      counts[rowCells[row] * columns + columnCells[column]]++;
    }
  }
  const shares = Array.from(counts, (count, cell) => {
    const [row, column] = [Math.floor(cell / columns), cell % columns];
    return count / ((rowEdges[row + 1] - rowEdges[row]) * (columnEdges[column + 1] - columnEdges[column]));
  });
  return { height, width, rows, columns, changed, shares };
}
