"""Exact saves that know Adam's law: which elements follow from the step before, and the bytes.

Two successive states of Adam determine the gradient between them, and the gradient determines m, v
and the weight. This benchmark trains with several optimizers, finds the law of each parameter from
two saved states alone, and counts the elements that follow in every bit. It then encodes plain
deltas and the deltas from the predictions by our encoder and its entropy stage.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import adam_law, entropy, states
from benchmarks.adam_law import Law, Moments, Shares
from benchmarks.encode import threads_restored
from benchmarks.prepared import SIZES, recipe_of, settle
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.ways import Chain, Run
from deltacheck import Policy, _native
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.codec import NativeCodec
from deltacheck.evaluate.workloads.recipe import Recipe, recipe, tiny
from deltacheck.evaluate.workloads.torch_workloads import Workload, pretrained
from deltacheck.store.files import arrays
from deltacheck.store.files.arrays import ArraySpec
from deltacheck.store.segment import stream_codec

CHUNK_WORDS = 1 << 18  # of float32: 1 MiB
EVERY = (1, 2, 4, 8, 16)  # steps between two saves
SAVES, FEW_SAVES = 40, 4  # of those at every step, and of the others
# Runs of torch.optim whose bytes are measured
_MEASURED = ("float32", "autocast", "autocast, clipped", "GradScaler, float16")
# Of torch.save: the largest share with the law, mean over the saves.
LIMITS = {
    ("rl_like", 1): 0.11,
    ("adamw", 1): 0.11,
    ("float32", 1): 0.27,
    ("rl_like", 8): 0.51,
    ("adamw", 8): 0.52,
}
COST_LIMIT = 1.5  # of the processor time of plain deltas
# Chains of predicted deltas are cheap to read, so keyframes can be rare.
POLICIES = (
    Policy.exact(),
    Policy.exact(max_chain_depth=128, max_restore_ratio=None, law=True),
)

Bytes = NDArray[np.uint8]
Snapshot = dict[str, Moments]


# --- runs -----------------------------------------------------------------------------------------


class Training:
    """A run whose states can be looked at: the interface of all runs here."""

    name: str
    gradients: str
    betas: tuple[float, float]

    def train(self, steps: int) -> None:
        """Train some steps."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """Return copies of the parameters that are trained, by name."""
        raise NotImplementedError

    def eps(self) -> float:
        """Return eps in units of the root of v as it is stored."""
        raise NotImplementedError

    def saved_bytes(self, file: Path) -> int:
        """Return the bytes of torch.save of the whole state."""
        raise NotImplementedError


class Prepared(Training):
    """A settled run of the comparison: bfloat16 weights and gradients, clipped, decayed."""

    def __init__(self, framework: str, state: str, size: str) -> None:
        self.run = Run(framework, recipe_of(state, SIZES[size]))
        settle(self.run, SIZES[size])
        self.name, self.betas = state, self.run.recipe.betas
        self.gradients = "bfloat16, clipped" if framework == "torch" else "bfloat16 x float32"

    def train(self, steps: int) -> None:
        self.run.train(steps)

    def eps(self) -> float:
        step = (
            self.run.workload.optimizer.param_groups[0]["step"]
            if self.run.framework == "torch"
            else self._count()
        )
        return float(self.run.recipe.eps * (1 - self.betas[1] ** step) ** 0.5)

    def saved_bytes(self, file: Path) -> int:
        return self.run.torch_save(file)

    def _count(self) -> int:
        arrays_by_path = self.run.flat().arrays
        # Beside the moments: schedules have counts of their own.
        first = next(path for path in arrays_by_path if "/mu/" in path)
        return int(arrays_by_path[f"{first.partition('/mu/')[0]}/count"])

    def snapshot(self) -> Snapshot:
        if self.run.framework == "torch":
            return {
                str(number): Moments(
                    _copy(state["master"]),
                    _copy(state["exp_avg"]),
                    _copy(state["exp_avg_sq"]),
                    entropy.words_of(parameter),
                )
                for number, (parameter, state) in enumerate(
                    self.run.workload.optimizer.state.items()
                )
            }
        by_role: dict[str, dict[str, Any]] = {}
        for path, array in self.run.arrays().items():
            names = path.split("/")
            role = next((r for r in ("mu", "nu", "master", "params") if r in names), None)
            if role is not None:
                key = "/".join(names[names.index(role) + 1 :])
                by_role.setdefault(role, {})[key] = entropy.words_of(array)
        return {
            key: Moments(
                by_role["master"][key].view(np.float32),
                by_role["mu"][key].view(np.float32),
                by_role["nu"][key].view(np.float32),
                by_role["params"][key],
            )
            for key in by_role["mu"]
        }


@dataclass(frozen=True, slots=True)
class Options:
    """A way to train float32 weights with torch.optim.

    Attributes:
        cast: The type of autocast, ``None`` without it.
        clip: The largest norm of the gradients, ``None`` without a limit.
        groups: Two groups: matrices decay, the others do not. The rate falls, and the embedding is
            frozen.
        scaler: Gradients are scaled, as for float16.
        decoupled: AdamW; false: Adam with L2 regularization.
        micro: Backward passes for each step, whose gradients are summed.
    """

    implementation: str = "foreach"
    cast: torch.dtype | None = None
    clip: float | None = None
    groups: bool = False
    scaler: bool = False
    decoupled: bool = True
    micro: int = 1


class Float32(Training):
    """A language model with float32 weights under torch.optim.AdamW."""

    def __init__(self, name: str, of: Recipe, weights: Any, options: Options) -> None:
        self.name, self.options, self.betas = name, options, of.betas
        self.workload = Workload(of, weights)
        model = self.workload.model.float()
        if options.groups:
            next(model.parameters()).requires_grad_(False)
        # With names, a save knows which weight each state moves.
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        vectors = {"weight_decay": 0.0, "lr": 3e-5}
        parts: list[dict[str, Any]] = (
            [
                {"params": [pair for pair in trained if pair[1].ndim > 1], "weight_decay": 0.1},
                {"params": [pair for pair in trained if pair[1].ndim < 2], **vectors},
            ]
            if options.groups
            else [{"params": trained, "weight_decay": 0.01}]
        )
        kind = torch.optim.AdamW if options.decoupled else torch.optim.Adam
        self.optimizer = kind(
            parts,
            lr=of.rate,
            betas=of.betas,
            eps=of.eps,
            foreach=options.implementation == "foreach",
            fused=options.implementation == "fused",
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=options.scaler)
        self.gradients = "float32"
        self.train(20)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(self.options.micro):
                self._backward()
            if self.options.clip is not None:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self._trained(), self.options.clip)
            self.gradients = self._kind()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if self.options.groups:
                self.schedule.step()

    def _backward(self) -> None:
        rows = next(self.workload.batches)
        cast = self.options.cast
        with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
            loss = self.workload._loss(rows)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def _trained(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _kind(self) -> str:
        """Return how many of the gradients are bfloat16, as the optimizer sees them."""
        gradients = [p.grad for p in self._trained() if p.grad is not None]
        narrow = sum(int((g == g.bfloat16().float()).sum()) for g in gradients)
        share = narrow / sum(g.numel() for g in gradients)
        return f"float32, {share:.0%} of them bfloat16" if share > 0.005 else "float32"

    def snapshot(self) -> Snapshot:
        return {
            str(number): Moments(_copy(p), _copy(state["exp_avg"]), _copy(state["exp_avg_sq"]))
            for number, (p, state) in enumerate(self.optimizer.state.items())
        }

    def eps(self) -> float:
        step = float(next(iter(self.optimizer.state.values()))["step"])
        return float(self.workload.recipe.eps * (1 - self.betas[1] ** step) ** 0.5)

    def state(self) -> dict[str, Any]:
        """Return the whole state."""
        return {
            "model": self.workload.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.workload.step,
        }

    def saved_bytes(self, file: Path) -> int:
        return peer_save(self.state(), file)


def _copy(tensor: torch.Tensor) -> NDArray[np.float32]:
    return entropy.words_of(tensor).view(np.float32)  # type: ignore[no-any-return]


def trainings(quick: bool) -> Iterator[tuple[str, Callable[[], Training]]]:
    """Yield the optimizer's name and a function that starts a run with it."""
    size = "tiny" if quick else "small"
    for state in ("rl_like", "adamw", "lora"):
        yield "MixedPrecisionAdamW", partial(Prepared, "torch", state, size)
    of = tiny("sft") if quick else recipe("sft", batch=1, context=96, dropout=0.0, sources=60)
    of = replace(of, pretrain_steps=4 if quick else 40)
    weights = pretrained(of)
    bf16, f16 = torch.bfloat16, torch.float16
    variants = {
        "float32": Options(),
        "autocast": Options(cast=bf16),
        "autocast, clipped": Options(cast=bf16, clip=0.05),
        "autocast, two batches": Options(cast=bf16, micro=2),
        "groups, schedule, clipped, frozen part": Options(groups=True, clip=0.05),
        "GradScaler, float16": Options(cast=f16, scaler=True),
        "Adam with L2": Options(decoupled=False),
    }
    for implementation in ("foreach", "single", "fused"):
        for name, options in variants.items():
            if implementation != "foreach" and name not in ("float32", "autocast"):
                continue
            chosen = replace(options, implementation=implementation)
            yield f"torch.optim, {implementation}", partial(Float32, name, of, weights, chosen)
    with contextlib.suppress(ImportError):
        import optax  # noqa: F401

        for state in ("rl_like", "adamw"):
            yield "optax.adamw under jit", partial(Prepared, "jax", state, size)


