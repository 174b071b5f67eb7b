"""Bring the shadow to the leaves' present content, and encode the changes.

This is memory work only. It runs on the training thread for leaves that must be read before
``save`` returns, and on the encoder thread for the lazy ones. If the host cache is full it waits
for the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltacheck.codec import default_codec, host_memory
from deltacheck.codec.adam_law import Law
from deltacheck.codec.base import U8, U64, Codec, GroupCodec, GroupJob
from deltacheck.codec.leaf_memory import memories_of
from deltacheck.codec.native import Cut
from deltacheck.errors import SaveFailed
from deltacheck.leaf.digest import chunk_digests, leaf_digest
from deltacheck.leaf.spec import LeafSpec
from deltacheck.policy import Policy, keyframes
from deltacheck.save.job.leaf_state import LeafSave, LeafState, await_write
from deltacheck.save.job.part_writer import EncodedChunks, PartWriter, Span
from deltacheck.save.job.sampled_sizes import sampled_sizes
from deltacheck.save.job.setup import Setup
from deltacheck.save.job.source import Coded, LeafSource
from deltacheck.save.progress import Progress

# Leaves of at most so many bytes are encoded together. Larger: fewer calls; smaller: less memory
# until the call.
_SMALL_BYTES = 256 << 10
_MOST_TOGETHER_BYTES = 8 << 20
# Groups on a device are encoded when they have so many bytes. Larger: fewer calls; smaller: less
# device memory, which they take until then.
_MOST_CODED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _GroupMember:
    """A leaf that is encoded together with others, in one call on its device or in host memory."""

    leaf: LeafSave
    state: LeafState
    source: LeafSource
    is_coded: bool
    current: Any
    law: Law | None

    def job(self, policy: Policy) -> GroupJob:
        """Return the job of the codec of its device."""
        return GroupJob(
            self.current,
            self.state.base,
            self.state.bounds,
            self.state.spec.word_bytes,
            _is_ordered(policy, self.state),
            None if self.law is None else (self.law.method, self.law.content()),
        )


class LeafCapture:
    """The capture of one save.

    Args:
        setup: The options of the saver.
        progress: Receives a beat at every leaf.
        leaves: The leaves of the save by path.
        states: The saver's chains by path; updated in place.
        parts: Takes what is encoded.
    """

    def __init__(
        self,
        setup: Setup,
        progress: Progress,
        leaves: Mapping[str, LeafSave],
        states: dict[str, LeafState],
        parts: PartWriter,
    ) -> None:
        self.keyframes: list[LeafSave] = []
        self._setup = setup
        self._progress = progress
        self._leaves = leaves
        self._states = states
        self._parts = parts
        self._copy: U8 | None = None
        # Once, because a look at all methods of a protocol takes as long as a small leaf.
        self._memories = memories_of(setup.codec)
        self._group_codec = setup.codec if isinstance(setup.codec, GroupCodec) else None

    def capture(self, sources: deque[LeafSource]) -> None:
        """Capture all ``sources``.

        Each is removed from ``sources`` before the next one is read: a leaf that only the save
        still holds is then freed at once.

        Raises:
            SaveFailed: A leaf was to stay as stored, but an earlier save that failed dropped it.
            SnapshotTorn: The caller changed a lazy leaf.
        """
        group: list[_GroupMember] = []
        small: list[_GroupMember] = []
        coded_bytes = 0
        small_bytes, most_bytes = 0, min(_MOST_TOGETHER_BYTES, self._parts.part_bytes)
        while sources:
            member = self._capture_leaf(sources.popleft())
            if member is None:
                continue
            if not _is_small(member.current, self._parts.part_bytes):
                group.append(member)
                coded_bytes += member.state.spec.raw_bytes if member.is_coded else 0
                if coded_bytes >= _MOST_CODED_BYTES:
                    self._encode_group(group, is_last=False)
                    group, coded_bytes = [], 0
                continue
            if small_bytes + member.current.size > most_bytes:
                self._parts.add_all(_encode_small(self._parts, self._setup.policy, small))
                small, small_bytes = [], 0
            small.append(member)
            small_bytes += member.current.size
        # Read before training may go on, and stored in the order of a save from host memory.
        encoded_small = _encode_small(self._parts, self._setup.policy, small)
        # As large as the largest leaf that was stored whole.
        self._copy = None
        if group:
            self._encode_group(group, is_last=True)
        self._parts.add_all(encoded_small)

    def _capture_leaf(self, source: LeafSource) -> _GroupMember | None:
        """Capture one leaf; return it if it is to be encoded together with others."""
        self._progress.beat()
        # `source` is the last reference to lazy content. It ends with this call, or with the group.
        path = source.spec.path
        leaf, state = self._leaves[path], self._states.get(path)
        leaf.is_captured = True
        if state is not None and state.base_write is not None:
            # The last keyframe may still be written from the memory that is updated now.
            await_write(state.base_write, self._setup.options.io_timeout_seconds)
            state.base_write = None
        content = source.current()
        is_coded = isinstance(content, Coded)
        coded = content if isinstance(content, Coded) else Coded(source.spec, content)
        leaf.stored_spec = coded.spec
        if coded.spec is None:
            # A derived leaf has no chain: its next stored form must be a keyframe.
            self._states.pop(path, None)
            return None
        state = leaf.state = _chain_of(self._states, path, coded.spec, stays=coded.data is None)
        state.is_group = coded.law is not None
        if not is_coded and self._is_stored_whole(state, content):
            self._capture_whole(leaf, state, source, content)
            return None
        if coded.data is not None:
            member = self._encode_alone(leaf, state, source, coded, is_coded=is_coded)
            if member is not None:
                return member
        source.check(state.base, is_coded=is_coded)
        return None

    def _encode_alone(
        self, leaf: LeafSave, state: LeafState, source: LeafSource, coded: Coded, *, is_coded: bool
    ) -> _GroupMember | None:
        """Encode a leaf, or return it if it is to be encoded together with others."""
        codec, spec, current = self._setup.codec, state.spec, coded.data
        member = partial(_GroupMember, leaf, state, source, is_coded)
        if coded.is_new and state.base is not None:
            state.base = codec.copy(current, state.base)
            self._prove(leaf, spec, state.base)
            self._encode_if_changed(leaf, state, codec.host(state.base))
        elif state.is_due(self._setup.policy):
            state.base = codec.copy(current, self._memory_of(state, current))
            self._prove(leaf, spec, state.base)
            self.keyframes.append(leaf)
        elif self._group_codec is not None and self._group_codec.grouped(current, state.base):
            # One call for many leaves: each call of a device costs more than a small leaf.
            self._prove(leaf, spec, current)
            return member(current, None if coded.law is None else coded.law(state.base))
        elif coded.law is not None:
            law = coded.law(state.base)
            self._encode(default_codec(), leaf, state, self._proven(leaf, spec, current), law)
        elif _is_small(current, self._parts.part_bytes) and isinstance(state.base, np.ndarray):
            return member(self._proven(leaf, spec, current), None)
        else:
            self._encode(codec, leaf, state, self._proven(leaf, spec, current))
        return None

    def _is_stored_whole(self, state: LeafState, current: Any) -> bool:
        """Return true if each save stores a leaf whole, without a base.

        This is estimated where the base still exists, and again after a number of saves.
        """
        setup = self._setup
        # A policy that is not exact compares the leaf with what is stored.
        if not (
            setup.options.keeps_shadow
            and setup.policy.hidden is None
            # Mapped memory is not given back leaf by leaf.
            and setup.shadow_file is None
            # Codecs of JAX take arrays of any type, too, and read them in their own way.
            and isinstance(current, np.ndarray)
            and (current.dtype, current.ndim) == (np.uint8, 1)
            and current.size >= keyframes.LEAST_WHOLE_BYTES
        ):
            return False
        if state.saves_until_estimate > 0:
            state.saves_until_estimate -= 1
        elif isinstance(state.base, np.ndarray):
            sizes = sampled_sizes(current, state.base, state.spec.word_bytes)
            state.is_whole = keyframes.is_smaller_whole(sizes.whole, sizes.delta)
            state.saves_until_estimate = keyframes.saves_until_estimate(state.spec.path)
            if state.is_whole:
                state.base = None
        return state.is_whole

    def _capture_whole(
        self, leaf: LeafSave, state: LeafState, source: LeafSource, current: Any
    ) -> None:
        """Encode a leaf without a base, if it differs from what is stored of it."""
        # A copy, because the bytes that are checked and hashed must be those that are encoded.
        if self._copy is None or self._copy.size < current.size:
            self._copy = host_memory.empty(current.size)
        content = self._setup.codec.copy(current, self._copy[: current.size])
        source.check(content)
        self._prove(leaf, state.spec, content)
        is_unchanged = self._encode_if_changed(leaf, state, content)
        # It no longer changes everywhere, or the sizes are due to be estimated again.
        if state.is_whole and (is_unchanged.any() or state.saves_until_estimate == 0):
            state.is_whole, state.saves_until_estimate = False, 0
            state.base = self._setup.codec.copy(content, None)

    def _encode_if_changed(
        self, leaf: LeafSave, state: LeafState, content: U8
    ) -> NDArray[np.bool_]:
        """Encode all of a leaf without a base, unless it equals what is stored of it.

        Returns:
            For each chunk, whether it is unchanged.
        """
        digests = chunk_digests(
            content, state.bounds, state.spec.word_bytes, range(state.bounds.size - 1)
        )
        is_unchanged: NDArray[np.bool_] = (digests == state.digests).all(axis=1)
        if not is_unchanged.all():
            # The entry of a leaf without a digest is a keyframe.
            state.digest = ""
            self._encode_whole(leaf, state, content, digests)
        return is_unchanged

    def _memory_of(self, state: LeafState, current: Any) -> Any:
        """Return the memory of the base of a leaf that is written whole; ``None``: any."""
        shadow_file = self._setup.shadow_file
        if state.base is None and shadow_file is not None and isinstance(current, np.ndarray):
            return shadow_file.take(current.nbytes)
        return state.base

    def _prove(self, leaf: LeafSave, spec: LeafSpec, content: Any) -> None:
        """Record the digest of what is stored, if the save is read back.

        It is computed here and not later: memory that is damaged on the way to the disk must not
        match.
        """
        if self._setup.options.verify != "none":
            leaf.live_digest = leaf_digest(self._memories(content).digests(content, spec))

    def _proven(self, leaf: LeafSave, spec: LeafSpec, current: Any) -> Any:
        """Return what to encode: a copy, if its digest is recorded, else ``current``."""
        if self._setup.options.verify == "none":
            return current
        # Hashed and encoded are two reads, between which the source may be written to.
        current = self._setup.codec.copy(current, None)
        self._prove(leaf, spec, current)
        return current

    def _encode(
        self,
        codec: Codec[Any],
        leaf: LeafSave,
        state: LeafState,
        current: Any,
        law: Law | None = None,
    ) -> None:
        """Encode a leaf against its base, run by run."""
        predicted: dict[str, Any] = {} if law is None else {"law": (law.method, law.content())}
        bounds, word_bytes = state.bounds, state.spec.word_bytes
        ordered = _is_ordered(self._setup.policy, state)
        for first, stop in self._runs(codec, bounds, word_bytes):
            low, high = int(bounds[first]) * word_bytes, int(bounds[stop]) * word_bytes
            self._parts.make_room(high - low)
            if high - low == state.spec.raw_bytes:
                # A codec on a device may return another base, but only of a whole leaf.
                encoded, state.base = codec.encode(
                    current, state.base, bounds, word_bytes, ordered=ordered, **predicted
                )
            else:
                window = bounds[first : stop + 1] - bounds[first]
                encoded, _ = codec.encode(
                    current[low:high],
                    state.base[low:high],
                    window,
                    word_bytes,
                    ordered=ordered,
                    **predicted,
                )
            self._parts.add(EncodedChunks((Span(leaf, 0, first),), encoded, None))

    def _encode_whole(self, leaf: LeafSave, state: LeafState, content: U8, digests: U64) -> None:
        """Encode every chunk of a leaf without a base, run by run."""
        codec, bounds, word_bytes = default_codec(), state.bounds, state.spec.word_bytes
        for first, stop in self._runs(codec, bounds, word_bytes):
            low, high = int(bounds[first]) * word_bytes, int(bounds[stop]) * word_bytes
            self._parts.make_room(high - low)
            window = bounds[first : stop + 1] - bounds[first]
            encoded, _ = codec.encode(content[low:high], None, window, word_bytes)
            self._parts.add(EncodedChunks((Span(leaf, 0, first),), encoded, digests[first:stop]))

    def _runs(self, codec: Codec[Any], bounds: U64, word_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the first chunk and the end of each run that one call of the codec encodes."""
        chunks = bounds.size - 1
        step = max(1, chunks)
        # A run must fit into a part, and ends at a chunk.
        limit = None if codec.run_bytes is None else min(codec.run_bytes, self._parts.part_bytes)
        if limit is not None and int(bounds[-1]) * word_bytes > limit:
            longest = max(1, int(np.diff(bounds).max(initial=1)) * word_bytes)
            step = max(1, limit // longest)
        for first in range(0, chunks, step):
            yield first, min(chunks, first + step)

    def _encode_group(self, group: Sequence[_GroupMember], *, is_last: bool) -> None:
        """Encode leaves on their device, a few calls for all of them.

        Args:
            group: The leaves.
            is_last: True if the save has then read all leaves.
        """
        codec = self._group_codec
        assert codec is not None

        # The codec calls this as soon as the device has all reads. Training waits for it, while
        # the encoding goes on.
        def check_reads() -> None:
            for member in group:
                if member.source.recheck is not None:
                    member.source.recheck()
            if is_last:
                self._progress.mark_reads_enqueued()

        jobs = [member.job(self._setup.policy) for member in group]
        for batch in codec.encode_group(jobs, self._parts.make_room, check_reads):
            for job, base in batch.bases.items():
                group[job].state.base = base
            starts = np.cumsum([0] + [span.chunks for span in batch.spans]).tolist()
            spans = [
                Span(group[span.job].leaf, start, span.first_chunk)
                for span, start in zip(batch.spans, starts, strict=False)
            ]
            self._parts.add(EncodedChunks(spans, batch.encoded, batch.digests))
        # The bases are complete only now.
        for member in group:
            if member.source.check_content is not None and not member.is_coded:
                member.source.check_content(member.state.base)


def _chain_of(states: dict[str, LeafState], path: str, spec: LeafSpec, *, stays: bool) -> LeafState:
    """Return the chain of a leaf, a new one if it has none of this form.

    Args:
        states: The saver's chains by path; a new one is added.
        path: The leaf.
        spec: The form of what is stored.
        stays: What is stored stays as it is.

    Raises:
        SaveFailed: It was to stay, and the leaf has no such chain.
    """
    state = states.get(path)
    if state is not None and state.spec == spec:
        return state
    if stays:
        raise SaveFailed(
            f"leaf {path!r} was to stay as it is, but an earlier save that failed took it along"
        )
    state = states[path] = LeafState(spec, spec.bounds())
    return state


def _encode_small(
    parts: PartWriter, policy: Policy, members: Sequence[_GroupMember]
) -> list[EncodedChunks]:
    """Encode leaves in host memory, those with the same keyframe's segment in one call."""
    pieces = []
    by_segment: dict[str, list[_GroupMember]] = {}
    for member in members:
        by_segment.setdefault(member.state.key_segment, []).append(member)
    for together in by_segment.values():
        parts.make_room(sum(member.current.size for member in together))
        encoded = default_codec().encode_many(
            [member.current for member in together],
            [member.state.base for member in together],
            [
                Cut(
                    m.state.bounds,
                    m.state.spec.word_bytes,
                    _is_ordered(policy, m.state),
                )
                for m in together
            ],
        )
        starts = accumulate((m.state.bounds.size - 1 for m in together), initial=0)
        spans = [Span(m.leaf, start, 0) for m, start in zip(together, starts, strict=False)]
        pieces.append(EncodedChunks(spans, encoded, None))
        for member in together:
            member.source.check(member.state.base, is_coded=member.is_coded)
    return pieces


def _is_ordered(policy: Policy, state: LeafState) -> bool:
    # An exact policy writes so much else that the time would not pay.
    return policy.hidden is not None and state.spec.element.is_short_float


def _is_small(current: Any, part_bytes: int) -> bool:
    """Return true if a leaf shares a call with others: plain bytes that fit into a part."""
    return (
        isinstance(current, np.ndarray)
        and (current.dtype, current.ndim) == (np.uint8, 1)
        and current.size <= min(_SMALL_BYTES, part_bytes)
    )
