"""The codec whose bases are JAX arrays."""

from functools import partial

import numpy as np
import pytest
from test_codec_contract import VectorContract

from deltacheck.codec import Encoded, NativeCodec
from deltacheck.errors import DamagedStream
from deltacheck.testing.codec import DAMAGES, CodecContract, moved, same, words

jax = pytest.importorskip("jax")
ffi = pytest.importorskip("deltacheck.backends.orbax.ffi")
if not ffi.available():
    pytest.skip("this build has no XLA handlers", allow_module_level=True)
from deltacheck.codec.statistics import statistics as host_statistics  # noqa: E402

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
    ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"],
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
        bounds = np.array([0, 1000 + seed, 5000], np.uint64)
        codec.encode(jnp.array(floats(seed)), jnp.array(floats(9)), bounds, 4)
    assert ffi._encode._cache_size() == 1


def test_decode_on_the_device_gives_back_every_bit():
    codec = ffi.FfiCodec()
    base = words(5000, 4)
    for density, most in ((0.0, 1), (0.01, 3), (0.3, 70000), (1.0, 70000)):
        current = moved(base, density, most)
        encoded, _ = NativeCodec().encode(current, base.copy(), BOUNDS, 4)
        decoded = codec.decode(encoded, jnp.array(base.view(np.float32)), BOUNDS, 4)
        assert np.array_equal(codec.host(decoded), current.view(np.uint8))


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_decode_on_the_device_refuses_damage(damage):
    with pytest.raises(DamagedStream) as refusal:
        ffi.FfiCodec().decode(damage.encoded, jnp.array(damage.base), damage.bounds, damage.word_bytes)
    assert damage.says in str(refusal.value)


def test_an_array_on_several_devices_is_refused():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    sharded = jax.device_put(jnp.zeros(64), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    with pytest.raises(ValueError, match="2 devices"):
        ffi.FfiCodec().encode(sharded, sharded, np.array([0, 64], np.uint64), 4)


def test_an_array_on_a_device_that_is_not_the_first_is_encoded_there():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    device = jax.devices()[1]
    current, base = jax.device_put(floats(1), device), jax.device_put(floats(), device)
    _, new_base = ffi.FfiCodec().encode(current, base, BOUNDS, 4)
    assert new_base.device == device


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"bounds": (3,)}, "bounds must be uint32"),
        ({"base": (4999,)}, "base has shape"),
        ({"rows": (2, 4)}, r"rows must be uint32 of shape \(2, 5\)"),
        ({"head": (22, 2)}, "head must be uint32"),
        ({"payload": (19_999,)}, r"payload must be uint8 of shape \(20000\)"),
    ],
)
def test_a_handler_names_the_operand_that_does_not_fit(shapes, says):
    ffi.available()
    want = {
        "current": (5000,),
        "base": (5000,),
        "bounds": (3, 2),
        "rows": (2, 5),
        "head": (23, 2),
        "payload": (20_000,),
    } | shapes
    bounds = jnp.zeros(6, jnp.uint32).at[2].set(3000).at[4].set(5000)[: np.prod(want["bounds"])].reshape(want["bounds"])
    results = (
        jax.ShapeDtypeStruct(want["base"], jnp.float32),
        jax.ShapeDtypeStruct(want["rows"], jnp.uint32),
        jax.ShapeDtypeStruct(want["head"], jnp.uint32),
        jax.ShapeDtypeStruct(want["payload"], jnp.uint8),
    )
    call = jax.ffi.ffi_call("deltacheck_encode", results, input_output_aliases={1: 0})
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=says):
        jax.block_until_ready(
            jax.jit(lambda c, b, e: call(c, b, e, word_bytes=np.int64(4)))(
                jnp.zeros(want["current"]), jnp.zeros(want["base"]), bounds
            )
        )


def test_an_empty_array_has_no_rows():
    encoded, base = ffi.FfiCodec().encode(jnp.zeros((0, 4)), jnp.zeros((0, 4)), np.zeros(1, np.uint64), 4)
    assert encoded.rows.shape == (0, 5)
    assert base.shape == (0, 4)
    assert isinstance(encoded, Encoded)


# --- statistics ------------------------------------------------------------------------------------------------------------------


