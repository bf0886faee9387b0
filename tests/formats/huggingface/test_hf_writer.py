"""Files for Hugging Face from many ranks: the same bytes as from one, each written once."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from collections import defaultdict
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

import shardkeep
from shardkeep import CheckpointExistsError, ShardedArray, StorageError, UnsupportedValueError
from shardkeep.arrays import region
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.formats.huggingface import building, dealing
from shardkeep.formats.huggingface.gathering import Gathering
from shardkeep.formats.huggingface.shards import plan_shards
from shardkeep.formats.huggingface.writer import _stored
from shardkeep.planner import Place, WriteItems
from shardkeep.stores.local import LocalStore, WriteFile
from shardkeep.thread_ranks import ThreadRanks

A = np.arange(12, dtype=np.float32).reshape(3, 4)


def export(path, state, world=1, **options):
    """Save `state(rank)` from so many ranks, as threads."""
    call = {key: options.pop(key) for key in ("overwrite", "memory_budget") if key in options}

    def work(coordinator):
        writer = shardkeep.HuggingFaceWriter(**options)
        made = state(coordinator.rank) if callable(state) else state
        return shardkeep.save(made, path, storage_writer=writer, process_group=coordinator, **call)

    return ThreadRanks(world).run(work)


def files(path):
    return {entry.name: entry.read_bytes() for entry in Path(path).iterdir()}


def read(path):
    found = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        found |= load_file(file)
    return found


# --- any state, cut in any way


@st.composite
def cuts(draw, shape, world):
    """For each rank, boxes that together are a tensor: cut again and again in any dimension."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes.pop(at)
        dims = [dim for dim, n in enumerate(sizes) if n > 1]
        if not dims:
            boxes.append((offsets, sizes))
            continue
        dim = draw(st.sampled_from(dims))
        low = draw(st.integers(1, sizes[dim] - 1))
        for begin, length in ((0, low), (low, sizes[dim] - low)):
            o, s = list(offsets), list(sizes)
            o[dim] += begin
            s[dim] = length
            boxes.append((tuple(o), tuple(s)))
    return [(box, draw(st.integers(0, world - 1))) for box in boxes]


@st.composite
def states(draw):
    world = draw(st.integers(1, 4))
    tensors = {}
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from(["float32", "int64", "bool", "float16", "uint8"]))
        tensors[f"t{number}"] = (dtype, shape, draw(cuts(shape, world)))
    return world, tensors


@settings(max_examples=60)
@given(case=states(), limit=st.integers(40, 3000), grain=st.sampled_from([16, 64, 512]))
def test_any_state_makes_the_same_files_as_one_process(tmp_path_factory, case, limit, grain):
    """Ranges are made small, so that small tensors lie in many of them."""
    world, tensors = case
    root = tmp_path_factory.mktemp("any")
    rng = np.random.default_rng(1)
    whole = {
        name: rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
        for name, (dtype, shape, _) in tensors.items()
    }

    def held(rank):
        made = {}
        for name, (_, shape, boxes) in tensors.items():
            mine = [(whole[name][region(*box)], box[0]) for box, holder in boxes if holder == rank]
            if mine:
                made[name] = ShardedArray.from_shards(mine, shape)
        return made

    before = dealing.RANGE, dealing.UNIT
    dealing.RANGE, dealing.UNIT = grain, 2 * grain
    try:
        export(root / "many", held, world, max_shard_size=limit)
        export(root / "one", whole, max_shard_size=limit)
    finally:
        dealing.RANGE, dealing.UNIT = before
    assert files(root / "many") == files(root / "one")
    got = read(root / "many")
    assert got.keys() == whole.keys()
    for name, array in whole.items():
        assert got[name].dtype == array.dtype
        assert got[name].tobytes() == array.tobytes()
    assert sorted(os.listdir(root)) == ["many", "one"]


# --- large enough for real ranges

