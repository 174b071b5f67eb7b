"""Types of the CUDA encoder, which xla_ffi/module_cuda.cc implements and documents.

All addresses are device memory, except for that of a table to encode and those of the arrays of
``copy`` (uint64).
"""

from typing import Any

INTERFACE: int
CHUNK_BYTES: int
HEAD_ENTRIES: int

def problem() -> str | None: ...
def workspace_bytes(chunks: int, bytes: int) -> int: ...
def encode(
    table: int,
    chunks: int,
    bytes: int,
    workspace: int,
    rows: int,
    head: int,
    payload: int,
    payload_bytes: int,
    digests: int,
    stream: int,
) -> None: ...
def copy(sources: int, sizes: int, offsets: int, count: int, target: int, stream: int) -> None: ...
def digest(table: int, chunks: int, digests: int, stream: int) -> None: ...
def registrations() -> list[tuple[str, Any, str]]: ...
