// Errors of the reader. Each names the file, the leaf and the step, as far as they are known.

export class Damage extends Error {
  constructor(message, place = {}) {
    super(message);
    this.name = "Damage";
    this.place = place;
  }
}

// Content of a kind that this reader does not know or may not return.
export class Refused extends Error {
  constructor(message, place = {}) {
    super(message);
    this.name = "Refused";
    this.place = place;
  }
}

export class NotImplemented extends Error {
  constructor(kind) {
    super(`not implemented: ${kind}`);
    this.name = "NotImplemented";
    this.place = {};
  }
}

// Run `task` and add `place` to an error that it throws. Any other error means that damaged
// content has reached code that did not expect it, so it is damage, too.
export async function located(place, task) {
  try {
    return await task();
  } catch (error) {
    const known = error instanceof Damage || error instanceof Refused || error instanceof NotImplemented;
    const named = known ? error : new Damage(`unexpected content: ${error.message}`);
    named.place = { ...place, ...named.place };
    throw named;
  }
}

export function check(condition, message, place) {
  if (!condition) throw new Damage(message, place);
}
