"""Elements on a device travel while something else is done, and are never used before they arrive.

The device here is one of tests: what is begun happens only when it is waited for, and memory that
is used too early holds something else.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import queue
import threading
import weakref

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep import taking
from shardkeep.adapters import numpy_arrays
from shardkeep.arrays import HostSink, HostSource, StagedSink, StagedSource, Stepped
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.pages import page_aligned
from shardkeep.memory import address_of
from shardkeep.stores.local import WriteFile


class Device:
    """Copies that are begun are done when somebody waits for them, and not before."""

    def __init__(self):
        self.begun = threading.local()
        self.late = 0
        self.refuses = False
        self.together = 0
        self.released = []
        self.pinned = 0
        self.has_room = True
        self.computing = []

    def settle(self):
        while self.computing:
            self.computing.pop()()
        return self

    def allocate(self, nbytes):
        return page_aligned(nbytes)

    def release(self, buffer):
        buffer[:] = 0xDD
        self.released.append(buffer)

    def begin_gather(self, sources, out):
        at = 0
        for source in sources:
            size = source.array.nbytes
            source.begin_read(0, source.array.size, out[at : at + size])
            at += size
        assert at == len(out)
        self.together += len(sources)

    def begin_scatter(self, data, parts):
        if self.refuses:
            return parts
        left = []
        for part in parts:
            sink = part.sink
            if sink.dtype is part.dtype and sink.array.flags.c_contiguous:
                self.begin(lambda part=part: self.put(data, part))
                self.together += 1
            else:
                left.append(part)
        return left

    def put(self, data, part):
        flat = part.sink.array.reshape(-1).view(np.uint8)
        assert np.shares_memory(flat, part.sink.array)
        flat[part.at : part.at + part.end - part.begin] = data[part.begin : part.end]

    def begin(self, copy):
        self.begun.__dict__.setdefault("copies", []).append(copy)

    def fence(self):
        copies = self.begun.__dict__.setdefault("copies", [])
        earlier = self.begun.__dict__.setdefault("earlier", [])
        before, self.begun.copies = list(earlier), []
        lock, done = threading.Lock(), []

        def wait():
            with lock:
                if not done:
                    for copy in copies:
                        copy()
                        self.late += 1
                    copies.clear()
                    done.append(True)

        def wait_for_all():
            for one in (*before, wait):
                one()

        earlier.append(wait)
        return wait_for_all

    def arrival(self):
        wait, looks = self.fence(), iter(range(2))

        def arrived():
            if next(looks, None) is not None:
                return False
            wait()
            return True

        return arrived

    def pin(self, memory):
        self.pinned += len(memory)
        return lambda: self.unpin(memory)

    def unpin(self, memory):
        self.pinned -= len(memory)

    def be_quiet(self):
        pass

    def here(self):
        return lambda: None

    def duplicate(self, sources, beside=()):
        if not self.has_room:
            return None
        return [Source(source.array.copy()) for source in sources]


class Source(HostSource):
    def begin_read(self, start, stop, out):
        out[:] = 0xEE
        device = DEVICES[-1]
        device.begin(lambda: HostSource(self.array).read_into(start, stop, out))

    def part(self, offsets, sizes):
        return Source(HostSource(self.array).part(offsets, sizes).array)


class Sink(HostSink):
    def begin_put(self, offsets, block, dtype):
        DEVICES[-1].begin(lambda: HostSink(self.array, self.dtype).put(offsets, block, dtype))


DEVICES = []


@pytest.fixture
def device(monkeypatch):
    adapter = numpy_arrays.NumpyArrays
    sources = adapter.sources
    monkeypatch.setattr(
        adapter, "sources", lambda self, v, w: [Source(s.array) for s in sources(self, v, w)]
    )
    monkeypatch.setattr(
        adapter, "sink", lambda self, value, dtype: Sink(value.view(dtype.bits()), dtype)
    )
    monkeypatch.setattr(adapter, "settle", lambda self, values, wait=True: DEVICES[-1].settle())
    DEVICES.append(Device())
    yield DEVICES[-1]
    DEVICES.clear()


def test_the_device_is_one():
    assert isinstance(Source(np.ones(2)), StagedSource)
    assert isinstance(Sink(np.ones(2), None), StagedSink)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_travels_arrives(tmp_path_factory, device, data):
    shardkeep.flush()
    path = tmp_path_factory.mktemp("staged")
    shapes = data.draw(
        st.lists(st.tuples(st.integers(0, 700), st.integers(1, 900)), min_size=1, max_size=5)
    )
    budget = data.draw(st.sampled_from([8 << 20, 12 << 20, 64 << 20]))
    device.refuses = data.draw(st.booleans())
    rng = np.random.default_rng(0)
    state = {f"t{n}": rng.integers(0, 9, shape, np.int32) for n, shape in enumerate(shapes)}
    state["turned"] = rng.integers(0, 9, (300, 200)).T
    shardkeep.save(state, path, overwrite=True, memory_budget=budget)
    target = {name: np.zeros_like(array) for name, array in state.items()}
    shardkeep.load(target, path, memory_budget=budget)
    for name, array in state.items():
        assert np.array_equal(target[name], array), name
    assert device.late


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_small_ones_travel_together(tmp_path, device, monkeypatch, refuses, cast):
    """Between large ones, of several types, in parts, and next to what must go by itself."""
    device.refuses = refuses
    monkeypatch.setattr("shardkeep.arrays.SMALL_STAGED", 4096)
    monkeypatch.setattr("shardkeep.engine.delivery.SMALL_STAGED", 4096)
    monkeypatch.setattr("shardkeep.engine.filling.SMALL_STAGED", 4096)
    rng = np.random.default_rng(1)
    state = {}
    for number in range(400):
        size = int(rng.integers(1, 1500)) if number % 50 else 50_000
        kind = [np.int32, np.float64, np.int8][number % 3]
        state[f"t{number}"] = rng.integers(0, 99, size).astype(kind)
    state["matrix"] = rng.integers(0, 99, (40, 30))
    state["turned"] = rng.integers(0, 99, (30, 40)).T
    shardkeep.save(state, tmp_path)
    gathered, device.together = device.together, 0
    assert gathered > 200
    target = {name: np.full_like(array, -1) for name, array in state.items()}
    if cast:
        target = {n: a.astype(np.int64) if a.dtype == np.int32 else a for n, a in target.items()}
    shardkeep.load(target, tmp_path, cast=cast)
    for name, array in state.items():
        assert np.array_equal(target[name], array), name
    assert (device.together > 100) is not refuses
    assert device.released


def test_what_is_still_computed_is_waited_for(tmp_path, device):
    """Also where the plan of the save before is used again."""
    array = np.zeros(5000)
    with shardkeep.Checkpointer() as keeper:
        for step in range(3):
            device.computing.append(lambda step=step: array.fill(step + 1))
            done = keeper.save({"a": array}, tmp_path / str(step))
            assert done.stats["plan_reused"] == (step > 0)
            with shardkeep.open(tmp_path / str(step)) as found:
                np.testing.assert_array_equal(found["a"][...], np.full(5000, step + 1.0))
            assert device.late > step  # it travels as what is on a device


def test_digests_are_those_of_what_has_arrived(tmp_path, device):
    """Two tensors that differ are not taken for equal, however small they are."""
    state = {"a": np.zeros(5000), "b": np.arange(5000.0)}
    shardkeep.save(state, tmp_path)
    tied = np.full(5000, -1.0)
    with pytest.raises(shardkeep.MismatchError):
        shardkeep.load({"a": tied, "b": tied}, tmp_path)


def test_many_files_and_units(tmp_path, device, monkeypatch):
    monkeypatch.setattr("shardkeep.formats.native.writer.usable_cores", lambda ranks=1: 4)
    limits = shardkeep.formats.native.layout.Limits(payload=20 << 20)
    state = {f"t{n}": np.arange(n, n + (5 << 20), dtype=np.int32) for n in range(6)}
    writer = shardkeep.NativeWriter(tmp_path, limits=limits)
    shardkeep.save(state, tmp_path, storage_writer=writer, memory_budget=64 << 20)
    assert shardkeep.verify(tmp_path).ok
    target = {name: np.zeros_like(array) for name, array in state.items()}
    shardkeep.load(target, tmp_path, memory_budget=64 << 20)
    for name, array in state.items():
        assert np.array_equal(target[name], array), name
    assert device.late > 20


def test_after_an_error_nothing_is_still_on_its_way(tmp_path, device, monkeypatch):
    state = {f"t{n}": np.ones(5 << 20, np.int32) for n in range(3)}
    calls = []

    def fail(self, data, offset):
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(5, "bad disk")

    monkeypatch.setattr("shardkeep.stores.local.WriteFile.write_at", fail)
    with pytest.raises(shardkeep.StorageError, match="bad disk"):
        shardkeep.save(state, tmp_path / "x", memory_budget=32 << 20)
    pools = [o for o in _alive(BufferPool)]
    assert not pools


def _alive(kind):
    import gc

    gc.collect()
    return [o for o in gc.get_objects() if type(o) is kind]


@pytest.mark.parametrize("has_room", [True, False])
def test_a_snapshot_holds_what_was_there(tmp_path, device, has_room):
    """The first save, for which the arena is not ready, and those after it."""
    device.has_room = has_room
    rng = np.random.default_rng(0)
    with shardkeep.Checkpointer() as keeper:
        for step in range(3):
            state = {
                "large": rng.integers(0, 255, (1300, 1000), np.uint8),
                "strided": rng.random((300, 40)).T,
                "small": {str(n): rng.random(n) for n in range(50)},
                "step": step,
            }
            expected = {"large": state["large"].copy(), "strided": state["strided"].copy()}
            handle = keeper.async_save(state, tmp_path / str(step))
            for array in (state["large"], state["strided"]):
                array[:] = 0
            handle.result(60)
            found = shardkeep.open(tmp_path / str(step))
            for name, array in expected.items():
                np.testing.assert_array_equal(found[name][...], array)
            assert device.pinned > 0
    assert device.pinned == 0


def test_an_arena_made_ready_before_is_copied_to_at_once(tmp_path, device):
    device.has_room = False
    state = {"large": np.arange(100_000.0)}
    with shardkeep.Checkpointer() as keeper:
        keeper.prewarm(state)
        assert device.pinned > 0
        handle = keeper.async_save(state, tmp_path / "a")
        state["large"][:] = 0
        handle.result(60)
    np.testing.assert_array_equal(
        shardkeep.open(tmp_path / "a")["large"][...], np.arange(100_000.0)
    )


class Owned:
    """All arrays of two dimensions belong to an optimizer."""

    def __init__(self, device, monkeypatch):
        self.device = device
        self.duplicate = device.duplicate
        self.duplicated = []
        self.may_duplicate = threading.Event()
        self.may_arrive = threading.Event()
        self.were_changed = False
        monkeypatch.setattr(device, "duplicate", self.noted_duplicate)
        monkeypatch.setattr(device, "arrival", lambda arrival=device.arrival: self.late(arrival()))
        monkeypatch.setattr(numpy_arrays.NumpyArrays, "stepped", lambda _, values: self.of(values))

    def of(self, values):
        which = [value.ndim == 2 for value in values]
        spans = np.array([[address_of(v), address_of(v) + v.nbytes] for v in values], np.uint64)
        return Stepped(which, spans, lambda: [self.were_changed] * len(values), np.array(which))

    def noted_duplicate(self, sources, beside=()):
        name = threading.current_thread().name
        self.beside = len(beside)
        self.duplicated.append((name, len(sources)))
        if name == "shardkeep-stage":
            assert self.may_duplicate.wait(30)
        return self.duplicate(sources)

    def late(self, arrived):
        return lambda: self.may_arrive.is_set() and arrived()


@pytest.fixture
def owned(device, monkeypatch):
    found = Owned(device, monkeypatch)
    yield found
    found.may_duplicate.set()
    found.may_arrive.set()


def lazy_state():
    weights = {str(n): np.full((50, 40 + n), n, np.int32) for n in range(9)}
    return {"weights": weights, "counts": np.arange(70.0), "step": 3}


def check_lazy(path, weights):
    found = shardkeep.open(path)
    for name, array in weights.items():
        np.testing.assert_array_equal(found["weights"][name][...], array)
    np.testing.assert_array_equal(found["counts"][...], np.arange(70.0))


def test_a_first_lazy_save_leaves_it_to_a_thread_to_have_the_device_keep_weights(tmp_path, owned):
    """The caller waits for none of them, and an optimizer only until the device has kept them."""
    state = lazy_state()
    expected = {name: array.copy() for name, array in state["weights"].items()}
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save(state, tmp_path / "a", snapshot="lazy")
        state["counts"][:] = -1
        assert owned.duplicated[0] == ("MainThread", 1)
        assert not handle.staged.done()
        owned.may_duplicate.set()
        handle.wait_staged(30)  # though nothing has arrived
        assert owned.duplicated[1:] == [("shardkeep-stage", 9)]
        assert owned.beside == 1
        for array in state["weights"].values():
            array[:] = -1
        owned.were_changed = True
        owned.may_arrive.set()
        handle.result(60)
    check_lazy(tmp_path / "a", expected)


def on_the_host(monkeypatch, shape):
    """Arrays of this shape are in plain memory."""
    adapter = numpy_arrays.NumpyArrays
    sources = adapter.sources

    def of(self, value, where):
        found = sources(self, value, where)
        return [HostSource(s.array) for s in found] if value.shape == shape else found

    monkeypatch.setattr(adapter, "sources", of)


@pytest.mark.parametrize("what", ["no room", "much on the host"])
def test_what_a_device_cannot_keep_is_waited_for(tmp_path, device, owned, monkeypatch, what):
    state = lazy_state()
    expected = {name: array.copy() for name, array in state["weights"].items()}
    owned.may_duplicate.set()
    keeps = owned.duplicate
    monkeypatch.setattr(owned, "duplicate", lambda some: None if len(some) == 9 else keeps(some))
    if what == "much on the host":
        on_the_host(monkeypatch, (50, 43))
        monkeypatch.setattr(taking, "MOST_ON_HOST", 50 * 43 * 4 - 1)
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save(state, tmp_path / "a", snapshot="lazy")
        with pytest.raises(TimeoutError):
            handle.wait_staged(0.3)
        owned.may_arrive.set()
        handle.wait_staged(30)
        for array in state["weights"].values():
            array[:] = -1
        handle.result(60)
    check_lazy(tmp_path / "a", expected)


def test_what_an_optimizer_has_on_the_host_is_kept_beside(tmp_path, owned, monkeypatch):
    """As the steps that Adam counts: one of those would have the next step wait for the arena."""
    on_the_host(monkeypatch, (50, 43))
    state = lazy_state()
    expected = {name: array.copy() for name, array in state["weights"].items()}
    owned.may_duplicate.set()
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save(state, tmp_path / "a", snapshot="lazy")
        handle.wait_staged(30)
        assert owned.duplicated[1:] == [("shardkeep-stage", 8)]
        for array in state["weights"].values():
            array[:] = -1
        owned.may_arrive.set()
        handle.result(60)
    check_lazy(tmp_path / "a", expected)


def test_whoever_is_told_that_the_state_may_change_may_wait_for_the_save(tmp_path, owned):
    owned.may_arrive.set()
    found = queue.SimpleQueue()
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save(lazy_state(), tmp_path / "a", snapshot="lazy")
        handle.staged.add_done_callback(lambda _: found.put(handle.result(10)))
        owned.may_duplicate.set()
        assert found.get(timeout=10) is handle.result(10)


def test_nothing_of_a_state_is_held_once_it_may_change(tmp_path, owned, monkeypatch):
    """Neither where all was kept by the device, nor where nothing belongs to an optimizer."""
    owned.may_duplicate.set()
    for own in (True, False):
        owned.may_arrive.clear()
        state = {"weights": np.ones((50, 40)), "counts": np.ones(7)}
        if not own:
            state["weights"] = np.ones(50)
        held = [weakref.ref(array) for array in state.values()]
        with shardkeep.Checkpointer() as keeper:
            handle = keeper.async_save(state, tmp_path / str(own), snapshot="lazy")
            handle.wait_staged(30)
            del state
            gc.collect()
            assert [array for array in held if array() is not None] == []
            owned.may_arrive.set()
            handle.result(60)


def test_a_device_need_not_keep_what_a_save_had_that_has_ended(
    tmp_path, device, owned, monkeypatch
):
    may_begin = threading.Event()
    monkeypatch.setattr(device, "be_quiet", lambda: may_begin.wait(30))
    owned.may_duplicate.set()
    owned.may_arrive.set()
    with shardkeep.Checkpointer() as keeper:
        with broken_disk(monkeypatch):
            handle = keeper.async_save(lazy_state(), tmp_path / "a", snapshot="lazy")
            with pytest.raises(shardkeep.StorageError):
                handle.result(60)
        may_begin.set()
        keeper.async_save(lazy_state(), tmp_path / "b").result(60)
    assert ("shardkeep-stage", 9) not in owned.duplicated
    check_lazy(tmp_path / "b", lazy_state()["weights"])


@contextlib.contextmanager
def broken_disk(monkeypatch, may_fail=None):
    def allocate(self, nbytes):
        assert may_fail is None or may_fail.wait(30)
        raise OSError(errno.ENOSPC, "nothing left")

    with monkeypatch.context() as patched:
        patched.setattr(WriteFile, "allocate", allocate)
        yield


def test_a_save_that_has_failed_holds_nothing(tmp_path, owned, monkeypatch):
    """The device had kept its chunks by then; the error that is kept has seen them."""
    doubles, may_fail = [], threading.Event()
    keeps = owned.duplicate

    def noted(sources):
        found = keeps(sources)
        doubles.extend(weakref.ref(source.array) for source in found)
        return found

    monkeypatch.setattr(owned, "duplicate", noted)
    owned.may_duplicate.set()
    with shardkeep.Checkpointer() as keeper:
        with broken_disk(monkeypatch, may_fail):
            handle = keeper.async_save(lazy_state(), tmp_path / "a", snapshot="lazy")
            handle.wait_staged(30)
            assert len(doubles) == 10
            may_fail.set()
            with pytest.raises(shardkeep.StorageError):
                handle.result(60)
        for thread in threading.enumerate():
            if thread.name == "shardkeep-stage":
                thread.join(30)
        gc.collect()
        assert [array for array in doubles if array() is not None] == []


def test_weights_that_change_before_the_device_keeps_them_are_an_error(tmp_path, owned):
    state = lazy_state()
    owned.may_arrive.set()
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save(state, tmp_path / "a", snapshot="lazy")
        owned.were_changed = True
        owned.may_duplicate.set()
        with pytest.raises(shardkeep.PlanError, match=r"weights\.0.*changed before"):
            handle.wait_staged(30)
        with pytest.raises(shardkeep.PlanError, match="changed before"):
            handle.result(60)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
