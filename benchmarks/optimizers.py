"""Bytes and entropy of the states of optimizers other than Adam, kind of state by kind of state.

Their states are exact under every policy. `python -m benchmarks size --optimizers` prints how many
bytes that takes, how many steps of progress a resumed run loses if the momentum of Lion or Muon is
rounded, old or zero, and how well its code follows from what a save before has stored.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import deltacheck
from benchmarks import entropy
from benchmarks.record import Cell, Result, Settings, Table, Unit
from benchmarks.workloads.recipe import Recipe, small, tiny
from benchmarks.workloads.torch_workloads import Workload, pretrained
from deltacheck import Policy
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.state import leaves
from deltacheck.codec.lossy import octaves
from deltacheck.profile.sensitivity import lost_steps

Make = Callable[[list[Tensor]], Optimizer]
_BETA = 0.95  # of the Kronecker factors
_HORIZON = 8


class Lion(Optimizer):
    """Lion (Chen et al., 2023): the sign of an average of gradients."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do an update."""
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.sign(m.lerp(p.grad, 1 - b1)))
                m.lerp_(p.grad, 1 - b2)
        return closure() if closure else None


class Shampoo(Optimizer):
    """Shampoo (Gupta et al., 2018) for matrices, with decaying Kronecker factors."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do an update, scaled to that of Adam."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                update = p.grad
                for side, factor in enumerate((p.grad @ p.grad.T, p.grad.T @ p.grad)):
                    sum_ = state.setdefault(f"factor{side}", torch.zeros_like(factor))
                    sum_.mul_(_BETA).add_(factor, alpha=1 - _BETA)
                    values, vectors = torch.linalg.eigh(sum_)
                    root = (vectors * values.clamp_min(1e-12) ** -0.25) @ vectors.T
                    state[f"root{side}"] = root
                    update = update @ root if side else root @ update
                p.sub_(group["lr"] * update / update.square().mean().sqrt())
        return closure() if closure else None


def makers() -> dict[str, Make]:
    """Return the optimizers that are installed, by name."""
    installed: dict[str, Make] = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-5),
        "Lion": lambda p: Lion(p, lr=2e-6),
        "Muon": lambda p: torch.optim.Muon(p, lr=2e-5),  # type: ignore[attr-defined]
        "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-5),
        "Shampoo": lambda p: Shampoo(p, lr=1e-5),
    }
    for name, module, options in (
        ("AdamW, 8 bits (bitsandbytes)", "bitsandbytes.optim", {"min_8bit_size": 1024}),
        ("AdamW, 8 bits (torchao)", "torchao.optim", {}),
    ):
        try:
            low_bit = importlib.import_module(module).AdamW8bit
        except ImportError:
            continue
        installed[name] = lambda p, low_bit=low_bit, options=options: low_bit(p, lr=1e-5, **options)  # type: ignore[misc]
    return installed


def start(make: Make, quick: bool) -> Workload:
    """Return a fine-tuning of the float32 matrices of a pretrained model."""
    recipe = (tiny if quick else small)("sft", betas=(0.9, 0.999))
    training = Workload(recipe, _pretrained(recipe))
    training.model.float()
    for parameter in training.model.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    trained = [p for p in training.model.parameters() if p.requires_grad]
    training.optimizer = make(trained)  # type: ignore[assignment]
    training.scheduler = LambdaLR(training.optimizer, lambda step: 1.0)
    return training


@cache
def _pretrained(recipe: Recipe) -> dict[str, Any]:
    return pretrained(recipe)


def arrays(training: Workload) -> dict[str, Any]:
    """Return the arrays of the optimizer's state, by path; those of wrappers one by one."""
    flat = leaves.flatten(training.state())
    return {path: array for path, array in flat.arrays.items() if path.startswith(_STATE)}


_STATE = "optimizer/state/"


def kind_of(path: str) -> str:
    """Return the name of a leaf of an optimizer's state, without the number of the parameter."""
    return path.removeprefix(_STATE).partition("/")[2]


