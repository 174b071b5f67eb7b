// The page: one view at a time, named by the address after "#".
import { bars, CAUSES, heatMap, legend, scale } from "./draw.mjs";
import { Server } from "./source.mjs";
import { count, element, facts, name, number, problems, shape, share, size, table, tableOfPresent, time, visible } from "./text.mjs";

const source = new Server();
const main = document.getElementById("main");
const VIEWS = { steps: viewSteps, step: viewStep, leaf: viewLeaf, diff: viewDiff, check: viewCheck };
const TITLES = { steps: "Steps", diff: "Differences", check: "Check" };

function address(view, parameters = {}) {
  return `#${new URLSearchParams({ view, ...parameters })}`;
}

function link(text, view, parameters) {
  return element("a", { href: address(view, parameters) }, text);
}

// A save is named by its step; by a tag if a later save has the same step.
function nameable(rows) {
  const newest = new Map(rows.map((row) => [`${row.step}`, row.seq]));
  return rows.map((row) => {
    if (newest.get(`${row.step}`) === row.seq || row.item !== null) return { ...row, word: `${row.step}` };
    return { ...row, word: row.tags.length > 0 ? `@${row.tags[0]}` : null };
  });
}

let turn = 0;

async function render() {
  const parameters = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const view = Object.hasOwn(VIEWS, parameters.view ?? "") ? parameters.view : "steps";
  const own = ++turn;
  document.getElementById("nav").replaceChildren(
    ...Object.entries(TITLES).map(([key, title]) => element("a", { href: address(key), "aria-current": key === view && "page" }, title)),
  );
  main.replaceChildren(element("p", { class: "quiet" }, "reading ..."));
  main.removeAttribute("data-ready");
  let nodes;
  try {
    nodes = await VIEWS[view](parameters);
  } catch (error) {
    nodes = [failure(error)];
  }
  // A later address has been asked for in the meantime.
  if (own !== turn) return;
  main.replaceChildren(...nodes.flat(Infinity).filter((node) => node !== null));
  main.setAttribute("data-ready", view);
}

function failure(error) {
  return problems(error.kind ?? "Defect of this page", [error.message]);
}

function setRoot(root) {
  document.getElementById("root").replaceChildren("Checkpoints in ", name(root));
  document.title = visible(`${root} - deltacheck view`);
}

// --- steps ---------------------------------------------------------------------------------------

async function viewSteps() {
  const listed = await source.steps();
  setRoot(listed.root);
  const rows = nameable(listed.steps);
  const damage = [...listed.problems, ...rows.filter((row) => row.problem !== null).map((row) => `step ${row.step}: ${row.problem}`)];
  const most = Math.max(...rows.map((row) => row.stored_bytes ?? 0), 1);
  const sizes = element("div", { id: "sizes" }, element("p", { class: "quiet" }, "reading the sizes ..."));
  // The sizes by cause take longer: they are in the indexes of all deltas.
  source.log().then((log) => sizes.replaceChildren(...causesOf(log)), (error) => sizes.replaceChildren(failure(error)));
  if (rows.length === 0) return [problems("Not everything could be read", damage), element("p", {}, "The root has no committed step.")];
  return [
    problems("Not everything could be read", damage),
    element("h2", {}, count(rows.length, "step")),
    tableOfPresent([
      ["step", (row) => (row.word === null ? `${row.step}` : link(`${row.step}`, "step", { step: row.word }))],
      ["seq", (row) => row.seq],
      ["item", (row) => name(row.item ?? ""), true, "item"],
      ["saved", (row) => time(row.time), true],
      ...(rows.some((row) => row.tags.length > 0) ? [["tags", (row) => row.tags.map((tag) => [name(tag), " "]), true]] : []),
      ["state", (row) => size(row.raw_bytes)],
      ["stored", (row) => size(row.stored_bytes)],
      ["", (row) => element("meter", { value: row.stored_bytes ?? 0, max: most, "aria-hidden": "true" })],
      ["depth", (row) => number(row.chain_depth), false, "chain_depth"],
      ...(rows.some((row) => Object.keys(row.metrics).length > 0) ? [["metrics", (row) => Object.entries(row.metrics).map(([key, value]) => `${key}=${number(value)} `), true]] : []),
      ...(rows.some((row) => row.word === null) ? [["", (row) => (row.word === null ? "saved again later" : "")]] : []),
    ], [...rows].reverse()),
    element("h2", {}, "Why each save is large"),
    sizes,
  ];
}

