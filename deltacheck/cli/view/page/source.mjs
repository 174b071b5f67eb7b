// The data of the page: documents as `deltacheck ... --json` prints them, from the server.

export class SourceError extends Error {
  constructor({ kind, message }) {
    super(message);
    this.kind = kind;
  }
}

export class Server {
  async query(name, parameters = {}) {
    let answer;
    try {
      answer = await fetch(`api/${name}?${new URLSearchParams(parameters)}`, { cache: "no-store", credentials: "omit" });
    } catch {
      throw new SourceError({ kind: "NoServer", message: "the server does not answer; start deltacheck view again" });
    }
    let document;
    try {
      document = await answer.json();
    } catch {
      throw new SourceError({ kind: "NoServer", message: `the server has refused the request (${answer.status})` });
    }
    if (document.error) throw new SourceError(document.error);
    return document;
  }

  steps() {
    return this.query("steps");
  }

  log() {
    return this.query("log");
  }

  show(step) {
    return this.query("show", { step });
  }

  values(step, leaf, box) {
    return this.query("values", { step, leaf, box });
  }

  diff(before, after) {
    return this.query("diff", { before, after });
  }

  change(before, after, leaf) {
    return this.query("change", { before, after, leaf });
  }

  verify(step, deep) {
    return this.query("verify", { step, deep: deep ? "1" : "0" });
  }
}
