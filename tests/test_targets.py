"""Arrays of a target that look alike: each is filled, and each is refused, as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shardkeep
from shardkeep import MismatchError
from shardkeep.arrays import FlatSink, HostSink
from shardkeep.dtypes import lookup
from shardkeep.errors import UnsupportedValueError

COUNT = 5


def stored(path, make, **more):
    """Save arrays of one form, every one with contents of its own; their names."""
    state = {f"w{n}": make(n) for n in range(COUNT)}
    shardkeep.save({**state, **more}, path)
    return list(state)


def tensors(fill=None):
    return {f"w{n}": torch.full((4, 3), float(n if fill is None else fill)) for n in range(COUNT)}


def assert_filled(target):
    for n in range(COUNT):
        assert np.asarray(target[f"w{n}"]).tolist() == np.full((4, 3), float(n)).tolist()


@pytest.fixture
def saved(tmp_path):
    shardkeep.save(tensors(), tmp_path / "ckpt")
    return tmp_path / "ckpt"


def channels(n):
    made = torch.full((2, 3, 4, 5), float(n)).to(memory_format=torch.channels_last)
    made[0, 0, 0, 1] = -1
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.full((4, 3), float(n)),
        lambda n: torch.full((4, 3), float(n)).T,
        lambda n: torch.full((), float(n), dtype=torch.bfloat16),
        lambda n: torch.full((3,), complex(n, 1)),
        lambda n: torch.full((12,), float(n))[n : n + 4],
        channels,
        lambda n: np.full((4, 3), float(n)),
        lambda n: np.full((4, 3), n, ">i4"),
        lambda n: np.full((4, 3), float(n))[::-1, ::2],
        lambda n: np.array(n, np.float32),
        lambda n: np.full((0, 3), n),
    ],
    ids=[
        "torch",
        "transposed",
        "scalar",
        "complex",
        "parts of storages",
        "channels last",
        "numpy",
        "big endian",
        "flipped and stepped",
        "numpy scalar",
        "empty",
    ],
)
def test_each_of_many_alike_gets_its_own(tmp_path, make):
    names = stored(tmp_path, make)
    target = {name: make(COUNT + 1) for name in names}
    kept = dict(target)
    shardkeep.load(target, tmp_path)
    for n, name in enumerate(names):
        assert target[name] is kept[name]
        assert target[name].tolist() == make(n).tolist()


def test_what_surrounds_parts_of_one_memory_stays(saved):
    """Targets of one form that lie between each other and share nothing."""
    memory = torch.full((4, 3 * (COUNT + 1)), -1.0)
    target = {f"w{n}": memory[:, n :: COUNT + 1] for n in range(COUNT)}
    shardkeep.load(target, saved)
    assert_filled(target)
    assert (memory[:, COUNT :: COUNT + 1] == -1).all()


def test_casts_of_many_alike(saved):
    target = {f"w{n}": torch.zeros(4, 3, dtype=torch.float64) for n in range(COUNT)}
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(target, saved)
    assert len(caught.value.mismatched) == COUNT
    assert shardkeep.load(target, saved, cast=True).missing == ()
    assert_filled(target)


def test_only_one_of_many_alike_does_not_fit(tmp_path):
    """They look alike here, but what is stored under one name is another shape."""
    state = tensors()
    state["w3"] = torch.zeros(3, 4)
    state["w4"] = torch.zeros(12)
    shardkeep.save(state, tmp_path)
    target = tensors(-1)
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(target, tmp_path)
    assert caught.value.mismatched == {
        "w3": "stored shape (3, 4), target shape (4, 3)",
        "w4": "stored shape (12,), target shape (4, 3)",
    }
    assert (target["w0"] == -1).all()


def test_only_one_of_many_alike_is_stored_as_another_type(tmp_path):
    state = tensors()
    state["w2"] = state["w2"].to(torch.int32)
    shardkeep.save(state, tmp_path)
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(tensors(), tmp_path)
    assert caught.value.mismatched == {"w2": "stored dtype int32, target dtype float32"}


def test_what_is_not_stored_does_not_shift_what_is_allocated(tmp_path):
    shardkeep.save({"a": torch.zeros(2), **tensors()}, tmp_path)
    target = {f"w{n}": torch.empty(4, 3, device="meta") for n in range(COUNT)}
    target = {"a": torch.zeros(2), "other": torch.ones(1), **target}
    shardkeep.load(target, tmp_path, strict=False)
    assert_filled(target)
    assert len({target[f"w{n}"].data_ptr() for n in range(COUNT)}) == COUNT


@pytest.mark.parametrize("shrunk", range(COUNT))
def test_a_shrunk_storage_among_many_alike(saved, shrunk):
    target = tensors(-1)
    target[f"w{shrunk}"].untyped_storage().resize_(40)
    with pytest.raises(UnsupportedValueError, match=f"w{shrunk}: the tensor needs 48 bytes"):
        shardkeep.load(target, saved)
    assert (target[f"w{(shrunk + 1) % COUNT}"] == -1).all()


def test_a_storage_without_memory_among_many_alike(saved):
    target = tensors()
    target["w4"].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match=r"w4: .*its storage has 0"):
        shardkeep.load(target, saved)


def test_a_shrunk_storage_under_strides(saved):
    target = {f"w{n}": torch.zeros(3, 8).T[:4] for n in range(COUNT)}
    target["w2"].untyped_storage().resize_(4 * 19)
    with pytest.raises(UnsupportedValueError, match="w2: the tensor needs 80 bytes"):
        shardkeep.load(target, saved)


@pytest.mark.parametrize("at", [0, COUNT - 1])
def test_a_lazy_view_among_many_alike(saved, at):
    target = tensors()
    target[f"w{at}"] = torch._neg_view(target[f"w{at}"])
    with pytest.raises(UnsupportedValueError, match=f"w{at}: the target is a lazy"):
        shardkeep.load(target, saved)


def test_strides_that_overlap_among_many_of_one_shape(saved):
    target = {f"w{n}": torch.zeros(3, 4).T for n in range(COUNT)}
    target["w2"] = torch.zeros(9).as_strided((4, 3), (1, 2))
    with pytest.raises(UnsupportedValueError, match="w2: elements of the target share memory"):
        shardkeep.load(target, saved)


def test_a_read_only_array_among_many_alike(saved):
    target = {f"w{n}": np.zeros((4, 3), np.float32) for n in range(COUNT)}
    target["w3"].flags.writeable = False
    with pytest.raises(UnsupportedValueError, match="w3: the target array is read-only"):
        shardkeep.load(target, saved)
    target["w3"] = np.zeros((4, 3), np.float32)
    shardkeep.load(target, saved)
    assert_filled(target)


def test_ties_among_many_alike(saved, tmp_path):
    """Three names of one memory: refused where one of them is stored with other contents."""
    target = tensors()
    target["w1"] = target["w3"] = target["w4"]
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(target, saved)
    assert set(caught.value.mismatched) == {"w3", "w4"}
    assert "shares memory with w1" in caught.value.mismatched["w4"]
    state = tensors()
    state["w1"] = state["w3"] = state["w4"].clone()
    shardkeep.save(state, tmp_path / "tied")
    shardkeep.load(target, tmp_path / "tied")
    assert [target[f"w{n}"][0, 0].item() for n in range(COUNT)] == [0, 4, 2, 4, 4]


def test_memory_shared_by_libraries(saved):
    memory = np.zeros((4, 3), np.float32)
    target = {**tensors(), "w1": memory, "w3": torch.from_numpy(memory)}
    with pytest.raises(MismatchError, match="w3: shares memory with w1"):
        shardkeep.load(target, saved)


def test_memory_that_is_shared_in_part(saved):
    memory = torch.zeros(7, 3)
    target = {**tensors(), "w0": memory[3:], "w4": memory[:4]}
    with pytest.raises(MismatchError, match="w0: shares memory with w4"):
        shardkeep.load(target, saved)
    memory = torch.zeros(8, 3)
    target = {**tensors(), "w0": memory[4:], "w4": memory[:4]}
    shardkeep.load(target, saved)
    assert_filled(target)


def test_arrays_of_several_libraries_in_turn(saved):
    target = {
        f"w{n}": torch.zeros(4, 3) if n % 2 else np.zeros((4, 3), np.float32) for n in range(COUNT)
    }
    shardkeep.load(target, saved)
    assert_filled(target)


def test_abstract_targets_among_others(saved):
    target = {f"w{n}": torch.empty(4, 3, device="meta" if n % 2 else "cpu") for n in range(COUNT)}
    shardkeep.load(target, saved)
    assert_filled(target)
    assert all(one.device.type == "cpu" for one in target.values())


def test_empty_containers_between_abstract_targets(tmp_path):
    """They have no leaves, also where they are the last of all."""

    def build(device):
        made = [torch.full((2,), float(n), device=device) for n in range(3)]
        return {"a": {"x": made[0], "none": {}}, "b": {}, "c": {"x": made[1], "y": made[2]}}

    def last(device):
        return {"c": {"x": torch.ones(2, device=device), "none": {}}}

    for number, make in enumerate((build, last)):
        shardkeep.save(make("cpu"), tmp_path / str(number))
        target = make("meta")
        shardkeep.load(target, tmp_path / str(number))
        assert str(target) == str(make("cpu"))


def test_one_nesting_with_other_keys(tmp_path):
    """1 and True are equal keys for Python, but not the same names."""
    state = {"a": {1: torch.ones(2)}, "b": {1: torch.zeros(2)}}
    shardkeep.save(state, tmp_path)
    with pytest.raises(MismatchError) as caught:
        shardkeep.load({"a": {True: torch.ones(2)}, "b": {1: torch.ones(2)}}, tmp_path)
    assert caught.value.missing == ("a.True",)
    assert caught.value.unexpected == ("a.1",)


class Recorded(shardkeep.DefaultLoadPlanner):
    """Puts everything through a sink of its own, by way of the public hook."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def resolve_tensor(self, read_item):
        self.asked.append(read_item.dest_index.fqn)
        return Doubled(super().resolve_tensor(read_item))


