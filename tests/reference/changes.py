"""The compact encoding of published changes in Python: an executable form of its description.

Read it beside ``docs/how-to/publish.md``, "The compact encoding". No code is shared with the native
encoder: ``low`` is one integer of any length here, so that nothing is ever carried.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from numpy.typing import NDArray

ONE = 1 << 32
PIECE = 1 << 22
MOST_BLOCK_BITS = 6


class Writer:
    def __init__(self) -> None:
        self.low, self.range, self.written = 0, (1 << 64) - 1, 0

    def bit(self, zero: int, value: bool) -> None:
        bound = (self.range >> 32) * zero
        self.low += bound if value else 0
        self.range = self.range - bound if value else bound
        while self.range < 1 << 48:
            self.low, self.range, self.written = self.low << 16, self.range << 16, self.written + 2

    def finish(self) -> bytes:
        top = (self.low + (1 << 48) - 1) >> 48
        return top.to_bytes(self.written + 2, "big").rstrip(b"\0")


class AdaptiveBit:
    def __init__(self) -> None:
        self.zero, self.seen = 1 << 31, 0

    def write(self, writer: Writer, value: bool) -> None:
        writer.bit(self.zero, value)
        share = 65536 // (self.seen + 2)
        if value:
            self.zero -= self.zero * share >> 16
        else:
            self.zero += (ONE - 1 - self.zero) * share >> 16
        self.seen = min(self.seen + 1, 254)


class AdaptiveNumber:
    def __init__(self, most_bits: int) -> None:
        self.most_bits = most_bits
        self.longer: dict[int, AdaptiveBit] = defaultdict(AdaptiveBit)
        self.second: dict[int, AdaptiveBit] = defaultdict(AdaptiveBit)

    def write(self, writer: Writer, number: int) -> None:
        length = number.bit_length()
        for i in range(1, min(length + 1, self.most_bits)):
            self.longer[i].write(writer, i < length)
        for place in range(length - 2, -1, -1):
            value = bool(number >> place & 1)
            if place == length - 2:
                self.second[length].write(writer, value)
            else:
                writer.bit(1 << 31, value)


def small(code: int) -> int:
    return ((4 + code % 4) << code // 4) // 4


def code_of_ratio(count: int, of: int) -> int:
    """Return the code of the nearest probability."""
    is_large = 2 * count > of
    share = ((of - count if is_large else count) << 32) // of
    code = 0
    while code < 127 and small(code) + small(code + 1) <= 2 * share:
        code += 1
    return 255 - code if is_large else code


def piece(old: NDArray[Any], new: NDArray[Any]) -> bytes:
    bits = 8 * old.itemsize
    classes = [(int(word) << 1) % (1 << bits) >> (bits - 8) for word in old]
    changed = [bool(flag) for flag in old != new]
    writer = Writer()

    block_bits = 0
    while block_bits < MOST_BLOCK_BITS and sum(changed) << (block_bits + 3) <= old.size:
        block_bits += 1
    for place in (2, 1, 0):
        writer.bit(1 << 31, bool(block_bits >> place & 1))

    has_changes, step = (AdaptiveBit(), AdaptiveBit()), AdaptiveNumber(10)
    unchanged = dict.fromkeys(range(256), ONE - 1)
    before, had_changes = 128, False
    for c in range(256):
        members = [flag for flag, of in zip(changed, classes, strict=True) if of == c]
        has_changes[had_changes].write(writer, any(members))
        had_changes = any(members)
        if had_changes:
            code = code_of_ratio(sum(members), len(members))
            distance = code - (before - 4)
            step.write(writer, 1 + (2 * distance if distance >= 0 else -2 * distance - 1))
            unchanged[c] = ONE - small(code) if code < 128 else small(255 - code)
            before = code

    is_down: dict[int, AdaptiveBit] = defaultdict(AdaptiveBit)
    size: dict[int, AdaptiveNumber] = defaultdict(lambda: AdaptiveNumber(bits))

    def write_size(i: int) -> None:
        up = (int(new[i]) - int(old[i])) % (1 << bits)
        down = bool(up >> (bits - 1))
        is_down[classes[i]].write(writer, down)
        size[classes[i]].write(writer, (1 << bits) - up if down else up)

    block = 1 << block_bits
    whole = old.size // block * block if block_bits else 0
    for first in range(0, whole, block):
        # Probabilities that nothing changes, and whether anything does, by node of the tree.
        none, any_ = [0] * block, [False] * block
        none += [unchanged[classes[i]] for i in range(first, first + block)]
        any_ += changed[first : first + block]
        for n in range(block - 1, 0, -1):
            none[n] = max(1, none[2 * n] * none[2 * n + 1] >> 32)
            any_[n] = any_[2 * n] or any_[2 * n + 1]
        writer.bit(none[1], any_[1])
        for n in range(1, block):
            if any_[n]:
                left, right = 2 * n, 2 * n + 1
                on_left = min(((ONE - none[left]) << 32) // (ONE - none[n]), ONE - 1)
                writer.bit(ONE - on_left, any_[left])
                if any_[left]:
                    writer.bit(none[right], any_[right])
        for i in range(first, first + block):
            if changed[i]:
                write_size(i)
    for i in range(whole, old.size):
        writer.bit(unchanged[classes[i]], changed[i])
        if changed[i]:
            write_size(i)
    return writer.finish()


def encode(old: NDArray[Any], new: NDArray[Any], piece_words: int = PIECE) -> bytes:
    """Return the changes between two arrays of words of 1 or 2 bytes."""
    pieces = [
        piece(old[first : first + piece_words], new[first : first + piece_words])
        for first in range(0, old.size, piece_words)
    ]
    return b"".join(len(part).to_bytes(4, "little") + part for part in pieces)
