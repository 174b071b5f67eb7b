"""The codec contract, and the shared vectors, over every host codec.
tests/backends/orbax/test_codec_ffi.py does the same for JAX arrays.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from deltacheck.codec.base import LAWS, METHOD_NAMES, ROW_METHOD, STREAMS, Encoded
from tests.contracts.codec import CASES, DecoderContract
from tests.reference.codec import ReferenceCodec

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "encoder.json").read_text())


def read_vector(vector):
    """(current, base or None, bounds, word_bytes, Encoded) of one entry of encoder.json."""
    current = np.frombuffer(bytes.fromhex(vector["current"]), np.uint8)
    base = (
        None
        if vector["base"] is None
        else np.frombuffer(bytes.fromhex(vector["base"]), np.uint8).copy()
    )
    streams = {
        name: np.frombuffer(bytes.fromhex(content), np.uint8)
        for name, content in vector["streams"].items()
    }
    rows = np.array(vector["rows"], np.uint32).reshape(-1, 5)
    return (
        current,
        base,
        np.array(vector["bounds"], np.uint64),
        vector["word_bytes"],
        Encoded(rows, streams),
    )


class VectorContract:
    """The vectors of tests/vectors/encoder.json: bytes that no release may change."""

    @pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
    def test_a_vector_is_encoded_to_its_bytes(self, codec, vector):
        ordered = vector.get("ordered", False)
        current, base, bounds, word_bytes, expected = read_vector(vector)
        encoded, _ = codec.encode(
            self.held(current),
            None if base is None else self.held(base),
            bounds,
            word_bytes,
            ordered=ordered,
        )
        assert encoded.rows.tolist() == expected.rows.tolist()
        assert {n: s.tobytes().hex() for n, s in encoded.streams.items()} == vector["streams"]


class DecodedVectorContract(VectorContract):
    """The same, and their decoding."""

    @pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
    def test_a_vector_is_decoded_from_its_bytes(self, codec, vector):
        current, base, bounds, word_bytes, encoded = read_vector(vector)
        decoded = np.zeros_like(current) if base is None else base
        codec.apply(encoded, decoded, bounds, word_bytes)
        assert decoded.tobytes().hex() == vector["current"]


class TestReference(DecoderContract, DecodedVectorContract):
    @pytest.fixture
    def codec(self):
        return ReferenceCodec()


class TestNative(DecoderContract, DecodedVectorContract):
    @pytest.fixture
    def codec(self):
        return pytest.importorskip("deltacheck.codec.native").NativeCodec()


def test_the_cases_use_every_method_and_every_stream():
    methods, streams = set(), set()
    for case in CASES:
        for ordered in (False, True):
            base = None if case.base is None else case.base.copy()
            encoded, _ = ReferenceCodec().encode(
                case.current, base, case.bounds, case.word_bytes, ordered=ordered
            )
            methods |= {METHOD_NAMES[m] for m in encoded.rows[:, ROW_METHOD]}
            streams |= set(encoded.streams)
    # Those of laws are in test_adam_law.py.
    assert methods == set(METHOD_NAMES) - {"unchanged", *(METHOD_NAMES[m] for m in LAWS)}
    assert streams == set(STREAMS) - {"law"}


def test_the_vectors_use_every_method():
    assert {row[ROW_METHOD] for vector in VECTORS for row in vector["rows"]} == {
        *range(1, len(METHOD_NAMES))
    } - {*LAWS}