class Doubled:
    def __init__(self, sink):
        self.sink = sink

    def put(self, offsets, block, dtype):
        self.sink.put(offsets, (block.view(np.float32) * 2).view(block.dtype), dtype)


def test_a_planner_may_have_its_own_sinks(saved):
    target, planner = tensors(-1), Recorded()
    shardkeep.load(target, saved, planner=planner)
    assert sorted(planner.asked) == sorted(target)
    assert [target[f"w{n}"][0, 0].item() for n in range(COUNT)] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex128", "bool", "float8_e4m3fn"])
def test_bytes_take_elements_as_an_array_does(name):
    dtype = lookup(name)
    rng = np.random.default_rng(0)
    block = rng.integers(0, 2, (2, 3 * dtype.itemsize), np.uint8).view(dtype.bits())
    flat = FlatSink(np.zeros(20 * dtype.itemsize, np.uint8), (4, 5), dtype)
    array = HostSink(np.zeros((4, 5), dtype.bits()), dtype)
    flat.put((1, 2), block, dtype)
    array.put((1, 2), block, dtype)
    assert flat.bytes.tobytes() == array.array.tobytes()


def test_no_tensor_is_pinned_to_its_size(saved):
    """A load leaves nothing behind that keeps a tensor from being resized."""
    target = tensors()
    shardkeep.load(target, saved)
    for tensor in target.values():
        tensor.resize_(100)


