// Byte arrays, in Node and in browsers.

export function concat(parts) {
  const result = new Uint8Array(parts.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const part of parts) {
    result.set(part, at);
    at += part.length;
  }
  return result;
}

export function viewOf(bytes) {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
}

export function fromHex(text) {
  return Uint8Array.from({ length: text.length / 2 }, (_, i) => Number.parseInt(text.slice(2 * i, 2 * i + 2), 16));
}

export function toHex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Whether a text is base64 with padding, and has no other spelling.
export function isBase64(text) {
  try {
    return btoa(atob(text)) === text;
  } catch {
    return false;
  }
}
