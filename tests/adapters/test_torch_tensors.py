"""torch tensors: every dtype, every memory layout, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import shardkeep
from shardkeep import UnsupportedValueError
from shardkeep.adapters import torch_devices
from shardkeep.adapters.torch_devices import DeviceSink, DeviceSource, PinnedStaging
from shardkeep.adapters.torch_tensors import TorchTensors
from shardkeep.arrays import HostSink, SmallPart
from shardkeep.dtypes import TABLE, lookup

DTYPES = [row for row in TABLE.values() if row.torch]


def random_tensor(row, shape):
    count = int(np.prod(shape)) * row.itemsize
    raw = np.random.default_rng(0).integers(0, 256, count, np.uint8)
    if row.name == "bool":
        raw &= 1
    kind = getattr(torch, row.torch)
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.from_numpy(raw).view(kind).reshape(shape)


def bits(tensor):
    if not tensor.numel():
        return b""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("row", DTYPES, ids=lambda row: row.name)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 3, 2, 5)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, row, shape):
    tensor = random_tensor(row, shape)
    shardkeep.save({"x": tensor}, tmp_path)
    target = torch.zeros(shape, dtype=torch.uint8 if row.itemsize == 1 else tensor.dtype)
    target = target.view(tensor.dtype) if row.itemsize == 1 else target
    shardkeep.load({"x": target}, tmp_path)
    assert bits(target) == bits(tensor)
    view = shardkeep.open(tmp_path)["x"]
    assert view.torch().dtype == tensor.dtype
    assert bits(view.torch()) == bits(tensor)
    out = shardkeep.open(tmp_path).state_dict(as_="torch")["x"]
    assert out.dtype == tensor.dtype
    assert out.shape == tensor.shape
    assert bits(out) == bits(tensor)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1:],
        lambda t: t.flip(0),
        lambda t: t[:, 0],
        lambda t: t.unfold(0, 2, 1),
        lambda t: t.as_strided((3, 3), (1, 2)),
    ],
    ids=["transposed", "stepped", "flipped", "column", "unfolded", "overlapping"],
)
def test_strided_sources(tmp_path, change):
    source = change(torch.arange(24.0).reshape(4, 6))
    shardkeep.save({"x": source}, tmp_path)
    target = torch.zeros(source.shape)
    shardkeep.load({"x": target}, tmp_path)
    assert torch.equal(target, source)


def test_strided_targets(tmp_path):
    source = torch.arange(24.0).reshape(4, 6)
    shardkeep.save({"x": source}, tmp_path)
    target = torch.zeros(6, 4).t()
    shardkeep.load({"x": target}, tmp_path)
    assert torch.equal(target, source)
    spread = torch.zeros(8, 12)
    shardkeep.load({"x": spread[::2, ::2]}, tmp_path)
    assert torch.equal(spread[::2, ::2], source)
    assert spread[1::2].sum() == 0


def test_a_small_view_of_a_large_storage_is_stored_small(tmp_path):
    result = shardkeep.save({"x": torch.zeros(1 << 20)[:2]}, tmp_path)
    assert result.nbytes == 8


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_lazy_conjugate_and_negative_are_resolved(tmp_path, view):
    base = torch.complex(torch.randn(40, 3), torch.randn(40, 3))
    lazy = base.conj() if view == "conj" else base.conj().imag
    assert lazy.is_conj() or lazy.is_neg()
    shardkeep.save({"x": lazy}, tmp_path)
    target = torch.zeros(lazy.shape, dtype=lazy.dtype)
    shardkeep.load({"x": target}, tmp_path)
    assert torch.equal(target, lazy)


def test_nan_payloads_survive(tmp_path):
    raw = np.array([0x7F800001, 0xFFC12345, 0x7FC00000], np.uint32)
    shardkeep.save({"x": torch.from_numpy(raw.view(np.float32))}, tmp_path)
    target = torch.zeros(3)
    shardkeep.load({"x": target}, tmp_path)
    assert target.numpy().view(np.uint32).tolist() == raw.tolist()


def test_parameters_and_properties(tmp_path):
    state = {
        "p": torch.nn.Parameter(torch.ones(2)),
        "c": torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }
    result = shardkeep.save(state, tmp_path)
    found = result.metadata.state_dict_metadata
    assert found["p"].properties.requires_grad
    assert found["c"].properties.memory_format == "channels_last"
    target = {"p": torch.nn.Parameter(torch.zeros(2)), "c": torch.zeros(1, 2, 3, 4)}
    shardkeep.load(target, tmp_path)
    assert target["p"].requires_grad
    assert torch.equal(target["c"], state["c"])


def test_modules_and_optimizers_are_stateful(tmp_path):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    shardkeep.save({"model": model, "optimizer": optimizer, "step": 1}, tmp_path)
    other, other_optimizer = make()
    step(other, other_optimizer)
    step(other, other_optimizer)
    shardkeep.load({"model": other, "optimizer": other_optimizer, "step": 0}, tmp_path)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    step(model, optimizer)
    step(other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


class Wrapper(torch.Tensor):
    """Two tensors and a flag behind one, as quantising libraries do it."""

    @staticmethod
    def __new__(cls, a, b, flag):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a, b, flag):
        self.a, self.b, self.flag = a, b, flag

    def __tensor_flatten__(self):
        return ["a", "b"], {"flag": self.flag}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapper(inner["a"], inner["b"], context["flag"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_wrapper_subclasses_are_stored_as_their_parts(tmp_path):
    shardkeep.save({"w": Wrapper(torch.ones(3), torch.arange(4), True), "x": 1}, tmp_path)
    assert sorted(shardkeep.open(tmp_path)) == ["w.__context__", "w.a", "w.b", "x"]
    target = Wrapper(torch.zeros(3), torch.zeros(4, dtype=torch.int64), True)
    state = {"w": target, "x": 0}
    shardkeep.load(state, tmp_path)
    assert state["w"] is target
    assert torch.equal(target.a, torch.ones(3))
    assert torch.equal(target.b, torch.arange(4))
    assert state["x"] == 1
    other = Wrapper(torch.zeros(3), torch.zeros(4, dtype=torch.int64), False)
    with pytest.raises(shardkeep.MismatchError, match="__context__"):
        shardkeep.load({"w": other, "x": 0}, tmp_path)
    assert not other.a.any()


class Plain(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(3).as_subclass(Plain), "Plain"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter"),
    ],
    ids=["sparse", "meta", "subclass", "uninitialized"],
)
def test_what_cannot_be_stored_is_refused_by_path(tmp_path, value, text):
    with pytest.raises(UnsupportedValueError, match=text) as caught:
        shardkeep.save({"deep": {"x": value}}, tmp_path / "c")
    assert "deep.x" in str(caught.value)
    with pytest.raises(shardkeep.CheckpointNotFoundError):
        shardkeep.open(tmp_path / "c")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors_are_refused(tmp_path):
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedValueError, match="quantised"):
        shardkeep.save({"x": quantised}, tmp_path)


def test_fake_tensors_are_refused(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    with pytest.raises(UnsupportedValueError, match="FakeTensor"):
        shardkeep.save({"x": fake}, tmp_path)


def test_tied_parameters_are_stored_once(tmp_path):
    linear = torch.nn.Linear(3, 3, bias=False)
    result = shardkeep.save({"a": linear.weight, "b": linear.weight}, tmp_path)
    assert result.nbytes == 36
    out = shardkeep.open(tmp_path).state_dict(as_="torch")
    assert out["a"] is out["b"]


def test_a_stride_zero_target_is_refused(tmp_path):
    shardkeep.save({"x": torch.ones(3, 4)}, tmp_path)
    with pytest.raises(UnsupportedValueError, match="share memory"):
        shardkeep.load({"x": torch.zeros(1, 4).expand(3, 4)}, tmp_path)
    with pytest.raises(UnsupportedValueError, match="share memory"):
        shardkeep.load({"x": torch.zeros(6).as_strided((3, 4), (1, 1))}, tmp_path)


def test_device_memory_without_dimensions():
    """Counters of optimizers on an accelerator; the copy is the same on the host."""
    from shardkeep.adapters.torch_tensors import DeviceSink
    from shardkeep.dtypes import lookup

    scalar = torch.zeros(())
    DeviceSink(scalar).put((), np.array(3, np.float32), lookup("float32"))
    assert scalar.item() == 3


@pytest.mark.parametrize("left", [0, 400])
def test_a_storage_that_was_shrunk_is_refused_by_name(tmp_path, left):
    tensor = torch.ones(1000)
    shardkeep.save({"w": torch.ones(1000)}, tmp_path / "whole")
    tensor.untyped_storage().resize_(left)
    with pytest.raises(UnsupportedValueError, match=f"w: the tensor needs 4000 .* has {left}"):
        shardkeep.save({"w": tensor}, tmp_path / "x")
    with pytest.raises(UnsupportedValueError, match="w: the tensor needs"):
        shardkeep.load({"w": tensor}, tmp_path / "whole")


# --- memory of devices, as far as that can be tried without one


class Unpinned(PinnedStaging):
    """Plain memory in the place of what a device's driver registers."""

    def _pinned(self, nbytes):
        return np.zeros(nbytes, np.uint8)