def moved_a_little(dtype, seed=0, shape=(50, 100)):
    """(current, base): a third of the elements moved; infinities, NaNs and zeros of both signs among them."""
    random = np.random.default_rng(seed)
    base = random.standard_normal(shape).astype(np.float32)
    current = np.where(random.random(shape) < 0.3, base * np.float32(1.01), base)
    base[0, :3], current[0, :3] = (0.0, 1.0, np.inf), (-0.0, np.nan, 2.0)
    with np.errstate(invalid="ignore"):
        return jnp.array(current).astype(dtype), jnp.array(base).astype(dtype)


def told_by_the_host(current, base, bounds=None):
    whole = np.array([0, current.size], np.uint64) if bounds is None else bounds
    return host_statistics(np.asarray(current), np.asarray(base), whole, current.dtype.name)


def assert_same_statistics(found, expected):
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert np.array_equal(one, other)
    for one, other in zip(found[2:], expected[2:], strict=True):
        assert np.array_equal(one, other.astype(one.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("bounds", [None, BOUNDS])
@pytest.mark.parametrize("traced", [False, True])
def test_statistics_are_the_hosts_rounded_to_what_jax_knows(dtype, bounds, traced):
    current, base = moved_a_little(dtype)
    measure = partial(ffi.statistics, bounds=bounds)
    found = (jax.jit(measure) if traced else measure)(current, base)
    assert found.squared_base.dtype == jnp.float32
    expected = told_by_the_host(current, base, bounds)
    assert expected.changed.sum() > 0
    assert_same_statistics(found, expected)


def test_statistics_are_float64_where_jax_knows_it():
    with jax.enable_x64(True):
        current, base = moved_a_little("float64")
        found = jax.jit(ffi.statistics)(current, base)
        assert found.squared_difference.dtype == jnp.float64
        assert_same_statistics(found, told_by_the_host(current, base))


def test_statistics_of_a_sharded_array_are_rows_of_its_parts_and_nothing_is_gathered():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    rows = jax.sharding.PartitionSpec("x")
    current, base = (jax.device_put(a, jax.sharding.NamedSharding(mesh, rows)) for a in moved_a_little("bfloat16"))
    bounds = np.array([0, 1000, 2500], np.uint64)  # of each part
    measure = jax.jit(
        jax.shard_map(
            lambda c, b: ffi.statistics(c, b, bounds), mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False
        )
    )
    found = measure(current, base)
    assert found.changed.shape == (4,)
    assert len(found.changed.sharding.device_set) == 2
    assert_same_statistics(found, told_by_the_host(current, base, np.array([0, 1000, 2500, 3500, 5000], np.uint64)))
    assert "all-gather" not in measure.lower(current, base).compile().as_text()


def test_what_statistics_cannot_take_is_refused_by_name():
    with pytest.raises(ValueError, match="base is float32"):
        ffi.statistics(jnp.zeros(4), jnp.zeros(5))
    with pytest.raises(ValueError, match="current is int4"):
        ffi.statistics(jnp.zeros(4, "int4"), jnp.zeros(4, "int4"))
    with pytest.raises(ValueError, match="bounds end at 3 words"):
        jax.jit(lambda c, b: ffi.statistics(c, b, np.array([0, 3], np.uint64)))(jnp.zeros(4), jnp.zeros(4))


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"bounds": (2,)}, "bounds must be uint32"),
        ({"base": (4,)}, "base has shape"),
        ({"counts": (2, 2)}, r"counts must be uint32 of shape \(1, 2\)"),
        ({"values": (1, 2)}, r"values must be float32 of shape \(1, 3\)"),
    ],
)
def test_the_statistics_handler_names_the_operand_that_does_not_fit(shapes, says):
    ffi.available()
    want = {"base": (5,), "bounds": (2, 2), "counts": (1, 2), "values": (1, 3)} | shapes
    bounds = jnp.array([0, 0, 5, 0], jnp.uint32)[: np.prod(want["bounds"])].reshape(want["bounds"])
    results = (jax.ShapeDtypeStruct(want["counts"], jnp.uint32), jax.ShapeDtypeStruct(want["values"], jnp.float32))
    call = jax.ffi.ffi_call("deltacheck_statistics", results)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=says):
        jax.block_until_ready(jax.jit(call)(jnp.zeros(5), jnp.zeros(want["base"]), bounds))
