"""Storage for ``torch.distributed.checkpoint`` (DCP).

DCP's ``save`` and ``async_save`` write to roots through it, and ``load`` reads from them.
"""

from deltacheck.backends.torch.dcp.storage_reader import DeltaStorageReader
from deltacheck.backends.torch.dcp.storage_writer import DeltaStorageWriter

__all__ = ["DeltaStorageReader", "DeltaStorageWriter"]