# --- bytes ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Encoder:
    """Our encoder and its entropy stage, into a file that is overwritten.

    Attributes:
        file: The file.
        stored: Bytes by class of leaves.
        seconds: Processor seconds of encoding and of decoding.
    """

    file: Path
    stored: dict[str, int] = field(default_factory=dict)
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, name: str, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Encode arrays of one class against their bases, ``None`` for those without one."""
        codec, chunks = NativeCodec(), 0
        gathered: dict[str, list[Bytes]] = {}
        for now, base in pairs:
            words = now.itemsize
            step = CHUNK_WORDS * 4 // words
            bounds = np.append(np.arange(0, now.size, step), now.size).astype(np.uint64)
            shadow = None if base is None else base.copy()
            start = process_time()
            encoded, _ = codec.encode(now, shadow, bounds, words)
            self.encode_seconds += process_time() - start
            for stream, data in encoded.streams.items():
                gathered.setdefault(stream, []).append(data)
            chunks += len(encoded.rows)
            restored = np.zeros_like(now) if base is None else base.copy()
            start = process_time()
            codec.apply(encoded, restored.view(np.uint8), bounds, words)
            self.decode_seconds += process_time() - start
            if restored.tobytes() != now.tobytes():
                raise AssertionError(f"{name}: decoded other bits than were encoded")
        # A row of the index takes about 8 bytes, a digest 16.
        total = 24 * chunks
        for pieces in gathered.values():
            total += self._entropy_stage(pieces)
        self.stored[name] = self.stored.get(name, 0) + total

    def _entropy_stage(self, pieces: list[Bytes]) -> int:
        start = process_time()
        size = sum(piece.size for piece in pieces)
        spec = ArraySpec.flat(size, "uint8", stream_codec(pieces), {})
        stored, out = 0, np.empty(size, np.uint8)
        per_file = (spec.shard or spec.chunk)[0]
        for number in range(spec.file_count):
            with self.file.open("wb+") as sink:
                arrays.write_stream_file(sink.fileno(), spec, pieces, number)
                stored += sink.tell() or sink.seek(0, os.SEEK_END)
                self.encode_seconds += process_time() - start
                start = process_time()
                source = (
                    sink.fileno(),
                    spec.chunk[0],
                    per_file // spec.chunk[0],
                    spec.shard is not None,
                    spec.codec,
                )
                target = out[number * per_file : (number + 1) * per_file]
                pieces = np.array([[0, 0, target.size, 0, 0]], np.uint64)
                refusal = _native.read_array_files([source], pieces, [target])
                assert refusal is None, refusal
                self.decode_seconds += process_time() - start
                start = process_time()
        return stored

    @property
    def total(self) -> int:
        """Bytes of all classes."""
        return sum(self.stored.values())


def plain(before: Snapshot, now: Snapshot, encoder: Encoder) -> None:
    """Encode deltas as saves do today."""
    pairs = list(adam_law.pairs_of(before, now))
    encoder.add("weight", [(_words(b.weight), _words(a.weight)) for _, a, b in pairs])
    encoder.add("m", [(_words(b.first), _words(a.first)) for _, a, b in pairs])
    encoder.add("v", [(_words(b.second), _words(a.second)) for _, a, b in pairs])
    narrow = [(b.narrow, a.narrow) for _, a, b in pairs if b.narrow is not None]
    if narrow:
        encoder.add("bfloat16 weight", narrow)


def with_law(before: Snapshot, now: Snapshot, laws: Mapping[str, Law], encoder: Encoder) -> None:
    """Encode deltas from the predictions."""
    groups = [
        (a, b, laws[name], adam_law.predict(a, b, laws[name]))
        for name, a, b in adam_law.pairs_of(before, now)
    ]
    encoder.add("weight", [(_words(b.weight), _words(p.weight)) for _, b, _, p in groups])
    encoder.add("m", [(_words(b.first), _words(p.first)) for _, b, _, p in groups])
    gradients = [(p.gradient, None) for *_, p in groups if p.gradient is not None]
    if gradients:
        encoder.add("gradient", gradients)
    encoder.add("v", [(_words(b.second), _words(p.second)) for _, b, _, p in groups])
    casts = [
        (b.narrow, b.weight.astype(ml_dtypes.bfloat16).view(np.uint16))
        for _, b, _, _ in groups
        if b.narrow is not None
    ]
    if casts:
        encoder.add("bfloat16 weight", casts)


def _words(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return values.view(np.uint32)


# --- the benchmark --------------------------------------------------------------------------------


def run(settings: Settings) -> Result:
    """Measure shares, bytes, times and the equality of instruction sets."""
    shares: list[list[Cell]] = []
    sizes: list[list[Cell]] = []
    figures: list[Figure] = []
    costs: list[Costs] = []
    last: tuple[Snapshot, Snapshot, dict[str, Law]] | None = None
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    with threads_restored():
        _native.set_threads(1)
        for number, (optimizer, begin) in enumerate(trainings(settings.quick)):
            if settings.only is not None and settings.only not in optimizer:
                continue
            training = begin()
            row, pair = _shares(training)
            shares.append([optimizer, *row])
            is_first = optimizer == "torch.optim, foreach" and training.name in _MEASURED
            if isinstance(training, Prepared) or is_first:
                folder = settings.folder / str(number)
                folder.mkdir()
                sizes += _sizes(training, folder, settings.quick, figures, costs)
            if training.name == "rl_like" and last is None:
                last = pair
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
    kernels = _kernels(last, settings.folder) if last is not None else []
    if kernels:
        for cost in costs:
            figures += cost.figures(kernels)
    about = (
        "two saved states, no access to the training. Shares: of the elements of all trained"
        " parameters, equal in every bit. Bytes: streams after the entropy stage and 24 bytes a"
        " chunk, of torch.save of the whole state; every encoding was decoded and compared. One"
        " thread, processor time; 'encode' and 'decode' of the second table are without the"
        " predictions, which are NumPy's there; the figures add those of the third table"
    )
    return Result(
        "law",
        about,
        [
            Table("elements that follow, one step apart", SHARES, shares),
            Table("bytes of a save, of torch.save", SIZES_OF, sizes),
            Table("the law as native loops, rl_like", KERNELS, kernels),
        ],
        figures,
    )


SHARES: dict[str, Unit] = {
    "optimizer": "text",
    "run": "text",
    "gradients": "text",
    "elements": "count",
    "m from g": "ratio",
    "v from g": "ratio",
    "v from m": "ratio",
    "weight": "ratio",
    "forms": "text",
}
SIZES_OF: dict[str, Unit] = {
    "run": "text",
    "every": "count",
    "saves": "count",
    "torch.save": "bytes",
    "exact()": "ratio",
    "exact(law)": "ratio",
    "plain": "ratio",
    "law": "ratio",
    "gradient": "ratio",
    "m": "ratio",
    "v": "ratio",
    "weight": "ratio",
    "encode": "ratio",
    "decode": "ratio",
    "save": "ratio",
    "restore": "ratio",
}
KERNELS: dict[str, Unit] = {
    "processor": "text",
    "gradient, ns": "number",
    "from g, ns": "number",
    "from m, ns": "number",
    "hash of all forms": "text",
    "on the run": "text",
}


def _shares(training: Training) -> tuple[list[Cell], tuple[Snapshot, Snapshot, dict[str, Law]]]:
    """Return the row of a run, and the states and laws that it was measured with."""
    before = training.snapshot()
    training.train(1)
    now = training.snapshot()
    laws, shares = _laws(before, now, training, 1), Shares()
    forms: dict[str, int] = {}
    for name, a, b in adam_law.pairs_of(before, now):
        law = laws[name]
        kept = adam_law.predict(a, b, law)
        from_m = adam_law.predict(a, b, replace(law, bits=0))
        shares.add(
            a.weight.size,
            m=adam_law.equal_share(b.first, kept.first) if law.bits else 0.0,
            v=adam_law.equal_share(b.second, kept.second) if law.bits else 0.0,
            v_from_m=adam_law.equal_share(b.second, from_m.second),
            weight=adam_law.equal_share(b.weight, kept.weight),
        )
        stored = f"g of {law.bits} bits, {law.mean}" if law.bits else "m stored"
        form = f"{stored}; {law.square}; {law.weight}"
        forms[form] = forms.get(form, 0) + a.weight.size
    columns = ("m", "v", "v_from_m", "weight")
    row: list[Cell] = [training.name, training.gradients, shares.elements]
    row += [shares[name] for name in columns]
    return [*row, max(forms, key=forms.__getitem__)], (before, now, laws)


def _laws(before: Snapshot, now: Snapshot, training: Training, steps: int) -> dict[str, Law]:
    return {
        name: adam_law.fit(*adam_law.sample(a, b), training.betas, training.eps(), steps)
        for name, a, b in adam_law.pairs_of(before, now)
    }


def _sizes(
    training: Training,
    folder: Path,
    quick: bool,
    figures: list[Figure],
    costs: list[Costs],
) -> Iterator[list[Cell]]:
    """Save a run at every interval in both ways, and yield a row for each."""
    whole = training.saved_bytes(folder / "torch_save.pt")
    # The states of JAX, and the other gradients, are measured at every step and without the engine.
    is_full = training.name in ("rl_like", "adamw", "lora", "float32") and not (
        isinstance(training, Prepared) and training.run.framework == "jax"
    )
    for every in EVERY if is_full and not quick else EVERY[:1]:
        saves = 2 if quick else SAVES if every == 1 and is_full else FEW_SAVES
        engines = (
            [_Engine(training, folder / f"{every}-{n}", p) for n, p in enumerate(POLICIES)]
            if is_full
            else []
        )
        usual, lawful = Encoder(folder / "plain"), Encoder(folder / "law")
        before = training.snapshot()
        for _ in range(saves):
            training.train(every)
            for engine in engines:
                engine.save()
            now = training.snapshot()
            plain(before, now, usual)
            with_law(before, now, _laws(before, now, training, every), lawful)
            before = now
        parts = [lawful.stored.get(name, 0) for name in ("gradient", "m", "v", "weight")]
        share = lawful.total / saves / whole
        limit = LIMITS.get((training.name, every))
        if limit is not None and is_full:
            figures.append(Figure(f"{training.name}, every {every}, of torch.save", share, limit))
        encode = lawful.encode_seconds / usual.encode_seconds
        decode = lawful.decode_seconds / usual.decode_seconds
        shares: list[Cell] = [*(engine.share(whole) for engine in engines)] or [None, None]
        ratios: list[Cell] = [None, None]
        if engines:
            usual_engine, law_engine = engines
            ratios = [
                law_engine.seconds / usual_engine.seconds,
                law_engine.restored() / usual_engine.restored(),
            ]
            if every == 1:
                # A restore depends on the lengths of chains, which the policies choose otherwise.
                name = f"{training.name}, every step, exact(law=True): save"
                figures.append(Figure(name, float(ratios[0] or 0), COST_LIMIT))
        if every == 1 and is_full:
            elements = saves * sum(moments.weight.size for moments in before.values())
            costs.append(Costs(training.name, "gradient" in lawful.stored, elements, usual, lawful))
        yield [
            training.name if is_full else f"{training.name} ({training.gradients})",
            every,
            saves,
            whole,
            *shares,
            usual.total / saves / whole,
            share,
            *(part / saves / whole for part in parts),
            encode,
            decode,
            *ratios,
        ]


@dataclass(frozen=True, slots=True)
class Costs:
    """The processor time of the saves of one run, with the law and without it."""

    name: str
    has_gradients: bool
    elements: int
    usual: Encoder
    lawful: Encoder

    def figures(self, kernels: list[list[Cell]]) -> list[Figure]:
        """Return the costs with the loops of the newest processor that this one can imitate."""
        timed = [row for row in kernels if row[1] is not None]
        gradient, from_g, from_m = (float(cell or 0) * 1e-9 for cell in timed[-1][1:4])
        predict = from_g if self.has_gradients else from_m
        encode = (gradient if self.has_gradients else 0.0) + predict
        name = f"{self.name}, every 1"
        return [
            Figure(
                f"{name}, encode, processor time of plain deltas",
                (self.lawful.encode_seconds + encode * self.elements) / self.usual.encode_seconds,
                COST_LIMIT,
            ),
            Figure(
                f"{name}, decode, processor time of plain deltas",
                (self.lawful.decode_seconds + predict * self.elements) / self.usual.decode_seconds,
                COST_LIMIT,
            ),
        ]


class _Engine:
    """The saves of an engine: all files, keyframes and merged deltas included."""

    def __init__(self, training: Training, root: Path, policy: Policy) -> None:
        self._training, self._root = training, root
        self._chain = Chain("torch", root, policy)
        self._number = 0
        self.save()
        self.seconds = 0.0

    def _live(self) -> dict[str, Any]:
        if isinstance(self._training, Float32):
            return self._training.state()
        return self._training.run.workload.state()  # type: ignore[attr-defined, no-any-return]

    def save(self) -> None:
        state = self._live()
        start = process_time()
        self._chain.save(self._number, state, {})
        if self._number:
            self.seconds += process_time() - start
        self._number += 1

    def restored(self) -> float:
        """Return the processor seconds of a restore of the newest step, after a comparison."""
        start = process_time()
        with Engine(self._root) as engine:
            state = engine.restore()
        seconds = process_time() - start
        live = self._live()
        if states.leaves_of(state).keys() != states.leaves_of(live).keys() or not all(
            entropy.words_of(a).tobytes()
            == entropy.words_of(states.leaves_of(live)[path]).tobytes()
            for path, a in states.leaves_of(state).items()
        ):
            raise AssertionError(f"{self._root}: a restore gave other bits")
        return seconds

    def share(self, whole: int) -> float:
        """Return the mean of the saves after the first, of torch.save, and close the root."""
        self._chain.close()
        return mean(list(self._chain.bytes.values())[1:]) / whole


# --- native loops ---------------------------------------------------------------------------------


class _CLaw(ctypes.Structure):
    """`Law` of law_kernel.cc."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("mean", "square", "weight")),
        *(
            (name, ctypes.c_float)
            for name in (
                *("beta1", "rest1", "inverse1", "beta2", "rest2", "eps", "rate", "keep", "pull"),
                *("scale", "unscale"),
            )
        ),
    ]

    @classmethod
    def of(cls, law: Law) -> _CLaw:
        b1, b2 = law.betas
        return cls(
            *(
                list(forms).index(name)
                for forms, name in (
                    (adam_law.MEANS, law.mean),
                    (adam_law.SQUARES, law.square),
                    (adam_law.WEIGHTS, law.weight),
                )
            ),
            *(b1, 1 - b1, 1 / (1 - b1), b2, 1 - b2, law.eps, law.rate, law.keep, law.pull),
            *(law.scale, np.float32(1) / law.scale),
        )


