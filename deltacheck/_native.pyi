"""Types of the native extension, which xla_ffi/module.cc implements and documents."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

INTERFACE: int

def encode(
    current: NDArray[np.uint8],
    base: NDArray[np.uint8] | None,
    bounds: NDArray[np.uint64],
    word_bytes: int,
    method: int = 0,
    ordered: bool = False,
    law: bytes | None = None,
) -> tuple[NDArray[np.uint32], list[NDArray[np.uint8] | None]]: ...
def encode_many(
    currents: Sequence[NDArray[np.uint8]],
    bases: Sequence[NDArray[np.uint8]],
    bounds: Sequence[NDArray[np.uint64]],
    word_bytes: Sequence[int],
    ordered: Sequence[bool],
) -> tuple[NDArray[np.uint32], list[NDArray[np.uint8] | None]]: ...
def apply(
    rows: NDArray[np.uint32],
    streams: list[NDArray[np.uint8] | None],
    base: NDArray[np.uint8],
    bounds: NDArray[np.uint64],
    word_bytes: int,
) -> str | None: ...

# Decodes rows of several deltas in one call, each chunk with all of its rows in order. Arguments,
# all C-contiguous: the rows, uint32 (rows, ROW_WIDTH); for each row the number of its block, the
# first byte, the words and the bytes of a word, uint64 (rows, 4), ascending; for each row the
# offsets of its bytes in each stream, uint64 (rows, streams); the memory of all streams; and the
# blocks. Makes the checks of ``Codec.apply``. Returns ``None``, or the number of the first bad row
# and the reason.
def apply_rows(
    rows: NDArray[np.uint32],
    targets: NDArray[np.uint64],
    offsets: NDArray[np.uint64],
    streams: NDArray[np.uint8],
    blocks: list[NDArray[np.uint8]],
) -> tuple[int, str] | None: ...
def encode_changes(
    before: NDArray[np.uint8], now: NDArray[np.uint8], word_bytes: int
) -> NDArray[np.uint8] | None: ...
def apply_changes(
    changes: NDArray[np.uint8], words: NDArray[np.uint8], word_bytes: int
) -> str | None: ...
def lattice_codes(
    values: NDArray[np.float32],
    weights: NDArray[np.uint16] | None,
    step: float,
    seed: int,
    out: NDArray[np.int32],
    halvings: int,
    spare_bits: int,
) -> tuple[int, float]: ...
def lattice_values(
    codes: NDArray[np.int32],
    weights: NDArray[np.uint16] | None,
    step: float,
    seed: int,
    out: NDArray[np.float32],
    halvings: int,
    spare_bits: int,
) -> int: ...
def lattice_cast_errors(
    values: NDArray[np.float32],
    weights: NDArray[np.uint16],
    step: float,
    seed: int,
    halvings: int,
    spare_bits: int,
) -> tuple[int, float, float, float]: ...
def nested_codes(
    values: NDArray[np.float32],
    weights: NDArray[np.uint16],
    step: float,
    seed: int,
    out: NDArray[np.uint8],
    halvings: int,
    spare_bits: int,
) -> tuple[int, float]: ...
def nested_values(
    codes: NDArray[np.uint8],
    weights: NDArray[np.uint16],
    step: float,
    seed: int,
    out: NDArray[np.float32],
    halvings: int,
    spare_bits: int,
) -> int: ...
def octave_codes(
    values: NDArray[np.float32],
    base: NDArray[np.uint8] | None,
    fraction_bits: int,
    band: int,
    out: NDArray[np.uint8],
) -> int: ...
def octave_values(
    codes: NDArray[np.uint8], fraction_bits: int, out: NDArray[np.float32]
) -> int: ...
def ratio_codes(
    values: NDArray[np.float32],
    variances: NDArray[np.float32],
    step: float,
    limit: float,
    out: NDArray[np.uint8],
) -> tuple[int, float]: ...
def ratio_values(
    codes: NDArray[np.uint8],
    variances: NDArray[np.float32],
    step: float,
    limit: float,
    out: NDArray[np.float32],
) -> int: ...
def fingerprints(
    addresses: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    sampling: tuple[int, int, int, int],
    out: NDArray[np.uint64],
) -> None: ...
def copy_leaves(
    addresses: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    offsets: NDArray[np.uint64],
    out: NDArray[np.uint8],
) -> None: ...
def read_numbers(
    objects: list[Any],
    first: Callable[[Any], Any],
    second: Callable[[Any], int] | None,
    out: NDArray[np.uint64],
) -> None: ...
def load_ahead(addresses: NDArray[np.uint64]) -> None: ...
def canonical_json(text: bytes) -> bytes | None: ...
def matching_children(
    containers: list[Any], lengths: list[int], keys: list[Any], types: list[type]
) -> list[Any] | None: ...
def write_stream_file(
    descriptor: int,
    pieces: list[NDArray[np.uint8]],
    chunk_bytes: int,
    chunks_per_file: int,
    sharded: bool,
    level: int,
    number: int,
) -> int: ...
def read_array_files(
    files: list[tuple[int, int, int, bool, str]],
    pieces: NDArray[np.uint64],
    blocks: list[NDArray[np.uint8]],
) -> tuple[int, str] | None: ...
def crc32c(data: NDArray[np.uint8], by_table: bool) -> int: ...
def registrations() -> list[tuple[str, Any, str]]: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...
def instruction_sets() -> list[str]: ...
def instruction_set() -> str: ...
def use_instruction_set(name: str) -> None: ...