function causesOf(log) {
  const known = log.steps.filter((row) => row.causes);
  const used = Object.keys(CAUSES).filter((cause) => known.some((row) => row.causes[cause] > 0));
  const data = known.map((row) => ({
    label: row.step,
    title: `step ${row.step}: ${used.map((cause) => `${cause} ${size(row.causes[cause])}`).join(", ")}`,
    parts: Object.fromEntries(used.map((cause) => [cause, row.causes[cause]])),
  }));
  return [
    bars(data, "Bytes of each save by cause"),
    legend(used),
    element("details", {}, element("summary", {}, "The same as a table"), table([
      ["step", (row) => row.step],
      ...used.map((cause) => [cause, (row) => size(row.causes[cause])]),
      ["changed words", (row) => share(row.density)],
      ["leaves whole / deltas / unchanged", (row) => [row.keyframes, row.deltas, row.unchanged].map(number).join(" / ")],
      ["decision", (row) => row.stage_reason ?? "", true],
    ], known)),
  ];
}

// --- one step ------------------------------------------------------------------------------------

const LEAF = [
  ["type", (row) => row.dtype ?? "-", true],
  ["shape", (row) => (row.shape ? shape(row.shape) : "-"), true, "shape"],
  ["state", (row) => size(row.raw_bytes)],
  ["contract", (row) => row.contract ?? "-", true],
  ["derived", (row) => row.derived ?? "-", true, "derived"],
  ["kind", (row) => row.kind ?? "-", true, "kind"],
  ["depth", (row) => number(row.chain_depth), false, "chain_depth"],
  ["changed words", (row) => share(row.density), false, "density"],
];

// More are folded, so that a step takes few screens.
const MOST_VALUES = 4;
const MOST_SEGMENTS = 8;

async function viewStep({ step = "latest" }) {
  const shown = await source.show(step);
  setRoot(shown.root);
  const promised = shown.leaves.filter((leaf) => leaf.contract !== "exact");
  return [
    element("h2", {}, `Step ${shown.step}`),
    facts([
      ["saved", time(shown.time)], ["sequence number", shown.seq], ["written by", name(shown.writer)],
      ["state", size(shown.raw_bytes)], ["stored by this save", size(shown.stored_bytes)],
      ["a restore reads from", size(shown.segments.reduce((sum, segment) => sum + segment.stored_bytes, 0))],
      ["weakest contract", shown.contract ?? "-"], ["survives", shown.durability === "power" ? "a power cut" : `the end of the ${shown.durability}`],
      ["digest", shown.digest === null ? "-" : name(shown.digest)], ["stage", shown.stage || "-"],
      ...Object.entries(shown.metrics).map(([key, value]) => [key, number(value)]),
    ]),
    shown.stage_reason ? element("p", {}, shown.stage_reason) : null,
    shown.absent.length > 0 ? element("p", {}, "Removed by prune: ", name(shown.absent.join(", "))) : null,
    element("h2", {}, count(shown.leaves.length, "leaf", "leaves")),
    groupsOf(shown, step),
    promised.length > 0 ? element("h2", {}, "Contracts") : null,
    promised.length > 0 ? contractsOf(shown, step) : element("p", {}, "Every leaf is exact: a restore returns each bit."),
    shown.scalars.length > 0 ? element("h2", {}, "Python values") : null,
    shown.scalars.length > 0 ? scalarsOf(shown) : null,
    element("h2", {}, "Segments"),
    segmentsOf(shown),
  ];
}

function groupsOf(shown, step) {
  const leaves = new Map(shown.leaves.map((leaf) => [leaf.path, leaf]));
  const label = (leaf) => [link(name(leaf.path), "leaf", { step, leaf: leaf.path }), leaf.tied_to === null ? null : [" tied to ", name(leaf.tied_to)]];
  return tableOfPresent([
    ["leaf", (group) => {
      const members = group.members.map((path) => leaves.get(path));
      return members.length === 1 ? label(members[0]) : folded(group.path, members, () => tableOfPresent([["leaf", label, true], ...LEAF], members));
    }, true],
    ...LEAF,
  ], shown.groups);
}

