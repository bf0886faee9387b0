"""Elements on a device travel while something else is done, and are never used before they arrive.

The device here is one of tests: what is begun happens only when it is waited for, and memory that
is used too early holds something else.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep.adapters import numpy_arrays
from shardkeep.arrays import HostSink, HostSource, StagedSink, StagedSource
from shardkeep.engine.budget import BufferPool
from shardkeep.engine.pages import page_aligned


class Device:
    """Copies that are begun are done when somebody waits for them, and not before."""

    def __init__(self):
        self.begun = threading.local()
        self.late = 0

    def allocate(self, nbytes):
        return page_aligned(nbytes)

    def begin(self, copy):
        self.begun.__dict__.setdefault("copies", []).append(copy)

    def fence(self):
        copies = self.begun.__dict__.setdefault("copies", [])
        self.begun.copies = []
        lock, done = threading.Lock(), []

        def wait():
            with lock:
                if not done:
                    for copy in copies:
                        copy()
                        self.late += 1
                    done.append(True)

        return wait


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
    monkeypatch.setattr(adapter, "settle", lambda self, values: DEVICES[-1])
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
    rng = np.random.default_rng(0)
    state = {f"t{n}": rng.integers(0, 9, shape, np.int32) for n, shape in enumerate(shapes)}
    state["turned"] = rng.integers(0, 9, (300, 200)).T
    shardkeep.save(state, path, overwrite=True, memory_budget=budget)
    target = {name: np.zeros_like(array) for name, array in state.items()}
    shardkeep.load(target, path, memory_budget=budget)
    for name, array in state.items():
        assert np.array_equal(target[name], array), name
    assert device.late


def test_digests_are_those_of_what_has_arrived(tmp_path, device):
    """Two tensors that differ are not taken for equal, however small they are."""
    state = {"a": np.zeros(5000), "b": np.arange(5000.0)}
    shardkeep.save(state, tmp_path)
    tied = np.full(5000, -1.0)
    with pytest.raises(shardkeep.MismatchError):
        shardkeep.load({"a": tied, "b": tied}, tmp_path)


def test_many_files_and_units(tmp_path, device, monkeypatch):
    monkeypatch.setattr("shardkeep.formats.native.writer.io_threads", lambda ranks=1: 4)
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
