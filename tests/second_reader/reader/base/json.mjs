// JSON as the format needs it: no key twice, no number that is not finite, exact integers, and
// the canonical text of every object (sorted keys, no spaces, ASCII) for its checksum.
import { Damage } from "./errors.mjs";

const members = new WeakMap(); // object -> Map(key -> canonical text of the value)

// Integers that float64 cannot hold exactly become a BigInt.
export function parseJson(text) {
  const reader = new Reader(text);
  const [value] = reader.value(0);
  reader.space();
  if (reader.at !== text.length) throw new Damage("JSON: text after the end");
  return value;
}

export function canonicalText(object, without) {
  return joinMembers([...members.get(object)].filter(([key]) => key !== without));
}

function joinMembers(pairs) {
  const texts = pairs.map(([key, text]) => [[...key].map((c) => c.codePointAt(0)), key, text]);
  texts.sort(([a], [b]) => comparePoints(a, b));
  return `{${texts.map(([, key, text]) => `${asciiText(key)}:${text}`).join(",")}}`;
}

function comparePoints(a, b) {
  for (let i = 0; i < Math.min(a.length, b.length); i++) if (a[i] !== b[i]) return a[i] - b[i];
  return a.length - b.length;
}

export function sortedByPoint(texts) {
  const points = new Map(texts.map((text) => [text, [...text].map((c) => c.codePointAt(0))]));
  return [...texts].sort((a, b) => comparePoints(points.get(a), points.get(b)));
}

function asciiText(text) {
  return JSON.stringify(text).replace(/[\u007f-\uffff]/g, (unit) => {
    return `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
  });
}

// The shortest digits that read back as the same float64, laid out as Python's repr does.
export function floatText(value) {
  if (value === 0) return Object.is(value, -0) ? "-0.0" : "0.0";
  const [mantissa, power] = Math.abs(value).toExponential().split("e");
  const sign = value < 0 ? "-" : "";
  const digits = mantissa.replace(".", "");
  const exponent = Number(power);
  if (exponent < -4 || exponent >= 16) {
    const rest = digits.length > 1 ? `.${digits.slice(1)}` : "";
    const size = String(Math.abs(exponent)).padStart(2, "0");
    return `${sign}${digits[0]}${rest}e${exponent < 0 ? "-" : "+"}${size}`;
  }
  if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${digits}`;
  const whole = digits.slice(0, exponent + 1).padEnd(exponent + 1, "0");
  return `${sign}${whole}.${digits.slice(exponent + 1) || "0"}`;
}

class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  fail(message) {
    throw new Damage(`JSON: ${message} at character ${this.at}`);
  }

  space() {
    while (" \t\r\n".includes(this.text[this.at] ?? "x")) this.at++;
  }

  expect(token) {
    if (!this.text.startsWith(token, this.at)) this.fail(`no ${token}`);
    this.at += token.length;
  }

  // Return the value that begins here and its canonical text.
  value(depth) {
    if (depth > 500) this.fail("nested too deep");
    this.space();
    const first = this.text[this.at];
    if (first === "{") return this.object(depth);
    if (first === "[") return this.array(depth);
    if (first === '"') {
      const text = this.string();
      return [text, asciiText(text)];
    }
    for (const [token, value] of [["true", true], ["false", false], ["null", null]]) {
      if (first === token[0]) {
        this.expect(token);
        return [value, token];
      }
    }
    return this.number();
  }

  number() {
    const pattern = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
    pattern.lastIndex = this.at;
    const match = pattern.exec(this.text);
    if (!match) this.fail("no value");
    this.at += match[0].length;
    if (match[1] === undefined && match[2] === undefined) {
      const exact = BigInt(match[0]);
      return [Number.isSafeInteger(Number(exact)) ? Number(exact) : exact, exact.toString()];
    }
    const value = Number(match[0]);
    if (!Number.isFinite(value)) this.fail("a number that is not finite");
    return [value, floatText(value)];
  }

  string() {
    const pattern = /"((?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"/y;
    pattern.lastIndex = this.at;
    const match = pattern.exec(this.text);
    if (!match) this.fail("no text");
    this.at += match[0].length;
    const text = JSON.parse(match[0]);
    if (!text.isWellFormed()) this.fail("text that UTF-8 cannot encode");
    return text;
  }

  array(depth) {
    const values = [];
    const texts = [];
    this.list("[", "]", () => {
      const [value, text] = this.value(depth + 1);
      values.push(value);
      texts.push(text);
    });
    return [values, `[${texts.join(",")}]`];
  }

  object(depth) {
    const object = Object.create(null);
    const texts = new Map();
    this.list("{", "}", () => {
      this.space();
      const key = this.string();
      if (texts.has(key)) this.fail(`the key ${JSON.stringify(key)} twice`);
      this.space();
      this.expect(":");
      const [value, text] = this.value(depth + 1);
      object[key] = value;
      texts.set(key, text);
    });
    members.set(object, texts);
    return [object, joinMembers([...texts])];
  }

  list(open, close, item) {
    this.expect(open);
    this.space();
    if (this.text[this.at] === close) {
      this.at++;
      return;
    }
    for (;;) {
      item();
      this.space();
      if (this.text[this.at] === close) break;
      this.expect(",");
    }
    this.at++;
  }
}
