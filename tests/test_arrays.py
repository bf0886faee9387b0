"""Sources: any range of any strided array, as its row-major bytes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkeep import arrays
from shardkeep.arrays import HostSink, HostSource
from shardkeep.dtypes import lookup


@settings(max_examples=200, deadline=None)
@given(data=st.data(), tile=st.sampled_from([2, 5, 64]))
def test_any_range_of_any_strides(data, tile):
    """Permuted, stepped, reversed and repeated; tiles of all sizes."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from(["u1", "<u2", ">u4", "<u8"]))
    array = np.arange(np.prod(shape), dtype=np.int64).astype(dtype).reshape(shape)
    array = array.transpose(data.draw(st.permutations(range(array.ndim))))
    steps = data.draw(st.lists(st.sampled_from([1, 1, 2, -1]), min_size=1, max_size=array.ndim))
    array = array[tuple(slice(None, None, step) for step in steps)]
    if data.draw(st.booleans()):
        array = np.broadcast_to(array, (3, *array.shape))
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    out = np.empty((stop - start) * array.itemsize, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "TILE", tile)
        HostSource(array).read_into(start, stop, out)
    expected = array.astype(array.dtype.newbyteorder("<")).tobytes()
    assert out.tobytes() == expected[start * array.itemsize : stop * array.itemsize]


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_large_transposed_arrays(order):
    array = np.arange(70 * 130 * 200, dtype=np.uint32).reshape(70, 130, 200).transpose(order)
    out = np.empty(array.nbytes - 8, np.uint8)
    HostSource(array).read_into(1, array.size - 1, out)
    assert out.tobytes() == array.tobytes()[4:-4]


@pytest.mark.parametrize("strided", [False, True])
def test_a_cast_half_way_takes_little_memory(strided):
    """Element types of 8 bits that know not each other meet as floats of 64."""
    stored, wanted = lookup("float8_e4m3fn"), lookup("float8_e8m0fnu")
    bits = np.random.default_rng(0).integers(0, 256, (1 << 11, 1 << 11), np.uint8)
    out = np.zeros((1 << 11, 1 << 12), np.uint8)[:, :: 1 + strided][:, : 1 << 11]
    tracemalloc.start()
    HostSink(out, wanted).put((0, 0), bits, stored)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with np.errstate(all="ignore"):
        expected = bits.view(stored.to_numpy()).astype(np.float64).astype(wanted.to_numpy())
    assert np.array_equal(out, expected.view(np.uint8))
    assert peak <= bits.nbytes