// The members of a group, which are drawn when somebody wants to see them.
function folded(path, members, draw) {
  const details = element("details", {}, element("summary", {}, name(path), ` (${members.length})`));
  details.addEventListener("toggle", () => {
    if (details.children.length === 1) details.append(draw());
  });
  return details;
}

// A row for each group of leaves, with the contract of the one that is nearest to its limit.
function contractsOf(shown, step) {
  const leaves = new Map(shown.leaves.map((leaf) => [leaf.path, leaf]));
  const label = (leaf) => link(name(leaf.path), "leaf", { step, leaf: leaf.path });
  const rows = shown.groups.flatMap((group) => {
    const members = group.members.map((path) => leaves.get(path)).filter((leaf) => leaf.contract !== "exact");
    if (members.length === 0) return [];
    const nearest = members.reduce((most, leaf) => ((leaf.used ?? 0) > (most.used ?? 0) ? leaf : most));
    return [{ ...nearest, group: group.path, members }];
  });
  return contracts(({ group, members }) => (members.length === 1 ? label(members[0]) : folded(group, members, () => contracts(label, members))), rows);
}

function contracts(label, rows) {
  return tableOfPresent([
    ["leaf", label, true],
    ["contract", (leaf) => leaf.contract, true],
    ["measured error", (leaf) => number(leaf.measured)],
    ["allowed", (leaf) => leaf.limit ?? "-", true],
    ["share of the limit", (leaf) => (typeof leaf.used === "number" ? [element("meter", { min: 0, max: 1, high: 0.9, value: Math.min(1, leaf.used) }), ` ${share(leaf.used)}`] : "-")],
    ["as of step", (leaf) => number(leaf.from_step), false, "from_step"],
    ["age in updates", (leaf) => number(leaf.age_steps), false, "age_steps"],
  ], rows);
}

// Python values. Those of one container are folded if they are many.
function scalarsOf(shown) {
  const groups = new Map();
  for (const row of shown.scalars) {
    const parent = row.path.slice(0, row.path.lastIndexOf("/") + 1);
    if (!groups.has(parent)) groups.set(parent, []);
    groups.get(parent).push(row);
  }
  const columns = [["type", (row) => row.type, true], ["", (row) => name(row.text ?? JSON.stringify(row.value)), true]];
  const draw = (rows) => table([["value", (row) => name(row.path), true], ...columns], rows);
  const rows = [...groups].flatMap(([parent, members]) => (members.length > MOST_VALUES ? [{ parent, members }] : members));
  return table([
    ["value", (row) => (row.members === undefined ? name(row.path) : folded(`${row.parent}*`, row.members, () => draw(row.members))), true],
    ...columns.map(([title, cell, word]) => [title, (row) => (row.members === undefined ? cell(row) : ""), word]),
  ], rows);
}

function segmentsOf(shown) {
  const draw = () => table([["segment", (row) => name(row.id), true], ["stored", (row) => size(row.stored_bytes)]], shown.segments);
  return shown.segments.length > MOST_SEGMENTS ? folded("segments that a restore reads", shown.segments, draw) : draw();
}

// --- values of a leaf ----------------------------------------------------------------------------

