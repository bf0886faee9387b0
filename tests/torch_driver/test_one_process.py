"""Torch's own `save` and `load` over the native format, in one process."""

from __future__ import annotations

import io
import os
import pickle
import random
import warnings
from collections import deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

import numpy as np
import pytest

import shardkeep
from shardkeep import CorruptionError, UnsupportedValueError, collector

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import filesystem  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.default_planner import (  # noqa: E402
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.planner import SavePlanner  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import (  # noqa: E402
    _load_state_dict_from_keys,
)

import shardkeep.torch as bridge  # noqa: E402
from shardkeep.torch.objects import _build_tensor  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is unavailable or uninitialized:UserWarning"
)

Point = namedtuple("Point", "x y")


class Colour(Enum):
    RED = "red"


def state():
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "model": {
            "weight": numbers(33, 17),
            "half": numbers(5, dtype=torch.bfloat16),
            "transposed": numbers(8, 6).t(),
            "scalar": torch.tensor(7),
            "nothing": torch.zeros(0, 4),
            "flags": torch.tensor([True, False]),
            "lazy": torch.view_as_complex(numbers(4, 2)).conj(),
        },
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"params": [0, 1]}],
        "list": [numbers(3), [numbers(2)]],
        "step": 12,
        "name": "run é",
        "none": None,
    }


def zeros(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: zeros(item) for key, item in value.items()}
    if isinstance(value, list):
        return [zeros(item) for item in value]
    return None if not isinstance(value, (int, float)) else 0


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def save(content, path, **options):
    return dcp.save(content, storage_writer=bridge.StorageWriter(path), **options)


def load(target, path, **options):
    dcp.load(target, storage_reader=bridge.StorageReader(path), **options)
    return target


def cause(caught):
    """The error of the one rank there is."""
    (failure,) = caught.value.failures.values()
    return failure[0]


@pytest.mark.parametrize("single_file_per_rank", [True, False])
@pytest.mark.parametrize("thread_count", [1, 4])
def test_what_is_saved_is_loaded(tmp_path, single_file_per_rank, thread_count):
    path = tmp_path / "a"
    writer = bridge.FileSystemWriter(
        path,
        single_file_per_rank=single_file_per_rank,
        sync_files=False,
        thread_count=thread_count,
        per_thread_copy_ahead=1,
        cache_staged_state_dict=True,
    )
    dcp.save(state(), storage_writer=writer)
    assert_same(load(zeros(state()), path), state())


def test_it_is_an_ordinary_checkpoint(tmp_path):
    save(state(), tmp_path)
    with shardkeep.open(tmp_path) as opened:
        assert_same(opened.state_dict(as_="torch"), {**state()})
        assert opened.verify().ok
    target = zeros(state())
    shardkeep.load(target, tmp_path)
    assert_same(target, state())


def test_torch_loads_what_we_saved(tmp_path):
    shardkeep.save(state(), tmp_path)
    assert_same(load(zeros(state()), tmp_path), state())
    assert_same(_load_state_dict_from_keys(storage_reader=bridge.StorageReader(tmp_path)), state())


def test_ties_that_we_stored_once(tmp_path):
    weight = torch.arange(6.0)
    shardkeep.save({"a": weight, "b": weight}, tmp_path)
    assert_same(load({"a": torch.zeros(6), "b": torch.zeros(6)}, tmp_path)["b"], weight)


def test_a_part(tmp_path):
    save(state(), tmp_path)
    target = {"model": {"half": torch.zeros(5, dtype=torch.bfloat16)}}
    assert_same(load(target, tmp_path)["model"]["half"], state()["model"]["half"])
    found = _load_state_dict_from_keys("model", storage_reader=bridge.StorageReader(tmp_path))
    assert_same(found, {"model": state()["model"]})


