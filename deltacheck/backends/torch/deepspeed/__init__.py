"""Save and restore DeepSpeed's ZeRO stages 0 to 3 by parameter.

``install()`` makes deltacheck the checkpoint engine of every DeepSpeed engine; ``attach(engine)``
of one.
"""

from deltacheck.backends.torch.deepspeed.checkpoint_engine import (
    DeltaCheckpointEngine,
    attach,
    install,
)
from deltacheck.backends.torch.deepspeed.publishing import publish

__all__ = ["DeltaCheckpointEngine", "attach", "install", "publish"]
