"""What a snapshot takes by address, and what it must look at more closely."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep.adapters.torch_tensors import ADAPTER
from shardkeep.engine.moves import Mover
from shardkeep.memory import address_of


def odd_tensors():
    base = torch.randn(6, 8, 4, 4)
    shrunk = torch.randn(100)
    return {
        "plain": torch.randn(3, 5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "view": torch.randn(40)[7:19],
        "rows": torch.randn(8, 4)[2:5],
        "column": torch.randn(8, 4)[:, 1],
        "transposed": torch.randn(5, 7).T,
        "expanded": torch.randn(1, 4).expand(3, 4),
        "channels_last": base.to(memory_format=torch.channels_last),
        "conjugate": torch.randn(5, dtype=torch.cfloat).conj(),
        "negative": torch.randn(5, dtype=torch.cfloat).conj().imag,
        "half": torch.randn(9).half(),
        "bfloat16": torch.randn(9).bfloat16(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "bool": torch.rand(11) > 0.5,
        "int64": torch.arange(11),
        "complex": torch.randn(3, dtype=torch.cdouble),
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "tied": shrunk,
        "tied too": shrunk,
        "overlapping": shrunk[10:20],
    }


def odd_arrays():
    rng = np.random.default_rng(0)
    return {
        "plain": rng.random((3, 5)),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3)),
        "fortran": np.asfortranarray(rng.random((4, 6))),
        "backwards": rng.random(9)[::-1],
        "big": rng.random(9).astype(">f8"),
        "bool": rng.random(9) > 0.5,
        "broadcast": np.broadcast_to(rng.random(4), (3, 4)),
        "int16": np.arange(7, dtype=np.int16),
    }


@pytest.mark.parametrize("make", [odd_tensors, odd_arrays])
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_a_snapshot_stores_what_a_save_stores(tmp_path, make, writer):
    state = make()
    shardkeep.save(state, tmp_path / "now")
    with shardkeep.Checkpointer(writer=writer) as keeper:
        handle = keeper.async_save(state, tmp_path / "behind")
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.stride() and 0 not in value.stride():
                value.data.zero_()
            elif isinstance(value, np.ndarray) and value.flags.writeable:
                value[...] = 0
        handle.result(60)
    one, two = shardkeep.open(tmp_path / "now"), shardkeep.open(tmp_path / "behind")
    for name in state:
        assert one[name][...].tobytes() == two[name][...].tobytes(), name
    assert shardkeep.verify(tmp_path / "behind").ok


def test_only_what_lies_as_it_is_stored_has_an_address():
    tensors = odd_tensors()
    shrunk = torch.randn(100)
    shrunk.untyped_storage().resize_(16)
    tensors["shrunk"] = shrunk
    sizes = [tensor.nbytes for tensor in tensors.values()]
    found = dict(zip(tensors, ADAPTER.host_addresses(list(tensors.values()), sizes), strict=True))
    others = {
        "column",
        "transposed",
        "expanded",
        "channels_last",
        "conjugate",
        "negative",
        "shrunk",
    }
    assert {name for name, address in found.items() if not address} == {*others, "empty"}
    assert all(address in (0, tensors[name].data_ptr()) for name, address in found.items())


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 64),
)
def test_runs_of_memory_come_to_their_places_part_by_part(runs, unit):
    rng = np.random.default_rng(1)
    sources = [rng.integers(1, 255, length, np.uint8) for _, length in runs]
    start, at = [], 0
    for (gap, length), _ in zip(runs, sources, strict=True):
        start.append(at + gap)
        at += gap + length
    expected = np.zeros(at, np.uint8)
    for begin, source in zip(start, sources, strict=True):
        expected[begin : begin + len(source)] = source
    mover = Mover(
        np.array(start),
        np.array([len(source) for source in sources]),
        np.array([address_of(source) for source in sources], np.uint64),
    )
    found = np.zeros(at, np.uint8)
    for low in range(0, at, unit):
        high = min(low + unit, at)
        mover.fill(low, high, found[low:high])
    np.testing.assert_array_equal(found, expected)