def test_what_is_missing(tmp_path):
    save({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: b"):
        load({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path)
    partial = DefaultLoadPlanner(allow_partial_load=True)
    target = load({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path, planner=partial)
    assert_same(target, {"a": torch.ones(2), "b": torch.zeros(2)})
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"a": torch.zeros(3)}, tmp_path)


def test_it_casts_as_torch_does(tmp_path):
    stored = torch.randn(50, 30)
    save({"a": stored}, tmp_path)
    target = torch.zeros(30, 50, dtype=torch.bfloat16).t()
    load({"a": target}, tmp_path)
    assert torch.equal(target, stored.to(torch.bfloat16))


def test_strided_targets_and_views(tmp_path):
    stored = torch.randn(40, 20)
    save({"a": stored, "b": stored[0]}, tmp_path)
    room = torch.zeros(40, 60)
    load({"a": room[:, 10:30], "b": room[3, 31:51]}, tmp_path)
    assert torch.equal(room[:, 10:30], stored)
    assert torch.equal(room[3, 31:51], stored[0])
    assert room[:, :10].count_nonzero() == 0


def test_parameters_that_gather_gradients(tmp_path):
    model = torch.nn.Linear(3, 4)
    save({"m": model.state_dict(keep_vars=True)}, tmp_path)
    other = torch.nn.Linear(3, 4)
    load({"m": other.state_dict(keep_vars=True)}, tmp_path)
    assert torch.equal(model.weight, other.weight)


def test_targets_that_share_memory(tmp_path):
    weight = torch.arange(12.0).reshape(3, 4)
    save({"a": weight, "b": weight.clone(), "c": weight + 1}, tmp_path)
    room = torch.zeros(3, 4)
    load({"a": room, "b": room}, tmp_path)
    assert torch.equal(room, weight)
    with pytest.raises(CheckpointException, match="shares memory with"):
        load({"a": room, "c": room}, tmp_path)


class Plain(torch.Tensor):
    """A class that changes nothing."""


@pytest.mark.parametrize(
    "view",
    [lambda x: x.conj(), lambda x: x.conj().imag, lambda x: x.as_subclass(Plain)],
    ids=["conj", "neg", "subclass"],
)
def test_views_that_share_memory(tmp_path, view):
    """Both are filled at the same time, also where torch does the copying."""
    save({"a": view(torch.full((3,), 1 + 1j)).clone(), "b": torch.full((3,), 2 + 2j)}, tmp_path)
    room = torch.zeros(3, dtype=torch.complex64)
    with pytest.raises(CheckpointException, match="shares memory with"):
        load({"a": view(room), "b": room}, tmp_path)
    apart = load({"a": view(room), "b": torch.zeros_like(room)}, tmp_path)
    assert apart["b"].tolist() == [2 + 2j] * 3
    assert torch.equal(apart["a"], view(torch.full((3,), 1 + 1j)))


def test_ties_of_the_same_form(tmp_path):
    """The same content fits into one memory, unless it becomes other bytes there."""
    content = torch.full((3,), 1 + 1j)
    save({"a": content, "b": content.clone()}, tmp_path)
    room = torch.zeros_like(content)
    for one, other in ((room.conj(), room.conj()), (room.as_subclass(Plain), room)):
        load({"a": one, "b": other}, tmp_path)
        assert torch.equal(one, content)
    with pytest.raises(CheckpointException, match="shares memory with"):
        load({"a": room.conj(), "b": room}, tmp_path)
    numbers = torch.ones(3)
    save({"a": numbers, "b": numbers.clone()}, tmp_path / "numbers")
    with pytest.raises(CheckpointException, match="shares memory with"):  # torch casts one of them
        load({"a": numbers.view(torch.int32), "b": numbers}, tmp_path / "numbers")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=["as stored", "cast"])
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.as_subclass(Plain)], ids=["", "class"])
def test_targets_that_were_shrunk(tmp_path, dtype, view):
    """Nothing is written beyond what is there, also where torch does the copying."""
    save({"t": torch.arange(24).view(4, 6)}, tmp_path)
    target = torch.zeros(4, 6, dtype=dtype)
    target.untyped_storage().resize_(48)
    with pytest.raises(CheckpointException, match=r"t: .* 48; it was resized under it"):
        load({"t": view(target)}, tmp_path)


class Meta(DefaultLoadPlanner):
    """Gives tensors without memory."""

    def resolve_tensor(self, read_item):
        return super().resolve_tensor(read_item).to("meta")


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=["as stored", "cast"])
def test_targets_without_memory_are_refused(tmp_path, dtype):
    save({"t": torch.arange(24)}, tmp_path)
    with pytest.raises(CheckpointException, match="t: the planner gives a meta tensor"):
        load({"t": torch.zeros(24, dtype=dtype)}, tmp_path, planner=Meta())