def test_buffers_are_kept_if_they_are_of_one_size_and_not_too_many(monkeypatch):
    monkeypatch.setattr(torch_devices, "MOST_KEPT", 20)
    staging = Unpinned()
    first, second, third = (staging.allocate(8) for _ in range(3))
    for buffer in (first, second, third):
        staging.release(buffer)
    assert staging.allocate(8) is second
    assert staging.allocate(8) is first
    assert staging.allocate(8) is not third
    staging.release(first)
    staging.release(np.zeros(4, np.uint8))
    assert len(staging.allocate(4)) == 4
    assert staging.allocate(8) is not first
    staging.release(first)
    assert staging.allocate(4) is not first


def test_small_sources_are_gathered_one_behind_the_other():
    lazy = torch.tensor([1 + 2j, 3 - 4j]).conj()
    plain = torch.arange(3, dtype=torch.int16)
    sources = [DeviceSource(lazy, lookup("complex64")), DeviceSource(plain, lookup("int16"))]
    out = np.zeros(22, np.uint8)
    Unpinned().begin_gather(sources, out)
    assert out[:16].view("c8").tolist() == [1 - 2j, 3 + 4j]
    assert out[16:].view("i2").tolist() == [0, 1, 2]


def test_what_can_be_duplicated_is_a_copy_of_its_own():
    tensor = torch.arange(6.0).reshape(2, 3).t()
    (copy,) = Unpinned().duplicate([DeviceSource(tensor, lookup("float32"))])
    tensor += 1
    assert copy.tensor.is_contiguous()
    assert copy.tensor.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_memory_of_the_host_has_room_beside_what_was_duplicated():
    source = DeviceSource(torch.ones(2, dtype=torch.complex64).conj(), lookup("complex64"))
    done = Unpinned().duplicate([source])
    (copy,) = Unpinned().duplicate([source], done)
    assert copy.tensor.tolist() == [1, 1]