async function viewLeaf({ step = "latest", leaf = "", box }) {
  const shown = await source.show(step);
  setRoot(shown.root);
  const row = shown.leaves.find(({ path }) => path === leaf);
  if (row === undefined) return [problems("LeafNotFound", [`step ${shown.step} has no leaf ${leaf}`])];
  const text = box ?? firstBox(row.shape ?? []);
  const input = element("input", { name: "box", value: text, size: 32, spellcheck: "false", autocomplete: "off" });
  const form = element("form", { submit: (event) => {
    event.preventDefault();
    location.hash = address("leaf", { step, leaf, box: input.value });
  } }, element("label", {}, "slice, for example 0:8, 3, :", input), element("button", {}, "Show"));
  const head = [
    element("p", {}, link(`step ${shown.step}`, "step", { step })),
    element("h2", {}, name(leaf)),
    facts([
      ["type", row.dtype ?? "-"], ["shape", row.shape ? shape(row.shape) : "-"], ["state", size(row.raw_bytes)], ["contract", row.contract],
      ["stored as", row.kind ?? "-"], ["deltas", number(row.chain_depth)], ["changed words", share(row.density)],
      ...(row.limit === null ? [] : [["measured error / allowed", `${number(row.measured)} / ${row.limit}`]]),
    ]),
    form,
  ];
  try {
    return [...head, values(await source.values(step, leaf, text))];
  } catch (error) {
    return [...head, failure(error)];
  }
}

function firstBox(sizes) {
  return sizes.map((axis, index) => {
    if (index < sizes.length - 2) return "0";
    return `0:${Math.min(axis, index === sizes.length - 1 ? 8 : 16)}`;
  }).join(", ");
}

// Values as rows of the last axis, with the index of each row.
function values({ values: texts, shape: sizes, box }) {
  if (texts.length === 0) return element("p", {}, "The slice has no element.");
  const columns = sizes.at(-1) ?? 1;
  const rows = Array.from({ length: texts.length / columns }, (_, row) => ({ row, texts: texts.slice(row * columns, (row + 1) * columns) }));
  const index = (row) => {
    const place = [];
    for (let axis = sizes.length - 2; axis >= 0; axis--) {
      place.unshift(box[axis][0] + (row % sizes[axis]));
      row = Math.floor(row / sizes[axis]);
    }
    return place.join(", ");
  };
  const first = box.at(-1)?.[0] ?? 0;
  return table([
    ...(sizes.length > 1 ? [["", ({ row }) => index(row)]] : []),
    ...Array.from({ length: columns }, (_, column) => [sizes.length > 0 ? `${first + column}` : "value", (row) => row.texts[column]]),
  ], rows);
}

// --- differences ---------------------------------------------------------------------------------

async function viewDiff({ before, after }) {
  const listed = await source.steps();
  setRoot(listed.root);
  const words = nameable(listed.steps).filter((row) => row.word !== null && row.problem === null).map((row) => row.word);
  if (words.length === 0) return [element("p", {}, "The root has no step to compare.")];
  const [old, recent] = [before ?? words.at(-2) ?? words.at(-1), after ?? words.at(-1)];
  const select = (key, chosen) => element("select", { name: key }, words.map((word) => element("option", { value: word, selected: word === chosen }, word)));
  const [from, to] = [select("before", old), select("after", recent)];
  const form = element("form", { submit: (event) => {
    event.preventDefault();
    location.hash = address("diff", { before: from.value, after: to.value });
  } }, element("label", {}, "before", from), element("label", {}, "after", to), element("button", {}, "Compare"));
  const head = [element("h2", {}, `Step ${old} to ${recent}`), form];
  let diff;
  try {
    diff = await source.diff(old, recent);
  } catch (error) {
    return [...head, failure(error)];
  }
  const described = (value) => (value === null ? "-" : "value" in value ? name(`${value.type} ${value.text ?? JSON.stringify(value.value)}`) : `${value.dtype} ${shape(value.shape)}`);
  const plain = [["leaf", (row) => name(row.path), true], ["type", (row) => row.dtype, true], ["shape", (row) => shape(row.shape), true]];
  const both = [["", (row) => name(row.path), true], ["before", (row) => described(row.before), true], ["after", (row) => described(row.after), true]];
  const list = (title, columns, rows) => (rows.length > 0 ? [element("h2", {}, title), table(columns, rows)] : []);
  return [
    ...head,
    element("p", {}, `${count(diff.changed.length, "leaf", "leaves")} to compare, ${diff.unchanged} unchanged, ${diff.added.length} added, ${diff.removed.length} removed, ${diff.reshaped.length} reshaped.`),
    diff.changed.length > 0 ? scale() : null,
    ...diff.changed.map((row) => change(row, old, recent)),
    ...list("Added", plain, diff.added), ...list("Removed", plain, diff.removed), ...list("Reshaped", both, diff.reshaped),
    ...list("Python values", both, diff.scalars),
  ];
}

