// Element types, chunk grids and the standard chunk shape.
import { check, Refused } from "./base/errors.mjs";

const SIZES = new Map();
for (const name of ["bool", "int8", "uint8", "int2", "int4", "uint2", "uint4", "float4_e2m1fn",
  "float6_e2m3fn", "float6_e3m2fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz",
  "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]) SIZES.set(name, 1);
for (const name of ["int16", "uint16", "float16", "bfloat16"]) SIZES.set(name, 2);
for (const name of ["int32", "uint32", "float32"]) SIZES.set(name, 4);
for (const name of ["int64", "uint64", "float64", "complex64"]) SIZES.set(name, 8);
SIZES.set("complex128", 16);

const ZARR = ["bool", "int8", "uint8", "int16", "uint16", "float16", "int32", "uint32", "float32",
  "int64", "uint64", "float64", "complex64", "complex128"];

export function itemBytes(dtype) {
  if (!SIZES.has(dtype)) throw new Refused(`unknown dtype ${JSON.stringify(dtype)}`);
  return SIZES.get(dtype);
}

// The type under which zarr stores a dtype.
export function storageType(dtype) {
  return ZARR.includes(dtype) ? dtype : `uint${8 * itemBytes(dtype)}`;
}

export function product(numbers) {
  return numbers.reduce((result, number) => result * number, 1);
}

export function standardChunk(shape, dtype) {
  let budget = Math.max(1, Math.floor(2 ** 20 / itemBytes(dtype)));
  const chunk = shape.map(() => 1);
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    chunk[axis] = Math.max(1, Math.min(shape[axis], budget));
    if (chunk[axis] < shape[axis]) break;
    budget = Math.floor(budget / chunk[axis]);
  }
  return chunk;
}

// A leaf's grid of chunks. Chunk `number` is a run of the leaf's memory in C order.
export class Grid {
  constructor(dtype, shape, chunk) {
    check(isShape(shape, 0) && isShape(chunk, 1), `shape ${shape} or chunk ${chunk}`);
    check(shape.length <= 64, `${shape.length} axes`);
    check(product(shape.map((size) => Math.max(1, size))) <= 2 ** 56, `too many elements: ${shape}`);
    check(chunk.length === shape.length, `a chunk of ${chunk.length} axes of ${shape.length}`);
    this.dtype = dtype;
    this.itemBytes = itemBytes(dtype);
    this.shape = shape;
    this.chunk = chunk;
    this.counts = shape.map((size, axis) => Math.ceil(size / chunk[axis]));
    this.chunks = product(this.counts);
    this.bytes = product(shape) * this.itemBytes;
    check(product(chunk) * this.itemBytes <= 2 ** 26, `a chunk above 64 MiB: ${chunk}`);
    // (1, .., 1, rows, *whole trailing dimensions)
    let axis = shape.length - 1;
    while (axis >= 0 && chunk[axis] === Math.max(1, shape[axis])) axis--;
    check(chunk.slice(0, Math.max(0, axis)).every((size) => size === 1), `a chunk of the form ${chunk}`);
  }

  // Position of a chunk in the grid.
  index(number) {
    const index = [];
    for (let axis = this.counts.length - 1; axis >= 0; axis--) {
      index.unshift(number % this.counts[axis]);
      number = Math.floor(number / this.counts[axis]);
    }
    return index;
  }

  // Byte range of a chunk in the leaf's memory.
  range(number) {
    const index = this.index(number);
    let offset = 0;
    let size = 1;
    for (let axis = 0; axis < index.length; axis++) {
      const start = index[axis] * this.chunk[axis];
      offset = offset * this.shape[axis] + start;
      size *= Math.min(this.chunk[axis], this.shape[axis] - start);
    }
    return [offset * this.itemBytes, (offset + size) * this.itemBytes];
  }
}

function isShape(sizes, least) {
  return Array.isArray(sizes) && sizes.every((size) => Number.isSafeInteger(size) && size >= least);
}
