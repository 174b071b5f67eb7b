"""Storage for ``torch.distributed.checkpoint``: its ``save``, ``async_save`` and ``load`` write and
read our roots.
"""

from deltacheck.backends.torch.dcp.storage_reader import DeltaStorageReader
from deltacheck.backends.torch.dcp.storage_writer import DeltaStorageWriter

__all__ = ["DeltaStorageReader", "DeltaStorageWriter"]
