"""What a cast of surgery loses, against every value of the small types."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep.dtypes import TABLE, can_cast, lookup
from shardkeep.surgery.fitting import unfit

SMALL = [row for row in TABLE.values() if row.numpy and row.itemsize <= 2]
PAIRS = [(a, b) for a in SMALL for b in TABLE.values() if a != b and can_cast(a, b, True)]
NAN, INF = float("nan"), float("inf")


def bits_of(values, dtype):
    array = np.array(values)
    with np.errstate(all="ignore"):
        return array.astype(lookup(dtype).to_numpy()).view(lookup(dtype).bits())


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda row: row.name)
def test_every_value_of_small_types(source, target):
    """One by one, by what the cast makes of it; and the same among others."""
    every = np.arange(256**source.itemsize, dtype=source.bits())
    with np.errstate(all="ignore"):
        if source.kind == "int":
            wide = every.view(source.to_numpy()).astype(np.int64)
            ends = ml_dtypes.iinfo(target.to_numpy())
            kept = (wide >= int(ends.min)) & (wide <= int(ends.max))
        else:
            wide = every.view(source.to_numpy()).astype(np.float64)
            made = wide.astype(target.to_numpy()).astype(np.float64)
            kept = (np.isfinite(made) == np.isfinite(wide)) & (np.isnan(made) == np.isnan(wide))
            kept &= np.isnan(wide) | (np.signbit(made) == np.signbit(wide)) | (abs(made) < np.inf)
            if not np.isnan(np.float64(NAN).astype(target.to_numpy()).astype(np.float64)):
                kept &= abs(wide) <= float(ml_dtypes.finfo(target.to_numpy()).max)
    step = 1 if source.itemsize == 1 else 97
    for code in range(0, len(every), step):
        assert bool(unfit(every[code : code + 1], source, target)) != bool(kept[code]), wide[code]
    assert unfit(every[kept], source, target) == ""
    assert bool(unfit(every, source, target)) != bool(kept.all())
    assert unfit(every[:0], source, target) == ""


@pytest.mark.parametrize(
    ("source", "target", "values", "odd"),
    [
        ("int64", "int8", [1, 300, -129], "-129"),
        ("int64", "int8", [1, 300], "300"),
        ("int64", "int32", [2**40], "1099511627776"),
        ("uint64", "int64", np.array([2**63], np.uint64), "9223372036854775808"),
        ("int64", "uint64", [-1], "-1"),
        ("int64", "int4", [-8, 7], ""),
        ("int64", "int4", [8], "8"),
        ("float64", "float16", [1, 1e30], "1e+30"),
        ("float64", "float16", [65504, -65519, NAN, INF, -INF], ""),
        ("float64", "float16", [NAN, INF, 65520], "65520"),
        ("float64", "float32", [1e-300, 3.4e38], ""),
        ("float64", "float32", [-1e39], "-1e+39"),
        ("float32", "bfloat16", [3.39e38, -0.0], ""),
        ("float32", "bfloat16", [3.4e38], "3.4e+38"),
        ("bfloat16", "float16", [1e5], "99840"),
        ("float32", "float8_e4m3fn", [448, 464, NAN], ""),
        ("float32", "float8_e4m3fn", [-500], "-500"),
        ("float32", "float8_e4m3fn", [1, -INF], "-inf"),
        ("float32", "float8_e4m3fn", [NAN, INF, 1], "inf"),
        ("float32", "float8_e4m3fn", [NAN, NAN, -500, INF], "inf"),
        ("float64", "float8_e5m2fnuz", [NAN, 1, -INF], "-inf"),
        ("bfloat16", "float8_e8m0fnu", [1, INF], "inf"),
        ("float8_e5m2", "float8_e8m0fnu", [1, -INF], "-inf"),
        ("float8_e4m3", "float8_e4m3fn", [240, NAN], ""),
        ("float8_e4m3", "float8_e4m3fn", [240, INF], "inf"),
        ("float32", "float4_e2m1fn", [1, -INF], "-inf"),
        ("float32", "bfloat16", [NAN, INF, -INF], ""),
        ("float32", "float8_e5m2", [NAN, INF, -INF], ""),
        ("bfloat16", "float16", [NAN, INF, -INF, 1], ""),
        ("bfloat16", "float16", [NAN, INF, -INF, 1e5], "99840"),
        ("complex128", "complex64", [complex(NAN, -INF), complex(INF, 1)], ""),
        ("float32", "float8_e5m2", [60000], ""),
        ("float32", "float8_e5m2", [62000], "62000"),
        ("float32", "float8_e8m0fnu", [1, 3, 1e38], ""),
        ("float32", "float8_e8m0fnu", [1, 0], "0"),
        ("float32", "float8_e8m0fnu", [-2], "-2"),
        ("float32", "float4_e2m1fn", [6, -6], ""),
        ("float32", "float4_e2m1fn", [7], "7"),
        ("float32", "float4_e2m1fn", [1, NAN], "nan"),
        ("complex128", "complex64", [1 + 2j, 1e300j], "1e+300"),
        ("complex64", "complex128", [1e30j], ""),
        ("float16", "float32", [65504], ""),
    ],
)
def test_what_does_not_fit(source, target, values, odd):
    bits = bits_of(values, source)
    assert unfit(bits, lookup(source), lookup(target)) == odd
    assert unfit(np.repeat(bits, 2)[::2], lookup(source), lookup(target)) == odd  # strided


def test_a_nan_that_signals_is_one():
    """Computing with it gives a warning otherwise."""
    bits = np.array([0x7F800001, 0x3F800000], np.uint32)
    for target in ("float16", "bfloat16", "float8_e4m3fn"):
        assert unfit(bits, lookup("float32"), lookup(target)) == ""
    assert unfit(bits, lookup("float32"), lookup("float4_e2m1fn")) == "nan"


@given(st.lists(st.floats(width=32), max_size=9), st.sampled_from(["float16", "bfloat16"]))
def test_floats_fit_where_torch_keeps_them_finite(values, target):
    given_values = torch.tensor(values, dtype=torch.float32)
    lost = given_values.isfinite() & ~given_values.to(getattr(torch, target)).isfinite()
    found = unfit(given_values.numpy().view(np.uint32), lookup("float32"), lookup(target))
    assert bool(found) == bool(lost.any())


@pytest.mark.parametrize("to", ["native", "hf", "torch-dcp", "torch-save", "mindspore"])
@pytest.mark.parametrize(
    ("array", "cast", "said"),
    [
        (np.array([5, 300]), "i64=i8", "m.w holds 300, .* from int64 to int8"),
        (np.array([2**40]), "i64=i32", "m.w holds 1099511627776"),
        (np.array([2**63], np.uint64), "u64=i64", "m.w holds 9223372036854775808"),
        (np.array([[1.0, 1e30]]), "f64=f16", "m.w holds 1e.30, .* from float64 to float16"),
    ],
)
def test_a_convert_that_would_lose_elements_leaves_nothing(tmp_path, to, array, cast, said):
    state = {"m": {"w": array, "rest": np.ones((300, 300), array.dtype)}}
    shardkeep.save(state, tmp_path / "a", no_dist=True)
    with pytest.raises(shardkeep.UnsupportedValueError, match=said):
        shardkeep.convert(tmp_path / "a", tmp_path / "b", to=to, cast=[cast])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    shardkeep.convert(tmp_path / "a", tmp_path / "b", to=to, cast=[f"*.rest:{cast}"])
    with shardkeep.open(tmp_path / "b") as made:
        np.testing.assert_array_equal(made["m.w"].numpy(), array)
        assert (made["m.rest"].numpy() == 1).all()


@pytest.mark.parametrize("to", ["native", "hf", "torch-dcp", "torch-save"])
def test_a_mask_of_infinities_does_not_become_nan(tmp_path, to):
    mask = torch.full((300, 300), -INF).triu(1)
    shardkeep.save({"mask": mask, "w": torch.ones(3)}, tmp_path / "a", no_dist=True)
    with pytest.raises(shardkeep.UnsupportedValueError, match=r"mask holds -inf, .* float8_e4m3fn"):
        shardkeep.convert(tmp_path / "a", tmp_path / "b", to=to, cast=["f32=float8_e4m3fn"])
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    for target in ("f16", "bf16", "float8_e5m2"):
        shardkeep.convert(tmp_path / "a", tmp_path / target, to=to, cast=[f"f32={target}"])
        with shardkeep.open(tmp_path / target) as made:
            np.testing.assert_array_equal(made["mask"].numpy().astype("f4"), mask.numpy())