class Counter:
    """Torch calls both methods."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count, "tensor": torch.full((2,), float(self.count))}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_stateful(tmp_path):
    save({"a": Counter(4)}, tmp_path)
    target = Counter(0)
    load({"a": target}, tmp_path)
    assert target.count == 4


def test_an_optimizer(tmp_path):
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    parts = get_state_dict(model, optimizer)
    save({"model": parts[0], "optimizer": parts[1]}, tmp_path)
    other = torch.nn.Linear(5, 3)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    empty = get_state_dict(other, fresh)
    load({"model": empty[0], "optimizer": empty[1]}, tmp_path)
    set_state_dict(other, fresh, model_state_dict=empty[0], optim_state_dict=empty[1])
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert torch.equal(model.weight, other.weight)


# --- the directory


def test_overwriting(tmp_path):
    save({"a": torch.ones(3)}, tmp_path)
    with pytest.warns(UserWarning, match="Detected an existing checkpoint"):
        save({"a": torch.full((3,), 2.0)}, tmp_path)
    assert_same(load({"a": torch.zeros(3)}, tmp_path)["a"], torch.full((3,), 2.0))
    assert len(os.listdir(tmp_path / "data")) == 2
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        dcp.save({}, storage_writer=bridge.StorageWriter(tmp_path, overwrite=False))


def test_a_directory_of_torch_is_left_alone(tmp_path):
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="two formats are never mixed"):
        save({"a": torch.zeros(3)}, tmp_path)
    with pytest.raises(CheckpointException, match="not of Shardkeep"):
        load({"a": torch.zeros(3)}, tmp_path)
    dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path)


def test_nothing_is_there(tmp_path):
    with pytest.raises(CheckpointException, match="no checkpoint at"):
        load({"a": torch.zeros(3)}, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        bridge.StorageReader(tmp_path / "nowhere").read_metadata()


def test_checkpoint_id_beats_the_path(tmp_path):
    writer = bridge.StorageWriter(tmp_path / "a")
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert writer.path == writer.checkpoint_id == tmp_path / "b"
    assert not (tmp_path / "a").exists()
    reader = bridge.StorageReader(tmp_path / "a")
    dcp.load({"a": torch.zeros(3)}, storage_reader=reader, checkpoint_id=str(tmp_path / "b"))
    assert reader.path == reader.checkpoint_id == tmp_path / "b"
    meta = reader.read_metadata().storage_meta
    assert (meta.save_id, meta.load_id) == (writer.save_id, reader.load_id)
    assert os.fspath(meta.checkpoint_id) == str(tmp_path / "b")


def test_what_has_no_meaning_here(tmp_path):
    from torch.distributed.checkpoint._extension import ZStandard

    with pytest.raises(ValueError, match="_extensions"):
        bridge.StorageWriter(tmp_path, _extensions=[ZStandard.__new__(ZStandard)])
    with pytest.raises(ValueError, match="serialization_format"):
        bridge.StorageWriter(
            tmp_path, serialization_format=filesystem.SerializationFormat.SAFETENSORS
        )
    assert not bridge.StorageWriter.validate_checkpoint_id("s3://bucket/a")
    assert bridge.StorageReader.validate_checkpoint_id(tmp_path)


def test_without_collectives_in_one_process(tmp_path):
    save({"a": torch.ones(3)}, tmp_path, use_collectives=False)
    assert_same(load({"a": torch.zeros(3)}, tmp_path)["a"], torch.ones(3))


# --- plans


@pytest.fixture
def no_cached_plans():
    kept = [name for name in vars(SavePlanner) if name.startswith("_cached_")]
    yield
    for name in kept:
        getattr(SavePlanner, name).clear()


def test_cached_plans(tmp_path, no_cached_plans):
    for round_ in range(4):
        content = {"a": torch.full((9,), float(round_)), "n": round_}
        if round_ == 3:
            content["b"] = torch.ones(2)
        path = tmp_path / f"step-{round_}"
        save(content, path, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert_same(load(zeros(content), path), content)


def test_plans_that_are_not_flattened(tmp_path):
    content = {"a": {"b": [1, 2]}, "c": torch.ones(3)}
    save(content, tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False))
    target = {"a": {}, "c": torch.zeros(3)}
    # Else torch's planner fills a copy of the outermost dict.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(target, tmp_path, planner=planner)
    assert_same(target, content)


class Halves(DefaultSavePlanner):
    """Changes tensors, and says so or not."""

    honest = True

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if self.honest and item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item):
        found = super().resolve_data(write_item)
        return found.half() if isinstance(found, torch.Tensor) else found


def test_a_planner_that_changes_tensors(tmp_path):
    content = {"a": torch.randn(100), "n": 3}
    save(content, tmp_path / "a", planner=Halves())
    target = load({"a": torch.zeros(100, dtype=torch.float16), "n": 0}, tmp_path / "a")
    assert_same(target, {"a": content["a"].half(), "n": 3})
    lying = Halves()
    lying.honest = False
    with pytest.raises(CheckpointException, match=r"a: planned as shape \(100,\) torch.float32"):
        save(content, tmp_path / "b", planner=lying)
    assert not (tmp_path / "b" / "checkpoint.json").exists()


class Committing(DefaultLoadPlanner):
    """Reads somewhere else first, as planners for devices do."""

    def resolve_tensor(self, read_item):
        return torch.zeros_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item, tensor):
        super().resolve_tensor(read_item).copy_(tensor)


def test_a_planner_that_copies(tmp_path):
    save(state(), tmp_path)
    assert_same(load(zeros(state()), tmp_path, planner=Committing()), state())


def test_part_of_a_tensor_is_no_tensor(tmp_path):
    class Cut(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            plan.items[0].tensor_data.chunk.sizes = torch.Size((2,))
            return plan

    with pytest.raises(CheckpointException, match="no rank holds"):
        save({"a": torch.ones(3)}, tmp_path, planner=Cut())
    assert not (tmp_path / "data").exists()


# --- objects


def objects():
    return {
        "rng": {"python": random.getstate(), "numpy": np.random.RandomState(3).get_state()},
        "tuple": (torch.arange(3), [torch.ones(2, dtype=torch.bfloat16)], {"a": 1}),
        "array": np.arange(6, dtype=">i4").reshape(2, 3),
        "dtype": torch.float16,
        "point": Point(1, (2, 3)),
        "colour": Colour.RED,
        "set": {1, 2},
    }


def test_objects(tmp_path):
    stream = io.BytesIO(b"abc")
    stream.seek(2)
    save({**objects(), "stream": stream}, tmp_path)
    target = {
        **dict.fromkeys(objects()),
        "rng": {"python": None, "numpy": None},
        "point": Point(0, (0, 0)),
        "colour": Colour.RED,
        "stream": None,
    }
    load(target, tmp_path)
    found = target.pop("stream")
    assert (found.tell(), found.getvalue()) == (2, b"abc")
    for name, value in objects().items():
        if name == "array":
            assert np.array_equal(target[name], value)
        elif name == "rng":
            assert target[name]["python"] == value["python"]
            assert np.array_equal(target[name]["numpy"][1], value["numpy"][1])
        elif name == "point":  # classes that only the target tells; torch's planner drops them
            assert_same(target[name], tuple(value))
        elif name == "colour":
            assert target[name] == value.value
        else:
            assert_same(target[name], value)


class Gadget:
    """What an attacker puts into a pickle."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_gadgets_are_refused_at_save(tmp_path):
    with pytest.raises(CheckpointException, match=r"evil: cannot store a value of type .*Gadget"):
        save({"evil": Gadget(tmp_path / "ran"), "a": torch.ones(2)}, tmp_path / "a")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "a" / "checkpoint.json").exists()