def small_part(tensor, kind="float32"):
    sink = DeviceSink(tensor) if isinstance(tensor, torch.Tensor) else tensor
    return SmallPart(0, 4, sink, 8, lookup(kind), 0)


def test_parts_are_scattered_on_their_device_only():
    cpu, whole = torch.device("cpu"), torch.arange(6.0)
    parts = [small_part(whole)]
    assert Unpinned().begin_scatter(np.zeros(4, np.uint8), parts) is parts
    other = [small_part(HostSink(np.zeros(2, np.uint32), lookup("float32")))]
    assert Unpinned().begin_scatter(np.zeros(4, np.uint8), other) is other
    torch_devices._place(parts[0], cpu).copy_(torch.tensor([7.0]).view(torch.uint8))
    assert whole.tolist() == [0, 1, 7, 3, 4, 5]
    assert torch_devices._place(other[0], cpu) is None
    assert torch_devices._place(small_part(whole, "int32"), cpu) is None
    assert torch_devices._place(small_part(whole.reshape(2, 3).t()), cpu) is None
    assert torch_devices._place(small_part(whole), torch.device("meta")) is None


def test_blocks_go_to_memory_of_any_type():
    target = torch.zeros(2, 3, dtype=torch.float64)
    sink = DeviceSink(target)
    sink.put((0, 1), np.array([[1.5], [2.5]], "f4").view("u4"), lookup("float32"))
    sink.put((1, 0), np.array([[7.0]]).view("u8"), lookup("float64"))
    assert target.tolist() == [[0, 1.5, 0], [7, 2.5, 0]]


def test_elements_that_torch_lacks():
    with pytest.raises(UnsupportedValueError, match="torch has no dtype int4"):
        TorchTensors().from_numpy(np.zeros(2, np.uint8), lookup("int4"))


def test_what_is_seen_of_a_tensor_does_not_depend_on_those_beside_it():
    """A save looks at all tensors, and again at some of them when these are written."""
    plain = torch.ones(2, 3, 4, 5)
    tensors = [
        plain,
        plain.to(memory_format=torch.channels_last),
        plain.transpose(2, 3),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(0),
    ]
    together = TorchTensors().glances(tensors)
    assert together == [TorchTensors().glances([one])[0] for one in tensors]
    assert together[0] != together[1]


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_tensors_that_lie_in_other_ways_are_saved_again(tmp_path, snapshot):
    """Some are found by their address and some are not, each by itself or with others."""
    state = {
        "a": torch.randn(100, dtype=torch.complex64).conj(),
        "b": torch.randn(100, dtype=torch.complex64),
        "c": torch.randn(100, dtype=torch.complex64).conj(),
        "d": torch.randn(10, 10, dtype=torch.complex64).t(),
    }
    with shardkeep.Checkpointer() as keeper:
        for number in range(3):
            state["b"] += 1
            keeper.async_save(state, tmp_path / str(number), snapshot=snapshot).result(60)
            found = shardkeep.open(tmp_path / str(number)).state_dict()
            for name, tensor in state.items():
                assert np.array_equal(found[name], tensor.resolve_conj().numpy()), name
