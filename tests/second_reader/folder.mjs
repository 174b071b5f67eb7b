// node folder.mjs ROOT: print what the page of `deltacheck view` shows of a local folder, as JSON.
import { readFileSync, readdirSync } from "node:fs";
import { basename, join } from "node:path";
import { Folder } from "../../deltacheck/cli/view/page/folder.mjs";

// Files as a browser hands them over.
function filesOf(root, folder = "") {
  return readdirSync(join(root, folder), { withFileTypes: true }).flatMap((entry) => {
    const path = folder === "" ? entry.name : `${folder}/${entry.name}`;
    if (entry.isDirectory()) return filesOf(root, path);
    const file = new File([readFileSync(join(root, path))], entry.name);
    return [Object.defineProperty(file, "webkitRelativePath", { value: `${basename(root)}/${path}` })];
  });
}

async function answer(task) {
  try {
    return await task();
  } catch (error) {
    return { error: { kind: error.kind ?? "Defect", message: error.message } };
  }
}

const folder = new Folder(filesOf(process.argv[2]));
const steps = await folder.steps();
const numbers = steps.steps.map(({ step }) => `${step}`);
const [first, last] = [numbers[0], numbers.at(-1)];
const result = { steps, log: await folder.log(), verify: await folder.verify(""), shows: {}, values: {}, changes: {} };
for (const number of numbers) {
  result.shows[number] = await folder.show(number);
  result.values[number] = {};
  for (const { path, shape } of result.shows[number].leaves) {
    const box = (shape ?? []).map((size) => `0:${Math.min(3, size)}`).join(", ");
    result.values[number][path] = await answer(() => folder.values(number, path, box));
  }
}
result.diff = await folder.diff(first, last);
for (const { path } of result.diff.changed) result.changes[path] = await answer(() => folder.change(first, last, path));
console.log(JSON.stringify(result, (_, value) => (typeof value === "bigint" ? String(value) : value)));
