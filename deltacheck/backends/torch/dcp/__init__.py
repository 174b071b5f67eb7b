"""Storage for ``torch.distributed.checkpoint``: its ``save``, ``async_save`` and ``load`` write and read our roots."""

from deltacheck.backends.torch.dcp.reader import DeltaStorageReader
from deltacheck.backends.torch.dcp.writer import DeltaStorageWriter

__all__ = ["DeltaStorageReader", "DeltaStorageWriter"]
