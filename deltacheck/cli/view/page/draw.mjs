// Pictures: bars of bytes by cause, and heat maps of changed elements.
import { element, size, visible } from "./text.mjs";

const SVG = "http://www.w3.org/2000/svg";
export const CAUSES = {
  keyframe: "keyframe: new, or the chain is full",
  lattice: "lattice: the rate has changed",
  refresh: "refresh: moments too old",
  event: "event: exact again",
  changed: "changed",
  merged: "merged behind the training",
  rest: "rest: tables and metadata",
};

function svg(tag, attributes = {}, ...children) {
  const result = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) result.setAttribute(key, value);
  result.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(visible(child)))));
  return result;
}

// Stacked bars: `bars` have {label, title, parts: {cause: bytes}}, oldest first.
export function bars(data, label) {
  const [width, height, left, bottom, top] = [1040, 240, 76, 28, 10];
  const plot = { width: width - left - 8, height: height - bottom - top };
  const totals = data.map(({ parts }) => Object.values(parts).reduce((sum, bytes) => sum + Math.max(0, bytes), 0));
  const most = Math.max(1, ...totals);
  const step = plot.width / Math.max(1, data.length);
  const nodes = [];
  for (const part of [0, 0.5, 1]) {
    const y = top + plot.height * (1 - part);
    nodes.push(svg("line", { class: "grid", x1: left, x2: width - 8, y1: y, y2: y }));
    nodes.push(svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, size(Math.round(most * part))));
  }
  // Labels of neighbours must not overlap.
  const every = Math.max(1, Math.ceil((data.length * 44) / plot.width));
  data.forEach(({ label: text, title, parts }, index) => {
    const x = left + index * step;
    let y = top + plot.height;
    const group = svg("g", {}, svg("title", {}, title));
    for (const [cause, bytes] of Object.entries(parts)) {
      const tall = (plot.height * Math.max(0, bytes)) / most;
      y -= tall;
      if (tall > 0) group.append(svg("rect", { class: cause, x: x + step * 0.1, y, width: step * 0.8, height: tall }));
    }
    nodes.push(group);
    if (index % every === 0) nodes.push(svg("text", { x: x + step / 2, y: height - 10, "text-anchor": "middle" }, text));
  });
  nodes.push(svg("line", { class: "axis", x1: left, x2: width - 8, y1: top + plot.height, y2: top + plot.height }));
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...nodes);
}

export function legend(causes) {
  return element("ul", { class: "legend" }, causes.map((cause) =>
    element("li", {}, element("span", { class: `mark ${cause}`, "aria-hidden": "true" }, "■"), element("span", { class: "text" }, CAUSES[cause] ?? cause)),
  ));
}

// The lightest colour but white stands for this share and less.
const LEAST = 1e-4;

// White for no change, else from light yellow (one of 10,000) over green to dark blue (all).
function colour(share) {
  if (share <= 0) return [255, 255, 255];
  const at = 1 - Math.min(1, Math.max(0, Math.log(share) / Math.log(LEAST)));
  const stops = [[255, 243, 176], [127, 205, 187], [29, 110, 170], [8, 29, 88]];
  const place = at * (stops.length - 1);
  const index = Math.min(stops.length - 2, Math.floor(place));
  return stops[index].map((value, channel) => Math.round(value + (stops[index + 1][channel] - value) * (place - index)));
}

function paint(rows, columns, shares) {
  const canvas = element("canvas", { width: Math.max(1, columns), height: Math.max(1, rows) });
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  image.data.fill(255);
  shares.forEach((value, cell) => image.data.set([...colour(value), 255], 4 * cell));
  context.putImageData(image, 0, 0);
  return canvas;
}

// The heat map of a leaf: cells of the last axis from left to right, all other axes downwards.
export function heatMap({ rows, columns, shares, height, width }, label) {
  const canvas = paint(rows, columns, shares);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", visible(label));
  canvas.title = visible(`${rows} x ${columns} cells of a leaf of ${height} x ${width}`);
  // Flat leaves get a strip that is high enough to be seen, and tall ones a square.
  canvas.style.aspectRatio = `${Math.min(16, Math.max(1, rows === 1 ? 16 : columns / Math.max(1, rows)))}`;
  return canvas;
}

export function scale() {
  const steps = 64;
  const shares = Array.from({ length: steps }, (_, index) => LEAST ** (1 - index / (steps - 1)));
  return element("div", { class: "scale" }, "changed elements: 1 in 10,000 or fewer", paint(1, steps, shares), "all (white: none)");
}
