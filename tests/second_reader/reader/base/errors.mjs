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
  constructor(kind, place = {}) {
    super(`not implemented: ${kind}`);
    this.name = "NotImplemented";
    this.kind = kind;
    this.place = place;
  }
}

// Run `task` and add `place` to an error that it throws. Any other error means that damaged
// content has reached code that did not expect it, so it is damage, too.
export async function located(place, task) {
  try {
    return await task();
  } catch (error) {
    // A copy: several leaves can get the same error, of a segment that they share.
    if (error instanceof NotImplemented) throw new NotImplemented(error.kind, { ...place, ...error.place });
    const Kind = error instanceof Refused ? Refused : Damage;
    const known = error instanceof Damage || error instanceof Refused;
    throw new Kind(known ? error.message : `unexpected content: ${error.message}`, { ...place, ...error.place });
  }
}

export function check(condition, message, place) {
  if (!condition) throw new Damage(message, place);
}