_SOURCE = Path(__file__).with_name("law_kernel.cc")
_FLAGS = "-O3 -ffp-contract=off -fno-trapping-math -fno-math-errno -fopenmp-simd"
_LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
_REPETITIONS = 5


def _kernels(pair: tuple[Snapshot, Snapshot, dict[str, Law]], folder: Path) -> list[list[Cell]]:
    """Compile the loops for each instruction set, and time and compare them.

    On any numbers, the hash of all forms must be that of the first instruction set; on the run,
    the bits must be those of NumPy.
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    rows: list[list[Cell]] = []
    if compiler is None:
        return rows
    hashes: list[str] = []
    for level in _LEVELS:
        hashes.append(_hash([compiler, f"-march={level}"], [], folder / level))
        library = folder / f"{level}.so"
        _compile([compiler, f"-march={level}", "-shared", "-fPIC"], library)
        *times, is_equal = _kernel(ctypes.CDLL(str(library)), *pair)
        equal = "equal to NumPy" if is_equal else "OTHER THAN NUMPY"
        rows.append([level, *times, _verdict(hashes), equal])
    cross = next(filter(None, map(shutil.which, _CROSS_COMPILERS)), None)
    emulator = next(filter(None, map(shutil.which, _EMULATORS)), None)
    if cross is not None and emulator is not None:
        hashes.append(_hash([cross, "-static"], [emulator], folder / "aarch64"))
        rows.append(["aarch64 (qemu)", None, None, None, _verdict(hashes), ""])
    return rows


_CROSS_COMPILERS = ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-g++-12")
_EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")


def _verdict(hashes: list[str]) -> str:
    return f"{hashes[-1]}" if hashes[-1] == hashes[0] else f"{hashes[-1]}: DIFFERENT"


def _compile(command: list[str], file: Path) -> None:
    # With the flags of the encoder's kernels (CMakeLists.txt).
    subprocess.run([*command, *_FLAGS.split(), str(_SOURCE), "-o", str(file)], check=True)


def _hash(compiler: list[str], emulator: list[str], file: Path) -> str:
    _compile([*compiler, "-DLAW_MAIN"], file)
    done = subprocess.run([*emulator, str(file)], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _kernel(
    library: ctypes.CDLL, before: Snapshot, now: Snapshot, laws: Mapping[str, Law]
) -> tuple[float, float, float, bool]:
    """Return nanoseconds for an element (gradients, from gradients, from m), and the equality."""
    seconds = {"gradient": 0.0, "g": 0.0, "m": 0.0}
    elements, is_equal = 0, True
    for name, a, b in adam_law.pairs_of(before, now):
        law, count = laws[name], a.weight.size
        elements += count
        for bits in (7, 0):
            # The loops know no divided gradients.
            chosen = replace(law, bits=bits, is_divided=False)
            expected = adam_law.predict(a, b, chosen)
            own = _NativeLaw(library, chosen, a, b)
            times = [own.run() for _ in range(_REPETITIONS)]
            gradient, rest = (min(column) for column in zip(*times, strict=True))
            seconds["g" if bits else "m"] += rest
            seconds["gradient"] += gradient if bits else 0.0
            is_equal &= own.equals(expected)
    gradient, from_g, from_m = (seconds[k] / elements * 1e9 for k in ("gradient", "g", "m"))
    return gradient, from_g, from_m, is_equal


class _NativeLaw:
    """One call of the native loops on one parameter."""

    def __init__(self, library: ctypes.CDLL, law: Law, before: Moments, now: Moments) -> None:
        self._library, self._law = library, law
        self._before, self._now = before, now
        self.gradient = np.empty(before.weight.size, np.uint16)
        self.first = now.first.copy()
        self.second, self.weight = np.empty_like(now.second), np.empty_like(now.weight)

    def run(self) -> tuple[float, float]:
        """Return the processor seconds of the gradients and of the predictions."""
        law, size = ctypes.byref(_CLaw.of(self._law)), ctypes.c_int64(self.gradient.size)
        start = process_time()
        if self._law.bits:
            self._library.law_gradients(
                law, size, *map(_address, (self._before.first, self._now.first, self.gradient))
            )
        middle = process_time()
        self._library.law_predict(
            law,
            size,
            *map(_address, (self._before.weight, self._before.first, self._before.second)),
            _address(self.gradient) if self._law.bits else None,
            *map(_address, (self.first, self.second, self.weight)),
        )
        return middle - start, process_time() - middle

    def equals(self, expected: adam_law.Prediction) -> bool:
        """Return True if NumPy predicts the same bits."""
        law, before = self._law, self._before
        with np.errstate(all="ignore"):
            # Of the moments as they were predicted: a save would have corrected them before.
            moments = Moments(before.weight, self.first, self.second)
            update = law.rate * adam_law.direction(moments, law.eps)
            weight = adam_law.canonical(
                adam_law.WEIGHTS[law.weight](before.weight, update, law.keep, law.pull)
            )
        pairs: list[tuple[Any, Any]] = [(self.second, expected.second), (self.weight, weight)]
        if expected.gradient is not None:
            pairs += [(self.gradient, expected.gradient), (self.first, expected.first)]
        return all(own.tobytes() == reference.tobytes() for own, reference in pairs)


def _address(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
