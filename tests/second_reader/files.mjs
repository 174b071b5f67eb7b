// Files below a root. No link is followed, and no file is larger than its caller allows.
import { constants } from "node:fs";
import { lstat, open, readdir } from "node:fs/promises";
import { join } from "node:path";
import { Damage } from "./reader/base/errors.mjs";

export class Files {
  constructor(root) {
    this.root = root;
    this.folders = new Set();
  }

  // Return the bytes of a regular file, or null if there is none.
  async read(path, limit) {
    if (!(await this.walk(path.split("/").slice(0, -1), path))) return null;
    let handle;
    try {
      handle = await open(join(this.root, path), constants.O_RDONLY | constants.O_NOFOLLOW | constants.O_NONBLOCK);
    } catch (error) {
      if (error.code === "ENOENT") return null;
      throw new Damage(`cannot be opened: ${error.code}`, { file: path });
    }
    try {
      const stat = await handle.stat();
      if (!stat.isFile()) throw new Damage("not a regular file", { file: path });
      if (stat.size > limit) throw new Damage(`${stat.size} bytes, at most ${limit} expected`, { file: path });
      return new Uint8Array(await handle.readFile());
    } finally {
      await handle.close();
    }
  }

  // Return the names of the folders (no links) in a folder; empty if there is none.
  async names(path) {
    const parts = path === "" ? [] : path.split("/");
    if (!(await this.walk(parts, path))) return [];
    const entries = await readdir(join(this.root, path), { withFileTypes: true });
    return entries.filter((entry) => entry.isDirectory()).map((entry) => entry.name).sort();
  }

  async walk(parts, path) {
    for (let count = 1; count <= parts.length; count++) {
      const folder = parts.slice(0, count).join("/");
      if (this.folders.has(folder)) continue;
      let stat;
      try {
        stat = await lstat(join(this.root, folder));
      } catch (error) {
        if (error.code === "ENOENT") return false;
        throw error;
      }
      if (!stat.isDirectory()) throw new Damage(`${folder} is not a directory`, { file: path });
      this.folders.add(folder);
    }
    return true;
  }
}