def test_a_planner_may_have_sinks_of_its_own(tmp_path):
    """None of its targets is then filled by anything but these."""
    shardkeep.save({"a": np.arange(10.0), "b": np.arange(1000.0)}, tmp_path)
    asked = []

    class Planner(shardkeep.DefaultLoadPlanner):
        def sinks(self, items):
            inner = super().sinks(items)

            def sink(number):
                asked.append(number)
                return inner(number)

            return sink

    target = {"a": np.zeros(10), "b": np.zeros(1000)}
    shardkeep.load(target, tmp_path, planner=Planner())
    assert set(asked) == {0, 1}
    assert np.array_equal(target["b"], np.arange(1000.0))


def test_a_zero_tensor_is_refused_by_name(tmp_path):
    """It has no memory to fill, whatever is like it."""
    shardkeep.save({"a": torch.ones(8), "b": torch.ones(8)}, tmp_path)
    zero = torch._efficientzerotensor((8,))
    for target in ({"a": torch.zeros(8), "b": zero}, {"a": zero, "b": torch.zeros(8)}):
        with pytest.raises(UnsupportedValueError, match="zero tensor"):
            shardkeep.load(target, tmp_path)
    with pytest.raises(UnsupportedValueError, match="zero tensor"):
        shardkeep.save({"a": zero}, tmp_path / "x")
