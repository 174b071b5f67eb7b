// node read.mjs ROOT [STEP]: print the leaves of every step, or of one, as JSON.
//
// Exit status: 0 if all is read; 1 if anything is damaged or refused; 2 for a wrong call;
// 3 if nothing is damaged, but a leaf is of a kind that is not implemented.
import { Files } from "./files.mjs";
import { errorsOf, readRoot } from "./reader/roots.mjs";

const [root, step] = process.argv.slice(2);
if (root === undefined || process.argv.length > 4 || (step !== undefined && !/^-?[0-9]+$/.test(step))) {
  console.error("usage: node read.mjs ROOT [STEP]");
  process.exit(2);
}
const result = await readRoot(new Files(root), step === undefined ? null : Number(step));
console.log(JSON.stringify(result, (_, value) => (typeof value === "bigint" ? String(value) : value), 1));
const errors = errorsOf(result);
if (step !== undefined && errors.length === 0 && result.steps.length === 0) {
  console.error(`no step ${step}`);
  process.exitCode = 1;
} else if (errors.some(({ kind }) => kind !== "not implemented")) process.exitCode = 1;
else if (errors.length > 0) process.exitCode = 3;
