"""Exact saves that know Adam's law: which elements follow from the step before, and the bytes.

Two successive states of Adam determine the gradient between them, and the gradient determines m, v
and the weight. This benchmark trains with several optimizers, lets the search of a save find the
law of each parameter from two saved states alone, and counts the elements that follow in every bit,
by the executable form of the format. It then encodes plain deltas and groups by that law, with the
encoder and the entropy stage of a save.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from time import process_time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import entropy, states
from benchmarks.encode import threads_restored
from benchmarks.prepared import SIZES, recipe_of, settle
from benchmarks.record import Cell, Figure, Result, Settings, Table, Unit
from benchmarks.ways import Chain, Run
from benchmarks.workloads.recipe import Recipe, recipe, tiny
from benchmarks.workloads.torch_workloads import Workload, pretrained
from deltacheck import Policy, _native
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.files.evaluation import peer_save
from deltacheck.codec import NativeCodec, adam_law
from deltacheck.codec.adam_law import Law, Sample
from deltacheck.codec.base import GRADIENT_LAW, MEAN_LAW
from deltacheck.store.files import arrays
from deltacheck.store.files.arrays import ArraySpec
from deltacheck.store.segment import stream_codec
from tests.reference import law as reference

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
POLICIES = (Policy.exact(), Policy.exact(law=True))

Bytes = NDArray[np.uint8]
F32 = NDArray[np.float32]


class Moments(NamedTuple):
    """One parameter at one step, as 1-D copies; ``narrow`` has the bits of a bfloat16 weight."""

    weight: F32
    first: F32
    second: F32
    narrow: NDArray[np.uint16] | None = None

    @property
    def parts(self) -> tuple[F32, F32, F32]:
        """The parts of the parameter's group."""
        return self.weight, self.first, self.second


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

# The streams of a group, by what they hold.
GRADIENTS, DIFFERENCES, EXCEPTIONS = "gradients", "differences", "exceptions"


@dataclass(slots=True)
class Encoder:
    """Our encoder and its entropy stage, into a file that is overwritten.

    Attributes:
        file: The file.
        stored: Bytes by the kind of their stream.
        seconds: Processor seconds of encoding and of decoding.
    """

    file: Path
    stored: dict[str, int] = field(default_factory=dict)
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def plain(self, before: Snapshot, now: Snapshot) -> None:
        """Encode deltas of the leaves, each by itself."""
        pairs = [(before[name], now[name]) for name in now]
        for number in range(3):
            self._add([(b.parts[number], a.parts[number], None) for a, b in pairs])
        self._add([(b.narrow, a.narrow, None) for a, b in pairs if b.narrow is not None])

    def groups(self, before: Snapshot, now: Snapshot, laws: Laws) -> None:
        """Encode groups by their laws. Bfloat16 weights follow from their masters."""
        self._add([(group_of(now[name]), group_of(before[name]), laws[name]) for name in now])

    def _add(self, leaves: list[tuple[Any, Any, Law | None]]) -> None:
        """Encode the leaves of one class, each as (now, before, law), as one segment has them."""
        codec, chunks = NativeCodec(), 0
        gathered: dict[str, list[Bytes]] = {}
        for now, base, law in leaves:
            words = now.itemsize
            # A chunk of a group is a block.
            step = now[0].size if now.ndim > 1 else CHUNK_WORDS * 4 // words
            bounds = np.append(np.arange(0, now.size, step), now.size).astype(np.uint64)
            shadow, restored = base.reshape(-1).copy(), base.reshape(-1).copy()
            start = process_time()
            encoded, _ = codec.encode(
                now.reshape(-1).view(np.uint8),
                shadow.view(np.uint8),
                bounds,
                words,
                law=None if law is None else (law.method, law.content()),
            )
            self.encode_seconds += process_time() - start
            for stream, data in encoded.streams.items():
                gathered.setdefault(stream, []).append(data)
            chunks += len(encoded.rows)
            start = process_time()
            codec.apply(encoded, restored.view(np.uint8), bounds, words)
            self.decode_seconds += process_time() - start
            if restored.tobytes() != now.tobytes():
                raise AssertionError("decoded other bits than were encoded")
        # A row of the index takes about 8 bytes, a digest 16.
        self._count(EXCEPTIONS, 24 * chunks)
        for stream, pieces in gathered.items():
            kind = {"plane": GRADIENTS, "diff": DIFFERENCES}.get(stream[:-1], EXCEPTIONS)
            self._count(kind, self._entropy_stage(pieces))

    def _count(self, kind: str, size: int) -> None:
        self.stored[kind] = self.stored.get(kind, 0) + size

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


Laws = dict[str, Law | None]


def group_of(moments: Moments) -> F32:
    """Return the group of a parameter."""
    group: F32 = adam_law.grouped(moments.parts)
    return group


def sampled(moments: Moments) -> F32:
    """Return the elements of a parameter of which a law is found."""
    return group_of(moments).reshape(-1)[adam_law.sample_places(moments.weight.size)]


def laws_of(before: Snapshot, now: Snapshot, training: Training, steps: int) -> Laws:
    """Return the law that a save finds for each parameter, ``None`` without one."""
    return {
        name: adam_law.find(
            Sample(sampled(before[name]), sampled(now[name])),
            [training.betas],
            training.eps(),
            one_step=steps == 1,
        )
        for name in now
    }