class Streams(DefaultSavePlanner):
    """Gives streams of its own making."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def transform_object(self, write_item, object):
        return object if isinstance(object, torch.Tensor) else self.stream


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_streams_of_planners_are_not_run(tmp_path, how):
    stream = io.BytesIO()
    (torch.save if how == "torch.save" else pickle.dump)(Gadget(tmp_path / "ran"), stream)
    with pytest.raises(CheckpointException, match="evil: the planner gives a stream"):
        save({"evil": 1}, tmp_path / "a", planner=Streams(stream))
    assert not (tmp_path / "ran").exists()


def test_streams_of_planners(tmp_path):
    stream = io.BytesIO()
    torch.save({"a": [1, 2.5], "b": torch.ones(2)}, stream)
    save({"x": 1}, tmp_path, planner=Streams(stream))
    found = load({"x": None}, tmp_path)["x"]
    assert_same(found, {"a": [1, 2.5], "b": torch.ones(2)})


def test_gadgets_are_not_run_at_load(tmp_path):
    path = tmp_path / "a"
    content = {"evil": Gadget(tmp_path / "ran"), "raw": pickle.dumps(Gadget(tmp_path / "ran"))}
    shardkeep.save(content, path, allow_pickle=True)
    with pytest.raises(CheckpointException) as caught:
        load({"evil": None}, path)
    assert isinstance(cause(caught), shardkeep.UnsafeCheckpointError)
    # Bytes stay bytes, whatever they say.
    assert load({"raw": None}, path)["raw"] == content["raw"]
    stream = io.BytesIO(content["raw"])
    save({"stream": stream}, tmp_path / "b")
    assert load({"stream": None}, tmp_path / "b")["stream"].getvalue() == content["raw"]
    assert not (tmp_path / "ran").exists()


def test_damage_is_found(tmp_path):
    save(state(), tmp_path)
    (data,) = (tmp_path / "data").glob("*-r00000-0*")
    whole = data.read_bytes()
    target = zeros(state())
    found = 0
    for at in range(4096, len(whole), 997):
        data.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            load(target, tmp_path)
            assert_same(target, state())
        except CheckpointException as error:
            (failure,) = error.failures.values()
            assert isinstance(failure[0], CorruptionError)
            found += 1
    assert found


def test_hostile_objects(tmp_path):
    """What only our own names mean is built only where it fits."""
    from shardkeep import values
    from shardkeep.torch.objects import _Stream, _Tensor, decode_object

    for bad in (
        _Stream(-1, b""),
        _Stream("x", b""),
        _Stream(0, 7),
        _Tensor("float32", (2**40, 2**40), b""),
        _Tensor("float32", (3,), b"1234"),
        _Tensor("nothing", (), b""),
        _Tensor("float32", (-1, -1), b"1234"),
    ):
        with pytest.raises(shardkeep.FormatError):
            decode_object(values.encode(bad), "x")


@pytest.mark.parametrize(
    ("kind", "items"),
    [
        ("torch.Tensor", ("float32", (1,))),
        ("torch.Tensor", ("nothing", (), b"")),
        ("torch.Tensor", ([], (), b"")),
        ("torch.Tensor", ("float32", (1,), "1234")),
        ("torch.Tensor", ("float32", (1,), 4)),
        ("torch.Tensor", ("float32", (0, 2**62, 2**62), b"")),
        ("numpy.ndarray", ("float32", (), b"1234", 0)),
        ("numpy.ndarray", ("float32", (2**70, 0), b"")),
        ("io.BytesIO", (0,)),
        ("io.BytesIO", ()),
    ],
)
def test_hostile_fields(kind, items):
    """The builders say what does not fit, whoever calls them."""
    from shardkeep.torch.objects import _build

    with pytest.raises(shardkeep.FormatError, match=f"not a {kind}"):
        _build(kind, (), items)


def test_failing_leaves_what_was_there(tmp_path):
    save({"a": torch.ones(3)}, tmp_path)
    before = sorted(os.listdir(tmp_path / "data"))
    for bad in (object(), torch.zeros(2).to_sparse()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(CheckpointException) as caught:
                save({"a": torch.zeros(3), "bad": bad}, tmp_path)
        assert isinstance(cause(caught), UnsupportedValueError)
    assert sorted(os.listdir(tmp_path / "data")) == before
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.json", "data"]
    assert_same(load({"a": torch.zeros(3)}, tmp_path)["a"], torch.ones(3))


def test_they_can_be_pickled(tmp_path):
    writer = bridge.StorageWriter(tmp_path, overwrite=False)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer)
    again = pickle.loads(pickle.dumps(writer))
    assert (again.path, again.overwrite, again.save_id) == (tmp_path, False, writer.save_id)
    reader = bridge.StorageReader(tmp_path)
    metadata = reader.read_metadata()
    assert pickle.loads(pickle.dumps(metadata)) == metadata
    again = pickle.loads(pickle.dumps(reader))
    assert_same(load({"a": torch.zeros(3)}, again.path)["a"], torch.ones(3))


def test_it_is_replaced_after_it_was_planned(tmp_path):
    """A reader that has to open the checkpoint again must not read another save."""
    save({"a": torch.ones(3)}, tmp_path)
    target = {"a": torch.zeros(3)}
    reader, planner = bridge.StorageReader(tmp_path), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(target, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader = pickle.loads(pickle.dumps(reader))  # without open files
    reader.read_data(plan, planner)
    assert target["a"].tolist() == [1.0] * 3
    shardkeep.save({"a": torch.full((3,), 2.0)}, tmp_path, overwrite=True)
    for _ in range(2):
        with pytest.raises(shardkeep.StorageError, match="was replaced while being read") as caught:
            reader.read_data(plan, planner)
        assert caught.value.transient
    assert target["a"].tolist() == [1.0] * 3
    load(target, tmp_path)
    assert target["a"].tolist() == [2.0] * 3


def test_torch_save_and_back(tmp_path, monkeypatch):
    from torch.distributed.checkpoint import format_utils

    monkeypatch.setattr(format_utils, "FileSystemReader", bridge.FileSystemReader)
    monkeypatch.setattr(format_utils, "FileSystemWriter", bridge.FileSystemWriter)
    torch.save(state(), tmp_path / "a.pt")
    format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "b")
    assert shardkeep.open(tmp_path / "b").verify().ok
    format_utils.dcp_to_torch_save(tmp_path / "b", tmp_path / "c.pt")
    assert_same(torch.load(tmp_path / "c.pt"), state())


# --- planners that do not give what they have planned


class Other(DefaultSavePlanner):
    """Gives something else than torch asks for."""

    def resolve_data(self, write_item):
        super().resolve_data(write_item)
        return "something"


def test_planners_that_give_other_things(tmp_path):
    with pytest.raises(CheckpointException, match=r"a: planned as a tensor, is a str"):
        save({"a": torch.ones(3)}, tmp_path / "a", planner=Other())
    with pytest.raises(CheckpointException, match=r"n: the planner gives a str where torch asks"):
        save({"n": 5}, tmp_path / "b", planner=Other())


def test_objects_that_hold_queues_and_sparse_tensors(tmp_path):
    queue = deque([torch.ones(2), 5], maxlen=3)
    plain = deque([1, 2])
    save({"x": (queue, plain)}, tmp_path / "a")
    found = load({"x": None}, tmp_path / "a")["x"]
    assert (found[0].maxlen, found[0][1], found[1]) == (3, 5, plain)
    assert torch.equal(found[0][0], torch.ones(2))
    with pytest.raises(CheckpointException, match="x: holds a tensor that is not dense"):
        save({"x": (torch.eye(2).to_sparse(),)}, tmp_path / "b")


def test_arrays_of_types_that_torch_lacks():
    with pytest.raises(shardkeep.FormatError, match="torch has no dtype int4"):
        _build_tensor("int4", (1,), b"1")


class Looking:
    """Part of a planner: remembers whether the collector was on while it planned."""

    def create_local_plan(self):
        self.collected = not collector.is_collector_paused()
        return super().create_local_plan()


class LookingSave(Looking, DefaultSavePlanner):
    pass


class LookingLoad(Looking, DefaultLoadPlanner):
    pass


def test_the_collector_waits_while_torch_plans(tmp_path, end_all_pauses):
    end_all_pauses()
    saves, loads = LookingSave(), LookingLoad()
    dcp.save(state(), storage_writer=bridge.StorageWriter(tmp_path), planner=saves)
    end_all_pauses()
    dcp.load(state(), storage_reader=bridge.StorageReader(tmp_path), planner=loads)
    assert not saves.collected
    assert not loads.collected


def test_the_collector_goes_on_beside_a_save_on_another_thread(tmp_path, end_all_pauses):
    end_all_pauses()
    planner = LookingSave()
    writer = bridge.StorageWriter(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dcp.save, state(), storage_writer=writer, planner=planner).result()
    assert planner.collected
    assert not collector.is_collector_paused()


def test_a_plan_that_fails_pauses_the_collector_until_the_next_call(tmp_path, end_all_pauses):
    class Failing(DefaultSavePlanner):
        def create_local_plan(self):
            raise ValueError("no plan")

    end_all_pauses()
    writer = bridge.StorageWriter(tmp_path)
    with pytest.raises(CheckpointException, match="no plan"):
        dcp.save(state(), storage_writer=writer, planner=Failing())
    assert collector.is_collector_paused()
    writer.reset()
    assert not collector.is_collector_paused()