def run(settings: Settings) -> Result:
    """Measure the state of every optimizer."""
    sizes: list[list[Cell]] = []
    resumes: list[list[Cell]] = []
    predicted: list[list[Cell]] = []
    every, settle, saves = (2, 2, 3) if settings.quick else (10, 100, 8)
    makers_by_name = makers()
    if settings.quick:
        makers_by_name = {name: makers_by_name[name] for name in ("AdamW", "Lion", "Muon")}
    for number, (name, make) in enumerate(makers_by_name.items()):
        training = start(make, settings.quick)
        _train(training, settle)
        sizes += _sizes(name, training, every, saves, settings.folder / str(number))
        if name in ("Lion", "Muon"):
            predicted += [_predicted(name, training, steps) for steps in (1, every)]
            resumes += _resumes(name, training, every)
    return Result(
        "size",
        "the state of optimizers under Policy.auto(), float32 weights, saved every"
        f" {every} steps: order-0 entropy and streams before the entropy stage, of raw bytes;"
        " contract: the weakest that the last save gave",
        [
            Table("optimizers", SIZES, sizes),
            Table(
                f"{_HORIZON} steps after a resume with another momentum; the last column is that"
                " of another data order",
                RESUMES,
                resumes,
            ),
            Table(
                "order-0 entropy of a momentum's codes (within 0.6 octaves), bits per element",
                PREDICTED,
                predicted,
            ),
        ],
        [],
    )


SIZES: dict[str, Unit] = {
    "optimizer": "text",
    "state": "text",
    "type": "text",
    "raw": "bytes",
    "entropy": "ratio",
    "encoded": "ratio",
    "contract": "text",
}
RESUMES: dict[str, Unit] = {
    "optimizer": "text",
    "momentum": "text",
    "bits": "number",
    "lost steps": "number",
    "loss change": "number",
    "loss change, order": "number",
}
PREDICTED: dict[str, Unit] = {
    "optimizer": "text",
    "steps": "count",
    "alone": "number",
    "given the last code": "number",
    "and the weight's change": "number",
    "given the last momentum": "number",
}
# Classes of a weight's change that a code may depend on.
_CHANGES = 8


def _sizes(
    name: str, training: Workload, every: int, saves: int, folder: Path
) -> Iterator[list[Cell]]:
    """Save a run, and yield a row for each kind of state."""
    bound: dict[str, float] = {}
    stored: dict[str, float] = {}
    raw: dict[str, int] = {}
    types: dict[str, str] = {}
    before: dict[str, Any] = {}
    with Engine(folder, policy=Policy.auto(derive=False, stable_from=0)) as engine:
        for number in range(saves):
            report = engine.save(training.step, training.state()).result()
            assert report is not None
            now = {path: entropy.words_of(array) for path, array in arrays(training).items()}
            encoded = {leaf.path: leaf.encoded_bytes for leaf in report.leaves}
            for path, words in now.items() if number else ():
                kind = kind_of(path)
                bound[kind] = bound.get(kind, 0.0) + entropy.leaf_bytes(before[path], words)
                stored[kind] = stored.get(kind, 0.0) + encoded.get(path, 0)
            before = now
            _train(training, every)
        reader = deltacheck.open(folder)
        contract = reader.manifest().contract
        restored = reader.restore()
        for path, words in before.items() if contract == "exact" else ():
            value: Any = restored
            for key in path.split("/"):
                value = value[int(key) if key.isdecimal() else key]
            if not np.array_equal(entropy.words_of(np.asarray(value)), words):
                raise AssertionError(f"{name}: {path} was saved exactly and restored otherwise")
    for path, array in arrays(training).items():
        kind = kind_of(path)
        raw[kind] = raw.get(kind, 0) + before[path].nbytes
        types[kind] = str(array.dtype).removeprefix("torch.")
    for kind, size in raw.items():
        share = size * (saves - 1)
        yield [name, kind, types[kind], size, bound[kind] / share, stored[kind] / share, contract]


