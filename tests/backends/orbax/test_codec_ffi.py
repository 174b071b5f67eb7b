"""The codec whose bases are JAX arrays."""

import numpy as np
import pytest

from deltacheck.codec import NativeCodec
from deltacheck.codec.base import Encoded, GroupJob
from tests.codec.test_codec_contract import VectorContract
from tests.contracts.codec import CodecContract, moved, same, words

jax = pytest.importorskip("jax")
ffi = pytest.importorskip("deltacheck.backends.orbax.capture.ffi")
if not ffi.available():
    pytest.skip("this build has no XLA handlers", allow_module_level=True)

jnp = jax.numpy

BOUNDS = np.array([0, 3000, 5000], np.uint64)


def floats(seed=0):
    return words(5000, 4, seed).view(np.float32)


class TestFfi(CodecContract, VectorContract):
    @pytest.fixture
    def codec(self):
        return ffi.FfiCodec()

    def held(self, data):
        return jnp.array(data, copy=True)


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "bfloat16",
        "float16",
        "int8",
        "uint32",
        "bool",
        "complex64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
    ],
)
def test_an_array_of_any_whole_byte_dtype_is_encoded_as_its_bytes(dtype):
    codec = ffi.FfiCodec()
    before = jnp.array(np.random.default_rng(0).integers(0, 2, (50, 100))).astype(dtype)
    after = before.at[7, 30:35].set(jnp.ones((), dtype)).at[49, 99].set(jnp.zeros((), dtype))
    shadow = codec.host(before).copy()
    encoded, base = codec.encode(after, codec.copy(before, None), BOUNDS, before.dtype.itemsize)
    expected, _ = NativeCodec().encode(np.asarray(after), shadow, BOUNDS, before.dtype.itemsize)
    assert same(encoded, expected)
    assert base.dtype == before.dtype
    assert np.array_equal(codec.host(base), codec.host(after))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn"])
def test_a_dtype_that_xla_packs_is_refused_by_name(dtype):
    array = jnp.zeros((16,), dtype)
    with pytest.raises(ValueError, match=f"current is {dtype}"):
        ffi.FfiCodec().encode(array, array.copy(), np.array([0, 16], np.uint64), 1)


def test_the_base_is_updated_where_it_lies():
    codec = ffi.FfiCodec()
    base = codec.copy(jnp.array(floats()), None)
    address = base.unsafe_buffer_pointer()
    current = jnp.array(floats(1))
    for _ in range(3):
        _, base = codec.encode(current, base, BOUNDS, 4)
        assert base.unsafe_buffer_pointer() == address


def test_current_stays_usable():
    codec = ffi.FfiCodec()
    current = jnp.array(floats(1))
    codec.encode(current, jnp.array(floats()), BOUNDS, 4)
    assert np.array_equal(np.asarray(current), floats(1))


def test_a_view_that_is_still_held_keeps_its_content():
    codec = ffi.FfiCodec()
    base = jnp.array(floats())
    view = codec.host(base)
    _, new_base = codec.encode(jnp.array(floats(1)), base, BOUNDS, 4)
    assert np.array_equal(view.view(np.float32), floats())
    assert np.array_equal(np.asarray(new_base), floats(1))


def test_a_copy_reuses_the_memory_that_it_is_given():
    codec = ffi.FfiCodec()
    out = jnp.zeros(5000, jnp.float32)
    address = out.unsafe_buffer_pointer()
    current = jnp.array(floats())
    copied = codec.copy(current, out)
    assert copied.unsafe_buffer_pointer() == address
    assert copied.unsafe_buffer_pointer() != current.unsafe_buffer_pointer()
    assert np.array_equal(np.asarray(copied), floats())


def test_leaves_of_one_shape_share_a_program():
    codec = ffi.FfiCodec()
    ffi._encode.clear_cache()
    for seed in range(4):
        codec.encode(jnp.array(floats(seed)), jnp.array(floats(9)), BOUNDS, 4)
    assert ffi._encode._cache_size() == 1


def test_an_array_on_several_devices_is_refused():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    sharded = jax.device_put(
        jnp.zeros(64), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    )
    with pytest.raises(ValueError, match="2 devices"):
        ffi.FfiCodec().encode(sharded, sharded, np.array([0, 64], np.uint64), 4)


def test_an_array_on_a_device_that_is_not_the_first_is_encoded_there():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    device = jax.devices()[1]
    current, base = jax.device_put(floats(1), device), jax.device_put(floats(), device)
    _, new_base = ffi.FfiCodec().encode(current, base, BOUNDS, 4)
    assert new_base.device == device


def call_encode(
    bases=((5000,),), word_bytes=(4,), chunks=(2,), bounds=(0, 3000, 5000), ordered=(0,), **shapes
):
    """The handler itself, with operands that need not fit."""
    assert ffi.available()
    want = {"current": (5000,), "rows": (2, 5), "head": (25, 2), "payload": (20_000,)} | shapes
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in bases] + [
        jax.ShapeDtypeStruct(want["rows"], jnp.uint32),
        jax.ShapeDtypeStruct(want["head"], jnp.uint32),
        jax.ShapeDtypeStruct(want["payload"], jnp.uint8),
    ]
    currents, held = [jnp.ones(want["current"])] * len(bases), [jnp.zeros(shape) for shape in bases]
    aliases = {len(currents) + i: i for i in range(len(bases))}
    call = jax.ffi.ffi_call("deltacheck_encode_cpu", results, input_output_aliases=aliases)
    numbers = {"word_bytes": word_bytes, "chunks": chunks, "bounds": bounds, "ordered": ordered}
    attributes = {name: np.array(value, np.int64) for name, value in numbers.items()}
    return jax.block_until_ready(jax.jit(lambda c, b: call(*c, *b, **attributes))(currents, held))