// A changed leaf. Its content is read when it comes into sight.
function change({ path, dtype, shape: sizes }, before, after) {
  const text = element("div", {}, link(name(path), "leaf", { step: after, leaf: path }), element("p", {}, `${dtype} ${shape(sizes)}`));
  const picture = element("div", {}, element("p", { class: "quiet" }, "reading ..."));
  const row = element("section", { class: "change" }, text, picture);
  const observer = new IntersectionObserver(async (entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    try {
      const data = await source.change(before, after, path);
      text.append(
        element("p", {}, `${data.changed} of ${count(data.elements, "element")} changed (${share(data.density)})`),
        element("p", {}, `relative L2 ${number(data.relative_l2)}, largest difference ${number(data.max_abs)}`),
        data.nonfinite_before || data.nonfinite_after ? element("p", {}, `not finite: ${data.nonfinite_before} before, ${data.nonfinite_after} after`) : "",
      );
      // A map of one colour says no more than the share beside it.
      const isUniform = data.map.shares.every((cell) => cell === data.map.shares[0]);
      if (isUniform) {
        text.append(element("p", { class: "quiet" }, "the same share in all parts of the leaf"));
        picture.replaceChildren();
        row.classList.add("flat");
      } else {
        picture.replaceChildren(heatMap(data.map, `${share(data.density)} of the elements of ${path} changed`));
      }
    } catch (error) {
      picture.replaceChildren(failure(error));
    }
    row.setAttribute("data-drawn", "");
  }, { rootMargin: "200px" });
  observer.observe(row);
  return row;
}

// --- check ---------------------------------------------------------------------------------------

async function viewCheck({ step, deep }) {
  const listed = await source.steps();
  setRoot(listed.root);
  const words = nameable(listed.steps).filter((row) => row.word !== null).map((row) => row.word);
  const select = element("select", { name: "step" }, element("option", { value: "" }, "all"), words.map((word) => element("option", { value: word, selected: word === step }, word)));
  const every = element("input", { type: "checkbox", name: "deep" });
  every.checked = deep === "1";
  const form = element("form", { submit: (event) => {
    event.preventDefault();
    location.hash = address("check", { step: select.value, deep: every.checked ? "1" : "0", at: Date.now() });
  } }, element("label", {}, "step", select), element("label", {}, "read every byte (as long as a restore)", every), element("button", {}, "Check"));
  const head = [element("h2", {}, "Check"), form];
  const damage = problems("Documents that cannot be read", listed.problems);
  if (deep === undefined) return [...head, damage, element("p", {}, "Without reading every byte, a check covers manifests, tables, chains, and the metadata of all arrays.")];
  let result;
  try {
    result = await source.verify(step ?? "", deep === "1");
  } catch (error) {
    return [...head, failure(error)];
  }
  const columns = [["step", (row) => number(row.step)], ["leaf", (row) => (row.leaf === null ? "-" : name(row.leaf)), true], ["problem", (row) => row.problem, true]];
  const read = result.deep ? `; ${size(result.checked_bytes)} of content read` : "";
  return [
    ...head,
    result.ok
      ? element("p", { class: "fine" }, `${count(result.steps.length, "step")} without a finding${read}.`)
      : [problems(`${count(result.findings.length, "finding")} in ${count(result.steps.length, "step")}${read}`, ["A restore of what is named here is refused. deltacheck repair --dry-run names the steps that are lost."]), table(columns, result.findings)],
    result.redundant.length > 0 ? [element("h2", {}, "Damage to files that no restore needs"), table(columns, result.redundant)] : [],
    result.contracts.length > 0 ? [element("h2", {}, "Contracts"), table([
      ["step", (row) => row.step], ["leaf", (row) => name(row.leaf), true], ["contract", (row) => row.contract, true],
      ["measured error", (row) => number(row.measured)], ["allowed", (row) => String(row.limit ?? "-"), true],
    ], result.contracts)] : [],
  ].flat();
}

addEventListener("hashchange", render);
render();