def _resumes(name: str, training: Workload, age: int) -> Iterator[list[Cell]]:
    """Train on from states with another momentum, and yield a row for each."""
    older = copy.deepcopy(training.state())
    _train(training, age)
    live = copy.deepcopy(training.state())

    def outcome(change: Callable[[Tensor, Tensor], Tensor], order: int = 0) -> tuple[Any, float]:
        state = copy.deepcopy(live)
        for key, entry in state["optimizer"]["state"].items():
            for field, value in entry.items():
                if value.ndim == 2:
                    entry[field] = change(value, older["optimizer"]["state"][key][field])
        training.load(state)
        if order:
            training.reorder(order)
        _train(training, _HORIZON)
        return _weights(training), training.evaluate()

    training.load(copy.deepcopy(live))
    began = _weights(training)
    exact, loss = outcome(lambda value, old: value)
    orders = [outcome(lambda value, old: value, order)[1] - loss for order in (11, 12, 13, 14)]
    noise = float(np.sqrt(mean(change**2 for change in orders)))
    candidates: dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]] = {
        "within 0.6 octaves": (_code_bits(live), lambda value, old: _octaves(value)),
        f"{age} steps old": (0.0, lambda value, old: old),
        "zero": (0.0, lambda value, old: torch.zeros_like(value)),
    }
    for label, (bits, change) in candidates.items():
        weights, changed = outcome(change)
        lost = lost_steps(began, exact, weights, _HORIZON)
        yield [name, label, bits, lost, changed - loss, noise]


def _predicted(name: str, training: Workload, steps: int) -> list[Cell]:
    """Return how many bits the codes of a momentum take if a decoder knows more and more.

    The decoder knows the code of ``steps`` steps before, or the momentum itself, and how the weight
    has changed since: all that a save has stored beside the momentum.
    """
    momentum, before = _momenta(training.state()), _flat_weights(training)
    _train(training, steps)
    change = _flat_weights(training) - before
    codes, last = (_signed_codes(values) for values in (_momenta(training.state()), momentum))
    # Classes of equal size, by direction and size of the change.
    edges = np.quantile(change, np.arange(1, _CHANGES) / _CHANGES)
    moved = np.searchsorted(edges, change)
    # Finer than the codes: eight classes in each octave.
    with np.errstate(divide="ignore"):
        exponent = np.maximum(np.round(8 * np.log2(np.abs(momentum))), -800).astype(np.int64)
    fine = np.where(momentum < 0, exponent, exponent + 2000) + 1000
    return [
        name,
        steps,
        _bits(codes),
        _bits(codes, last),
        _bits(codes, last, moved),
        _bits(codes, fine, moved),
    ]


def _bits(codes: Any, *known: Any) -> float:
    """Return the order-0 entropy of codes in bits, given classes of the same elements."""
    context = np.zeros_like(codes)
    for classes in known:
        context = context * (int(classes.max()) + 1) + classes
    return _entropy(context * (int(codes.max()) + 1) + codes) - _entropy(context)


def _entropy(classes: Any) -> float:
    _, counts = np.unique(classes, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _momenta(state: dict[str, Any]) -> Any:
    """Return all momenta of matrices as one array, in the order of the parameters."""
    return np.concatenate(
        [
            value.float().numpy().reshape(-1)
            for entry in state["optimizer"]["state"].values()
            for value in entry.values()
            if value.ndim == 2
        ]
    )


def _flat_weights(training: Workload) -> Any:
    return np.concatenate([weight.reshape(-1) for weight in _weights(training).values()])


def _weights(training: Workload) -> dict[str, Any]:
    named = training.model.named_parameters()
    return {name: p.detach().numpy().copy() for name, p in named if p.requires_grad}


def _signed_codes(values: Any) -> Any:
    """Return a class for each value: the octave code of its size, 256 more below zero."""
    return octaves.codes(np.abs(values)).codes + 256 * (values < 0)


def _octaves(value: Tensor) -> Tensor:
    values = np.ascontiguousarray(value.float().numpy())
    sizes = octaves.values(octaves.codes(np.abs(values)).codes)
    return torch.from_numpy(np.copysign(sizes, values)).to(value.dtype)


def _code_bits(state: dict[str, Any]) -> float:
    """Return the order-0 entropy of the codes of all momenta, in bits per element."""
    return _entropy(_signed_codes(_momenta(state)))


def _train(training: Workload, steps: int) -> None:
    for _ in range(steps):
        training.train_step()