@pytest.mark.parametrize(
    ("operands", "says"),
    [
        ({"bases": ((4999,),)}, "leaf 0: base has shape"),
        ({"bases": ((5000,), (5000,))}, "a base and a new base for each of the 1 word sizes"),
        ({"word_bytes": (3,)}, "leaf 0: word_bytes must be 1, 2, 4 or 8, not 3"),
        (
            {"word_bytes": (8,)},
            "leaf 0: bounds end at 5000 words of 8 bytes, but there are 20000 bytes",
        ),
        ({"chunks": (3,)}, "leaf 0: bounds end before it"),
        ({"chunks": (-1,)}, "leaf 0: bounds end before it"),
        ({"chunks": (1,), "bounds": (0, 5000, 5000)}, "bounds go on after the last leaf"),
        ({"bounds": (0, 5001, 5000)}, "leaf 0: bounds must ascend from 0"),
        ({"bounds": (0, -1, 5000)}, "leaf 0: a chunk must have fewer than 2\\^32 words"),
        ({"ordered": (0, 1)}, "ordered must have one entry for each leaf"),
        ({"rows": (2, 4)}, r"rows must be uint32 of shape \(2, 5\)"),
        ({"head": (23, 2)}, "head must be uint32"),
    ],
)
def test_a_handler_names_the_operand_that_does_not_fit(operands, says):
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=says):
        call_encode(**operands)


def test_a_payload_that_is_too_small_is_told_and_not_written_past():
    base, _, head, payload = call_encode(payload=(100,))
    assert np.array_equal(base, np.ones(5000, np.float32))
    numbers = np.asarray(head).reshape(-1).view(np.uint64)
    assert numbers[:2].tolist() == [2, 1]
    assert numbers[2:].sum() > 100
    assert payload.shape == (100,)


# --- groups ---------------------------------------------------------------------------------------


def group(shapes, density=0.05):
    """Jobs of several dtypes and shapes, with their words before and after, as NumPy arrays."""
    jobs, arrays = [], []
    for seed, (count, width) in enumerate(shapes):
        before = words(count, width, seed)
        after = moved(before, density, 3, seed)
        bounds = np.array([0, count // 3, count], np.uint64)
        jobs.append(GroupJob(jnp.array(after), jnp.array(before), bounds, width, seed % 2 == 1))
        arrays.append((after, before))
    return jobs, arrays


def test_leaves_of_a_group_are_encoded_as_each_by_itself_and_their_streams_follow_one_another():
    jobs, arrays = group([(5000, 4), (30_000, 2), (1, 1), (9000, 1)])
    [made] = ffi.FfiCodec().encode_group(jobs, lambda size: None, lambda: None)
    rows, streams = [], {}
    for number, (job, (after, before)) in enumerate(zip(jobs, arrays, strict=True)):
        one, _ = NativeCodec().encode(
            after, before.copy(), job.bounds, job.word_bytes, ordered=job.ordered
        )
        rows.append(one.rows + np.array([2 * number, 0, 0, 0, 0], np.uint32))
        for name, content in one.streams.items():
            streams.setdefault(name, []).append(content)
    assert same(
        made.encoded,
        Encoded(
            np.concatenate(rows), {name: np.concatenate(parts) for name, parts in streams.items()}
        ),
    )
    for base, (after, _) in zip(made.bases.values(), arrays, strict=True):
        assert np.array_equal(base, after)


def test_a_group_has_no_more_bytes_than_its_window_but_for_one_larger_leaf():
    jobs, _ = group([(5000, 4), (5000, 4), (50_000, 4), (100, 4), (100, 4)])
    asked = []
    made = list(ffi.FfiCodec(window_bytes=50_000).encode_group(jobs, asked.append, lambda: None))
    assert [[span.job for span in one.spans] for one in made] == [[0, 1], [2], [3, 4]]
    assert asked == [40_000, 200_000, 800]


def test_an_empty_leaf_is_a_group_of_its_own():
    jobs, _ = group([(100, 4), (100, 4)])
    empty = GroupJob(jnp.zeros((0, 4)), jnp.zeros((0, 4)), np.zeros(1, np.uint64), 4)
    made = list(
        ffi.FfiCodec().encode_group([jobs[0], empty, jobs[1]], lambda size: None, lambda: None)
    )
    assert [[span.job for span in one.spans] for one in made] == [[0], [1], [2]]


def test_leaves_on_different_devices_do_not_share_a_call():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    jobs, _ = group([(100, 4), (100, 4), (100, 4)])
    other = jax.devices()[1]
    jobs[1] = jobs[1]._replace(
        current=jax.device_put(jobs[1].current, other), base=jax.device_put(jobs[1].base, other)
    )
    made = list(ffi.FfiCodec().encode_group(jobs, lambda size: None, lambda: None))
    assert [len(one.bases) for one in made] == [1, 1, 1]
    assert made[1].bases[1].device == other


def test_the_bases_of_a_group_are_updated_where_they_lie():
    jobs, _ = group([(5000, 4), (30_000, 2)])
    addresses = [job.base.unsafe_buffer_pointer() for job in jobs]
    [made] = ffi.FfiCodec().encode_group(jobs, lambda size: None, lambda: None)
    assert [base.unsafe_buffer_pointer() for base in made.bases.values()] == addresses


def test_an_empty_array_has_no_rows():
    encoded, base = ffi.FfiCodec().encode(
        jnp.zeros((0, 4)), jnp.zeros((0, 4)), np.zeros(1, np.uint64), 4
    )
    assert encoded.rows.shape == (0, 5)
    assert base.shape == (0, 4)
    assert isinstance(encoded, Encoded)