BIG = np.random.default_rng(2).standard_normal((1500, 900)).astype(np.float32)
TALL = np.random.default_rng(3).standard_normal((6, 40, 3000)).astype(np.float16)


def columns(rank, world):
    edges = np.linspace(0, BIG.shape[1], world + 1).astype(int)
    middle = np.linspace(0, TALL.shape[1], world + 1).astype(int)
    low, high = edges[rank], edges[rank + 1]
    first, last = middle[rank], middle[rank + 1]
    state = {
        "big": ShardedArray.from_local(BIG[:, low:high].copy(), (0, low), BIG.shape),
        "tall": ShardedArray.from_local(TALL[:, first:last].copy(), (0, first, 0), TALL.shape),
        "turned": ShardedArray.from_local(BIG.T[low:high], (low, 0), BIG.T.shape),
        "small": np.arange(5),
    }
    return state


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_range_has_one_writer_and_every_byte_is_written_once(tmp_path, monkeypatch, world):
    seen = defaultdict(set)
    total = defaultdict(int)
    lock = threading.Lock()
    plain = WriteFile.write_at

    def spy(self, data, offset):
        # The name of the thread does not tell the rank: its descriptor does.
        with lock:
            if self.path.suffix == ".safetensors":
                for at in range(offset // dealing.RANGE, -(-(offset + len(data)) // dealing.RANGE)):
                    seen[self.path.name, at].add(self.fd)
                total[self.path.name] += len(data)
        plain(self, data, offset)

    monkeypatch.setattr(WriteFile, "write_at", spy)
    results = export(
        tmp_path / "x", lambda rank: columns(rank, world), world, memory_budget=8 << 20
    )
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "x").glob("*.safetensors")}
    assert dict(total) == sizes
    assert all(len(writers) == 1 for writers in seen.values())
    assert sum(result.stats["bytes"] for result in results) == sum(sizes.values())
    # Nobody writes much more than the others.
    each = [result.stats["bytes"] for result in results]
    assert max(each) <= 2 * sum(each) / world
    got = read(tmp_path / "x")
    for name, array in {"big": BIG, "tall": TALL, "turned": BIG.T}.items():
        assert got[name].tobytes() == np.ascontiguousarray(array).tobytes()
    monkeypatch.undo()
    with shardkeep.open(tmp_path / "x") as checkpoint:
        assert np.array_equal(checkpoint["tall"][2:4, 5:], TALL[2:4, 5:])