# --- the benchmark --------------------------------------------------------------------------------


def run(settings: Settings) -> Result:
    """Measure shares, bytes and times."""
    shares: list[list[Cell]] = []
    sizes: list[list[Cell]] = []
    figures: list[Figure] = []
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    with threads_restored():
        _native.set_threads(1)
        for number, (optimizer, begin) in enumerate(trainings(settings.quick)):
            if settings.only is not None and settings.only not in optimizer:
                continue
            training = begin()
            shares.append([optimizer, *_shares(training)])
            is_first = optimizer == "torch.optim, foreach" and training.name in _MEASURED
            if isinstance(training, Prepared) or is_first:
                folder = settings.folder / str(number)
                folder.mkdir()
                sizes += _sizes(training, folder, settings.quick, figures)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
    about = (
        "two saved states, no access to the training. Shares: of the elements of all trained"
        " parameters, equal in every bit to the prediction by the law that a save finds. Bytes:"
        " streams after the entropy stage and 24 bytes a chunk, of torch.save of the whole state;"
        " every encoding was decoded and compared. One thread, processor time; 'encode' and"
        " 'decode': with the predictions, without the search for the law, of plain deltas; 'save'"
        " and 'restore': by the engine, of exact()"
    )
    return Result(
        "law",
        about,
        [
            Table("elements that follow, one step apart", SHARES, shares),
            Table("bytes of a save, of torch.save", SIZES_OF, sizes),
        ],
        figures,
    )


SHARES: dict[str, Unit] = {
    "optimizer": "text",
    "run": "text",
    "gradients": "text",
    "elements": "count",
    "m from g": "ratio",
    "v": "ratio",
    "weight": "ratio",
    "law": "text",
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
    GRADIENTS: "ratio",
    DIFFERENCES: "ratio",
    EXCEPTIONS: "ratio",
    "encode": "ratio",
    "decode": "ratio",
    "save": "ratio",
    "restore": "ratio",
}


def _shares(training: Training) -> list[Cell]:
    """Return the row of a run."""
    before = training.snapshot()
    training.train(1)
    now = training.snapshot()
    elements = sum(moments.weight.size for moments in now.values())
    equal = np.zeros(3)
    kinds: dict[str, int] = {}
    for name, law in laws_of(before, now, training, 1).items():
        kind = "none"
        if law is not None:
            equal += _equal_elements(before[name], now[name], law)
            kind = f"{_STORED[law.method]}; forms {law.mean}, {law.square}, {law.weight}"
        kinds[kind] = kinds.get(kind, 0) + now[name].weight.size
    weight, first, second = (float(count) / elements for count in equal)
    most = max(kinds, key=kinds.__getitem__)
    return [training.name, training.gradients, elements, first, second, weight, most]


_STORED = {GRADIENT_LAW: "g stored", MEAN_LAW: "m stored"}


def _equal_elements(before: Moments, now: Moments, law: Law) -> NDArray[np.float64]:
    """Return the elements of weight, m and v that are predicted in every bit.

    An m that is stored is not predicted.
    """
    content = reference.Law.of(law.content())
    base = np.concatenate(before.parts).view(np.uint32)
    has_gradients = law.method == GRADIENT_LAW
    with np.errstate(all="ignore"):
        predicted = reference.step(
            content,
            base,
            reference.narrow_gradient(content, before.first, now.first) if has_gradients else None,
            None if has_gradients else now.first,
        )
    words = np.concatenate(now.parts).view(np.uint32)
    counts = (predicted == words).reshape(3, -1).sum(axis=1).astype(np.float64)
    if not has_gradients:
        counts[1] = 0
    return counts


def _sizes(
    training: Training, folder: Path, quick: bool, figures: list[Figure]
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
            usual.plain(before, now)
            lawful.groups(before, now, laws_of(before, now, training, every))
            before = now
        kinds = (GRADIENTS, DIFFERENCES, EXCEPTIONS)
        encode = lawful.encode_seconds / usual.encode_seconds
        decode = lawful.decode_seconds / usual.decode_seconds
        shares: list[float] = [engine.share(whole) for engine in engines]
        ratios: list[Cell] = [None, None]
        if engines:
            limit = LIMITS.get((training.name, every))
            if limit is not None:
                figures.append(
                    Figure(f"{training.name}, every {every}, of torch.save", shares[1], limit)
                )
            usual_engine, law_engine = engines
            save = law_engine.seconds / usual_engine.seconds
            # A restore depends on the lengths of chains, which the policies choose otherwise.
            ratios = [save, law_engine.restored() / usual_engine.restored()]
            if every == 1:
                name = f"{training.name}, every step, of plain deltas' processor time:"
                for what, cost in (("save", save), ("encode", encode), ("decode", decode)):
                    figures.append(Figure(f"{name} {what}", cost, COST_LIMIT))
        yield [
            training.name if is_full else f"{training.name} ({training.gradients})",
            every,
            saves,
            whole,
            *(shares if shares else (None, None)),
            usual.total / saves / whole,
            lawful.total / saves / whole,
            *(lawful.stored.get(kind, 0) / saves / whole for kind in kinds),
            encode,
            decode,
            *ratios,
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
