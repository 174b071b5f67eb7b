"""Save and resume a Hugging Face ``Trainer``, or a subclass (TRL, PEFT), with one callback.

Pass ``callbacks=[DeltaCheckCallback()]`` and change nothing else, in one process or in several.
"""

from deltacheck.backends.torch.trainer.callback import DeltaCheckCallback

__all__ = ["DeltaCheckCallback"]