def test_rounds_keep_to_their_limit():
    """What a rank sends and receives in one round is no more than it may have on its way."""
    world, limit = 4, 1 << 20
    planners = [DefaultSavePlanner() for _ in range(world)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(columns(rank, world), None, Place(rank, world))
    plans, metadata = planners[0].create_global_plan([p.create_local_plan() for p in planners])
    state = metadata.state_dict_metadata
    (shard,) = plan_shards(_stored(state.tensors)[0])
    at = {tensor.name: start for tensor, start in shard.tensors}
    space = dealing.Space.of([shard.size], [len(shard.header)])
    place = np.array([at[name] for name in state.tensors.names])
    messages = dealing.deal(space, state.tensors, state.chunks, place, world, limit)
    deals = [dealing.Deal.decode(message) for message in messages]
    jobs = [
        Gathering(deal, WriteItems.of(plan.items), planner)
        for deal, plan, planner in zip(deals, plans, planners, strict=True)
    ]
    assert deals[0].rounds > 2
    for number in range(deals[0].rounds):
        for rank in range(world):
            sent = sum(jobs[to].sizes(number)[rank] for to in range(world) if to != rank)
            assert sent + sum(jobs[rank].sizes(number)) <= limit + dealing.UNIT


# --- what it may hold


def test_ties_and_metadata(tmp_path):
    weight = np.ones((4, 4), np.float32)
    export(tmp_path / "x", {"embed": weight, "n": np.array(3), "head": weight})
    with safe_open(tmp_path / "x" / "model.safetensors", "np") as file:
        assert set(file.keys()) == {"embed", "n"}
        assert file.metadata() == {"format": "pt", "head": "embed"}
    target = {"embed": np.zeros((4, 4), np.float32), "n": np.array(0)}
    target["head"] = target["embed"]
    shardkeep.load(target, tmp_path / "x")
    assert target["head"].all()


def test_empty_things(tmp_path):
    export(tmp_path / "x", {})
    assert read(tmp_path / "x") == {}
    export(tmp_path / "y", {"none": np.zeros((0, 3)), "one": np.array(True)}, 2)
    got = read(tmp_path / "y")
    assert got["none"].shape == (0, 3)
    assert got["one"]


def test_values_are_refused_by_name_or_dropped(tmp_path):
    state = {"a": A, "step": 3, "optimizer": {"lr": 0.1}}
    with pytest.raises(UnsupportedValueError, match=r"step.*optimizer\.lr|optimizer\.lr.*step"):
        export(tmp_path / "x", state, 2)
    assert not list(tmp_path.iterdir())
    export(tmp_path / "x", state, 2, values="drop")
    assert read(tmp_path / "x").keys() == {"a"}
    with pytest.raises(UnsupportedValueError, match=r"complex128.*: z"):
        export(tmp_path / "z", {"z": np.zeros(2, np.complex128)})
    writer = shardkeep.HuggingFaceWriter()
    with pytest.raises(UnsupportedValueError, match="user_metadata"):
        shardkeep.save({"a": A}, tmp_path / "z", storage_writer=writer, user_metadata={"x": 1})
    with pytest.raises(ValueError, match="base"):
        shardkeep.save({"a": A}, tmp_path / "z", storage_writer=writer, base=tmp_path / "x")
    with pytest.raises(ValueError, match="checkpoint_id"):
        shardkeep.save({"a": A}, storage_writer=shardkeep.HuggingFaceWriter())
    with pytest.raises(ValueError, match="max_shard_size"):
        shardkeep.HuggingFaceWriter(max_shard_size="large")
    assert sorted(os.listdir(tmp_path)) == ["x"]


def test_in_the_background(tmp_path):
    array = np.arange(3 << 20, dtype=np.float32)
    with shardkeep.Checkpointer(no_dist=True) as keeper:
        writer = shardkeep.HuggingFaceWriter()
        handle = keeper.async_save({"a": array}, tmp_path / "x", storage_writer=writer)
        array[:] = 0
        handle.result(timeout=60)
    assert np.array_equal(read(tmp_path / "x")["a"], np.arange(3 << 20, dtype=np.float32))


def test_in_the_background_of_many_ranks(tmp_path):
    """What is staged lies flat: columns of it travel all the same."""
    world = 3

    def work(coordinator):
        state = columns(coordinator.rank, world)
        with shardkeep.Checkpointer(process_group=coordinator) as keeper:
            writer = shardkeep.HuggingFaceWriter(max_shard_size="6MB")
            handle = keeper.async_save(state, tmp_path / "x", storage_writer=writer)
            handle.result(timeout=60)

    ThreadRanks(world).run(work)
    got = read(tmp_path / "x")
    for name, array in {"big": BIG, "tall": TALL, "turned": BIG.T}.items():
        assert got[name].tobytes() == np.ascontiguousarray(array).tobytes()


def test_cancelled_in_the_background(tmp_path):
    array = np.arange(8 << 20, dtype=np.float32)
    with shardkeep.Checkpointer(no_dist=True) as keeper:
        writer = shardkeep.HuggingFaceWriter()
        handle = keeper.async_save({"a": array}, tmp_path / "x", storage_writer=writer)
        handle.cancel()
        with contextlib.suppress(CancelledError):
            handle.result(timeout=60)
    assert [p.name for p in tmp_path.iterdir()] == ([] if handle.cancelled() else ["x"])


# --- what is there already


def test_an_earlier_one_is_replaced_only_when_asked(tmp_path):
    path = tmp_path / "x"
    export(path, {"a": A, "b": A}, max_shard_size=50)
    (path / "config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"mine")
    (path / "link").symlink_to("config.json")
    before = files(path)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        export(path, {"a": A + 1}, 2)
    assert files(path) == before
    export(path, {"a": A + 1}, 2, overwrite=True)
    assert np.array_equal(load_file(path / "model.safetensors")["a"], A + 1)
    assert sorted(os.listdir(path)) == [
        "adapter_model.safetensors", "config.json", "link", "model.safetensors"
    ]  # fmt: skip
    assert (path / "adapter_model.safetensors").read_bytes() == b"mine"
    assert os.readlink(path / "link") == "config.json"
    assert sorted(os.listdir(tmp_path)) == ["x"]


def test_beside_a_configuration(tmp_path):
    path = tmp_path / "x"
    path.mkdir()
    export(path, {"a": A})  # an empty directory is as good as none
    (path / "model.safetensors").unlink()
    (path / "config.json").write_text(json.dumps({"model_type": "x"}))
    export(path, {"a": A})
    assert sorted(os.listdir(path)) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("mark", ["checkpoint.json", ".metadata", "__0_0.distcp", "folder"])
def test_what_is_not_replaced(tmp_path, mark):
    path = tmp_path / "x"
    path.mkdir()
    (path / mark).mkdir() if mark == "folder" else (path / mark).write_text("")
    with pytest.raises(CheckpointExistsError, match=mark.replace(".", r"\.")):
        export(path, {"a": A}, 2, overwrite=True)
    assert os.listdir(path) == [mark]
    assert os.listdir(tmp_path) == ["x"]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is a file"):
        export(tmp_path / "file", {"a": A})


@pytest.mark.parametrize("name", ["é" * 120, "模" * 80, "x" * 250])
def test_directories_of_long_names(tmp_path, name):
    export(tmp_path / name, {"a": A})
    export(tmp_path / name, {"a": A + 1}, overwrite=True)
    assert os.listdir(tmp_path) == [name]


def test_what_others_put_there_meanwhile_is_kept(tmp_path, monkeypatch):
    """A tokenizer, a folder, a newer configuration: written while the weights were."""
    path = tmp_path / "model"
    export(path, {"a": A})
    (path / "config.json").write_text("old")
    (path / "README.md").write_text("same")
    take_along = building.Building._take_along

    def meanwhile(self):
        take_along(self)
        (path / "tokenizer.json").write_text("new")
        (path / "logs").mkdir()
        (path / "logs" / "1").write_text("x")
        (path / "config.tmp").write_text("newer")
        os.replace(path / "config.tmp", path / "config.json")

    class Synced(LocalStore):
        def sync_directory(self, name=""):
            super().sync_directory(name)
            synced.append((name, (path / "tokenizer.json").exists()))

    synced = []
    monkeypatch.setattr(building.Building, "_take_along", meanwhile)
    export(path, {"a": A + 1}, overwrite=True, open_store=Synced)
    assert ("model", True) in synced  # what came over late is durable before the old place goes
    assert np.array_equal(read(path)["a"], A + 1)
    assert (path / "tokenizer.json").read_text() == "new"
    assert (path / "logs" / "1").read_text() == "x"
    assert (path / "config.json").read_text() == "newer"
    assert (path / "README.md").read_text() == "same"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_where_directories_cannot_change_places(tmp_path):
    class Plain(LocalStore):
        def exchange(self, one, other):
            raise OSError(22, "Invalid argument")

    path = tmp_path / "x"
    export(path, {"a": A}, open_store=Plain)
    with pytest.raises(StorageError, match="cannot replace a directory in one step"):
        export(path, {"a": A + 1}, overwrite=True, open_store=Plain)
    assert np.array_equal(load_file(path / "model.safetensors")["a"], A)
    assert os.listdir(tmp_path) == ["x"]


class Forgetful(LocalStore):
    """Directories change places, and then something fails: nobody knows if that will last."""

    def __init__(self, root):
        super().__init__(root)
        self.is_sick = False

    def exchange(self, one, other):
        super().exchange(one, other)
        self.is_sick = other == "x"

    def sync_directory(self, name=""):
        if self.is_sick:
            raise OSError(5, "Input/output error")
        super().sync_directory(name)


class Unsure(LocalStore):
    """The same, and neither is it said that they did."""

    def exchange(self, one, other):
        super().exchange(one, other)
        if other == "x":
            raise OSError(116, "Stale file handle")


@pytest.mark.parametrize("kind", [Forgetful, Unsure])
@pytest.mark.parametrize("world", [1, 2])
def test_what_was_replaced_is_kept_until_that_lasts(tmp_path, caplog, monkeypatch, kind, world):
    if kind is Unsure:  # nor can it be found out
        monkeypatch.setattr(building.Building, "is_there", lambda self: False)
    path = tmp_path / "x"
    export(path, {"a": A})
    (path / "config.json").write_text("mine")
    with pytest.raises(StorageError):
        export(path, {"a": A + 1}, world, overwrite=True, open_store=kind)
    (aside,) = tmp_path.glob(".x.*.partial")
    there = [read(path)["a"].tobytes(), read(aside)["a"].tobytes()]
    assert there == [(A + 1).tobytes(), A.tobytes()]
    assert str(aside) in caplog.text
    # Once it lasts, and is old, it goes.
    for entry in (*aside.iterdir(), aside):
        os.utime(entry, (1, 1))
    export(path, {"a": A + 2}, overwrite=True)
    assert os.listdir(tmp_path) == ["x"]
    assert (path / "config.json").read_text() == "mine"


def test_what_killed_saves_left_goes_after_a_while(tmp_path):
    old, new = tmp_path / ".x.0123.partial", tmp_path / ".x.4567.partial"
    other = tmp_path / ".y.0123.partial"
    for path in (old, new, other):
        path.mkdir()
        (path / "model.safetensors").write_text("")
    for path in (old, other):
        for entry in (path / "model.safetensors", path):
            os.utime(entry, (1, 1))
    export(tmp_path / "x", {"a": A})
    assert sorted(os.listdir(tmp_path)) == [new.name, other.name, "x"]


# --- errors and crashes


@pytest.mark.parametrize("world", [1, 3])
def test_a_failed_write_fails_everywhere_and_leaves_nothing(tmp_path, monkeypatch, world):
    plain = WriteFile.write_at
    count = []

    def full(self, data, offset):
        count.append(1)
        if len(count) == 3:
            raise OSError(28, "No space left on device")
        plain(self, data, offset)

    monkeypatch.setattr(WriteFile, "write_at", full)

    def work(coordinator):
        writer = shardkeep.HuggingFaceWriter()
        state = columns(coordinator.rank, world)
        shardkeep.save(
            state, tmp_path / "x", storage_writer=writer, process_group=coordinator,
            memory_budget=8 << 20,
        )  # fmt: skip

    outcomes = ThreadRanks(world).outcomes(work)
    assert all(isinstance(outcome, StorageError) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "No space left" in str(outcomes[0])
    assert not list(tmp_path.iterdir())


class Stopped(Exception):
    """The power is gone."""


STEPS = ["make_directory", "create", "open_shared", "sync_directory", "rename", "exchange"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_whole_or_absent_wherever_it_stops(tmp_path, overwrite):
    """Every operation on the directory fails once, and nothing after it happens."""
    for stop in range(100):
        root = tmp_path / str(stop)
        root.mkdir()
        if overwrite:
            export(root / "x", {"old": A})
        done = []

        class Stopping(LocalStore):
            pass

        def step(name, stop=stop, done=done):
            def run(self, *args):
                if len(done) >= stop:
                    done.append(name)
                    raise Stopped
                done.append(name)
                return getattr(LocalStore, name)(self, *args)

            return run

        for name in STEPS:
            setattr(Stopping, name, step(name))
        writer = shardkeep.HuggingFaceWriter(max_shard_size=40, open_store=Stopping)
        # A process that is killed cleans nothing up.
        writer.abort = lambda committing=False: None
        state = {"a": A, "b": A + 1}
        try:
            shardkeep.save(
                state, root / "x", storage_writer=writer, overwrite=overwrite, no_dist=True
            )
        except Stopped:
            ended = False
        else:
            ended = True
        found = read(root / "x") if (root / "x").exists() else {}
        if set(found) == {"a", "b"}:
            assert set(files(root / "x")) == {
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            }
        else:
            assert not ended
            assert set(found) == ({"old"} if overwrite else set())
        if ended:
            break
        # And what comes after it works, whatever was left.
        export(root / "x", state, overwrite=True, max_shard_size=40)
        assert set(read(root / "x")) == {"a", "b"}
        shutil.rmtree(root)
    assert ended
    assert stop > 8


# --- directories that others do not see, or that do not get to their place


@pytest.fixture
def built(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "SEEN_S", 0.1)

    def make(store=LocalStore):
        return building.Building(tmp_path / "x", "0" * 32, "model", store)

    return make


def test_what_the_coordinator_made_is_waited_for(built):
    there = built()
    with pytest.raises(StorageError, match=r"does not see the directory .* host first made"):
        there.see("first")
    later = threading.Timer(0.06, built().begin)
    later.start()
    there.see("first")
    with pytest.raises(FileNotFoundError):
        there.open("a")
    later = threading.Timer(0.06, lambda: there.create("a", 10))
    later.start()
    there.open("a").close()
    later.join()
    with pytest.raises(StorageError, match="has 10 bytes, expected 11"):
        there.check({"a": 11})
    there.check({"a": 10})


@pytest.mark.parametrize(
    ("code", "made", "error"),
    [
        (errno.ENOTEMPTY, False, CheckpointExistsError),
        (errno.EEXIST, False, CheckpointExistsError),
        (errno.EIO, False, StorageError),
        (errno.EIO, True, None),
    ],
)
def test_a_move_into_place_that_fails_or_says_so(tmp_path, built, code, made, error):
    class Store(LocalStore):
        def rename(self, old, new):
            if made:
                super().rename(old, new)
            raise OSError(code, os.strerror(code))

    one = built(Store)
    one.begin()
    one.write("model.safetensors", b"new")
    if error is None:
        one.commit(False, lambda: None)
        assert (tmp_path / "x/model.safetensors").read_bytes() == b"new"
    else:
        with pytest.raises(error):
            one.commit(False, lambda: None)
        assert not one.committed
        assert not (tmp_path / "x").exists()
    one.discard()
    assert os.listdir(tmp_path) == (["x"] if error is None else [])


def test_a_disk_that_fails_when_it_is_tried(tmp_path, built):
    class Store(LocalStore):
        def exchange(self, one, other):
            raise OSError(errno.EIO, "broken")

    (tmp_path / "x").mkdir()
    (tmp_path / "x/config.json").write_text("{}")
    with pytest.raises(StorageError, match="broken"):
        built(Store).begin()
    assert os.listdir(tmp_path / "x") == ["config.json"]


def test_a_pipe_stays_where_it_is(tmp_path):
    export(tmp_path / "x", {"a": A})
    os.mkfifo(tmp_path / "x/pipe")
    export(tmp_path / "x", {"a": A + 1}, overwrite=True)
    assert sorted(os.listdir(tmp_path / "x")) == ["model.safetensors", "pipe"]
    assert np.array_equal(read(tmp_path / "x")["a"], A + 1)
