"""`writer="process"`: the same files as ever, and no death of either process does harm."""

import contextlib
import errno
import gc
import logging
import os
import queue
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep import CheckpointNotFoundError, SingleProcess, StorageError, ThreadRanks
from shardkeep.coordination import Patience
from shardkeep.engine import arena as engine_arena
from shardkeep.engine import process as engine_process
from shardkeep.engine.arena import Arena
from shardkeep.engine.frames import Channel, Job
from shardkeep.engine.process import WriterProcess, can_start
from shardkeep.engine.snapshot import Snapshot
from shardkeep.formats.native import detached
from shardkeep.formats.native.commit import read_record
from shardkeep.formats.native.layout import Limits
from shardkeep.stores.local import LocalStore

pytestmark = pytest.mark.skipif(not can_start(), reason="no shared memory by descriptor")

MIB = 1 << 20


@pytest.fixture
def keeper():
    with shardkeep.Checkpointer(writer="process") as kept:
        yield kept


@pytest.fixture(scope="module")
def long_lived():
    """For tests that leave it as it was."""
    with shardkeep.Checkpointer(writer="process") as kept:
        yield kept


def pid_of(keeper) -> int:
    pid = keeper._background.process.pid
    assert pid is not None
    return pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.02)


def some_state(mib: int = 1, seed: int = 0) -> dict:
    numbers = np.random.default_rng(seed)
    parts = {f"w{i}": numbers.random((mib * MIB) // 32) for i in range(4)}
    return {**parts, "step": seed}


def check(path, state) -> None:
    """What is there is whole, and is this state bit for bit."""
    assert shardkeep.verify(path).ok
    with shardkeep.open(path) as opened:
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                found = opened[name].numpy()
                assert found.dtype == value.dtype
                assert found.tobytes() == value.tobytes(), name


def payloads(path) -> list[bytes]:
    """The data files, without what depends on the id of the save."""
    record = read_record(LocalStore(path))
    return [
        (path / row.name).read_bytes()[: row.payload].replace(record.save_id.encode(), b"?")
        for row in record.files
    ]


def left_in(path) -> list[str]:
    return sorted(os.listdir(path / "data")) if (path / "data").exists() else []


@pytest.fixture
def told(monkeypatch):
    """Jobs that processes were given."""
    put, send = queue.SimpleQueue(), Channel.send

    def tell(self, message, *given, **named):
        send(self, message, *given, **named)
        if isinstance(message, Job):
            put.put(message)

    monkeypatch.setattr(Channel, "send", tell)
    return put


@contextlib.contextmanager
def held_staging(monkeypatch):
    """Staging waits until it is let go on."""
    let, copy = threading.Event(), Snapshot.copy

    def slow(self, copying):
        assert let.wait(60)
        copy(self, copying)

    # What is copied late is copied by a thread: the caller goes on.
    monkeypatch.setattr(Snapshot, "copy", slow)
    try:
        yield let
    finally:
        let.set()
        monkeypatch.undo()


# --- what is written

STATES = {
    "scalars": {"a": np.array(2.5), "b": np.array(True), "c": np.array(1 + 2j), "step": 3},
    "empty": {"none": np.zeros((0, 4), np.float32), "one": np.ones(1, np.int8)},
    "only values": {"step": 3, "name": "x", "blob": b"\0" * 1000},
    "nothing": {},
    "complex128": {"z": np.arange(200_000) * (1 - 2j), "u": np.arange(3, dtype=np.uint8)},
    "strided": {"t": np.arange(600_000.0).reshape(600, 1000).T, "s": np.arange(90_000)[::-3]},
    "bool": {"m": np.arange(100_001) % 3 == 0, "h": np.arange(7, dtype=np.float16)},
    "big endian": {"b": np.arange(70_000, dtype=">i4")},
    "many small": {f"p{i}": np.full(i % 7 + 1, i, np.int16) for i in range(12_000)},
    "large": {"w": np.arange(3_000_000.0), "v": np.arange(2_100_001, dtype=np.int32)},
}


@pytest.mark.parametrize("name", STATES)
def test_files_are_those_of_a_synchronous_save(tmp_path, long_lived, name):
    state = STATES[name]
    here, there = tmp_path / "here", tmp_path / "there"
    shardkeep.save(state, here)
    result = long_lived.async_save(state, there).result()
    assert shardkeep.verify(there).ok
    assert payloads(there) == payloads(here)
    assert not payloads(there) or result.stats["written_files"] == len(payloads(there))


def test_large_chunks_are_written_as_they_arrive(tmp_path, long_lived):
    state = {"large": np.random.default_rng(1).random(9 * MIB), "small": np.arange(5)}
    long_lived.async_save(state, tmp_path).result()
    check(tmp_path, state)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_state_comes_back(tmp_path_factory, long_lived, data):
    path = tmp_path_factory.mktemp("any")
    dtypes = st.sampled_from(["?", "u1", "<i2", ">f4", "f8", "c8", "c16"])
    shapes = st.lists(st.integers(0, 40), max_size=3)
    state = {}
    for number in range(data.draw(st.integers(1, 5))):
        dtype, shape = np.dtype(data.draw(dtypes)), tuple(data.draw(shapes))
        count = int(np.prod(shape)) * dtype.itemsize
        raw = np.random.default_rng(number).integers(0, 2, count, np.uint8)
        state[f"t{number}"] = raw.view(dtype).reshape(shape).T
    shardkeep.save(state, path / "here")
    long_lived.async_save(state, path / "there").result()
    assert shardkeep.verify(path / "there").ok
    assert payloads(path / "there") == payloads(path / "here")


def test_torch_states_and_late_copies(tmp_path, keeper):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(500, 500, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 500, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    keeper.async_save(state, tmp_path / "a", snapshot="lazy").result()
    shardkeep.save(state, tmp_path / "b")
    assert payloads(tmp_path / "a") == payloads(tmp_path / "b")


def test_several_files_at_a_time(tmp_path, long_lived):
    limits = Limits(payload=MIB, together=8, least=MIB)
    state = {f"t{i}": np.random.default_rng(i).random(50_000 + i) for i in range(40)}
    writers = [shardkeep.NativeWriter(tmp_path / n, limits=limits) for n in ("a", "b")]
    shardkeep.save(state, storage_writer=writers[0])
    long_lived.async_save(state, storage_writer=writers[1]).result()
    assert len(payloads(tmp_path / "a")) > 8
    assert payloads(tmp_path / "b") == payloads(tmp_path / "a")
    assert shardkeep.verify(tmp_path / "b").ok


def test_ranks_have_a_process_each(tmp_path):
    state = [some_state(seed=0), some_state(seed=1)]

    def save(coordinator):
        rank = coordinator.rank
        with shardkeep.Checkpointer(process_group=coordinator, writer="process") as kept:
            mine = {f"r{rank}": state[rank]["w0"]}
            kept.async_save(mine, tmp_path).result()
            return pid_of(kept)

    pids = ThreadRanks(2).run(save)
    assert len(set(pids)) == 2
    check(tmp_path, {"r0": state[0]["w0"], "r1": state[1]["w0"]})
    assert not any(map(is_running, pids))


def test_blake3(tmp_path, long_lived):
    pytest.importorskip("blake3")
    writer = shardkeep.NativeWriter(tmp_path, digest="blake3")
    long_lived.async_save(some_state(), storage_writer=writer).result()
    assert writer.process is None
    assert shardkeep.verify(tmp_path).ok


@pytest.mark.parametrize("is_told", [True, False])
def test_files_have_the_permissions_of_the_programs(tmp_path, long_lived, monkeypatch, is_told):
    if not is_told:
        none = tmp_path / "none"
        monkeypatch.setattr(detached, "open", lambda *given: none.open(), raising=False)
    for mask in (0o022, 0o077, 0o027):
        path, before = tmp_path / str(mask), os.umask(mask)
        try:
            long_lived.async_save(some_state(), path).result()
            assert os.umask(mask) == mask
        finally:
            os.umask(before)
        modes = {file.stat().st_mode & 0o777 for file in (path / "data").iterdir()}
        assert modes == {0o666 & ~mask}


# --- the process


def test_no_framework_and_nothing_of_the_directory_is_in_the_process(tmp_path, keeper, monkeypatch):
    pytest.importorskip("torch")
    for name in ("torch", "numpy", "msgspec", "xxhash", "shardkeep", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('picked up by accident')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    keeper.async_save(some_state(), tmp_path / "a").result()
    check(tmp_path / "a", some_state())
    maps = Path(f"/proc/{pid_of(keeper)}/maps").read_text()
    assert "libpython" in maps or "python" in maps
    for library in ("torch", "cuda", "jax", "mindspore"):
        assert f"lib{library}" not in maps
        assert f"/{library}/" not in maps


def test_it_is_modest(tmp_path, long_lived):
    long_lived.async_save(some_state(), tmp_path).result()
    assert os.getpriority(os.PRIO_PROCESS, pid_of(long_lived)) == min(
        19, os.getpriority(os.PRIO_PROCESS, 0) + 10
    )


def test_ten_saves_and_growing_memory_use_one_process(tmp_path, keeper):
    pids = set()
    for step in range(10):
        state = some_state(1 + step, step)
        keeper.async_save(state, tmp_path / str(step)).result()
        pids.add(pid_of(keeper))
    for step in (0, 4, 9):
        check(tmp_path / str(step), some_state(1 + step, step))
    assert len(pids) == 1
    maps = Path(f"/proc/{pids.pop()}/maps").read_text()
    assert maps.count("shardkeep-arena") == 1, "memory from before is kept"


def test_nothing_is_left_after_close(tmp_path):
    def once(step):
        with shardkeep.Checkpointer(writer="process") as kept:
            kept.async_save(some_state(), tmp_path / str(step)).result()
            return pid_of(kept)

    once("first")
    before = set(os.listdir("/proc/self/fd"))
    pids = [once(step) for step in range(2)]
    assert len(os.listdir("/proc/self/fd")) == len(before)
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_keeper_that_is_dropped_takes_its_process_along(tmp_path):
    kept = shardkeep.Checkpointer(writer="process")
    kept.async_save(some_state(), tmp_path).result()
    pid = pid_of(kept)
    del kept
    gc.collect()
    wait_gone(pid)


def test_signals_for_the_program_do_not_end_it(tmp_path, long_lived):
    long_lived.async_save(some_state(), tmp_path / "a").result()
    pid = pid_of(long_lived)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert os.getpgid(pid) != os.getpgid(0)
    long_lived.async_save(some_state(), tmp_path / "b").result()
    assert pid_of(long_lived) == pid


def test_prewarm_starts_it(tmp_path, keeper):
    keeper.prewarm(some_state())
    pid = pid_of(keeper)
    keeper.async_save(some_state(), tmp_path).result()
    assert pid_of(keeper) == pid


def test_what_a_program_without_stdio_prints_goes_into_no_file_of_ours(tmp_path):
    code = """
        import os, sys
        for number in (0, 1, 2):
            os.close(number)
        import numpy as np
        import shardkeep
        path = sys.argv[1]
        keeper = shardkeep.Checkpointer(writer="process")
        state = {"w": np.ones(1 << 18)}
        keeper.prewarm(state)
        for step in range(3):
            handle = keeper.async_save(state, f"{path}/{step}")
            for number in (0, 1, 2):
                try:
                    os.write(number, b"printed, to nobody it was thought")
                except OSError:
                    pass
            handle.result()
        pid = keeper._background.process.pid
        theirs = [os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1, 2)]
        ours = {int(name) for name in os.listdir("/proc/self/fd")}
        with open(f"{path}/seen", "w") as file:
            print(theirs, sorted(ours & {0, 1, 2}), file=file)
        keeper.close()
        os._exit(0)  # the interpreter would complain of closed streams
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], env=env, timeout=60
    )
    assert done.returncode == 0
    for step in range(3):
        check(tmp_path / str(step), {"w": np.ones(1 << 18)})
    # The one of ours is of the directory that was listed.
    assert (tmp_path / "seen").read_text() == f"{['/dev/null'] * 3} [0]\n"


def test_old_memory_is_gone_before_more_is_asked_for(tmp_path, keeper, monkeypatch):
    keeper.async_save(some_state(), tmp_path / "a").result()
    pid = pid_of(keeper)
    seen = []

    def look(room):
        seen.append(Path(f"/proc/{pid}/maps").read_text().count("shardkeep-arena"))
        return room

    monkeypatch.setattr(engine_arena, "available_memory", lambda: look(1))
    for _ in range(2):
        with pytest.raises(MemoryError, match="1 are available"):
            keeper.async_save(some_state(8), tmp_path / "b").result()
    monkeypatch.setattr(engine_arena, "available_memory", lambda: look(1 << 40))
    for step in (8, 16, 24, 32):
        keeper.async_save(some_state(step, step), tmp_path / str(step)).result()
        check(tmp_path / str(step), some_state(step, step))
    assert pid_of(keeper) == pid
    assert len(seen) >= 5
    assert not any(seen)


def test_an_arena_that_is_closed_is_let_go_of():
    arena, process = Arena(shared=True), WriterProcess()
    for _ in range(3):
        arena.reserve(MIB)
        process.share(arena)  # the first time before it has started
        pid = process.pid
        arena.close()
        assert process.pid == pid
        assert "shardkeep-arena" not in Path(f"/proc/{pid}/maps").read_text()
    arena.reserve(MIB)
    process.share(arena)
    process.close()
    arena.close()


def test_a_stopped_process_is_ended_where_it_holds_memory(tmp_path, keeper, monkeypatch):
    monkeypatch.setattr(engine_process, "END_S", 1.0)
    keeper.async_save(some_state(), tmp_path / "a").result()
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGSTOP)
    keeper.async_save(some_state(8), tmp_path / "b").result()
    assert not is_running(pid)
    check(tmp_path / "b", some_state(8))


# --- errors


def test_an_error_of_the_process_is_the_error_of_the_save(tmp_path, keeper, monkeypatch):
    write = shardkeep.NativeWriter.write_data

    def without_directory(self, plan, planner):
        (Path(self.checkpoint_id) / "data").rmdir()
        return write(self, plan, planner)

    monkeypatch.setattr(shardkeep.NativeWriter, "write_data", without_directory)
    with pytest.raises(StorageError, match=r"writing .*No such file") as caught:
        keeper.async_save(some_state(), tmp_path / "a").result()
    assert caught.value.errno == errno.ENOENT
    assert not caught.value.transient
    monkeypatch.undo()
    keeper.async_save(some_state(), tmp_path / "b").result()
    check(tmp_path / "b", some_state())


def test_an_error_of_staging_is_the_error_of_the_save(tmp_path, keeper, monkeypatch):
    def fail(self, copying):
        raise MemoryError("no more")

    monkeypatch.setattr(Snapshot, "copy", fail)
    handle = keeper.async_save(some_state(), tmp_path / "a")
    with pytest.raises(MemoryError, match="no more"):
        handle.result()
    monkeypatch.undo()
    assert left_in(tmp_path / "a") == []
    keeper.async_save(some_state(), tmp_path / "b").result()
    check(tmp_path / "b", some_state())


def test_a_python_that_does_not_start_is_an_error(tmp_path, keeper, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    with pytest.raises(StorageError, match="could not be started"):
        keeper.async_save(some_state(), tmp_path / "a").result()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StorageError, match="ended with exit code 1"):
        keeper.async_save(some_state(), tmp_path / "b").result()
    script = tmp_path / "mute"
    script.write_text("#!/bin/sh\nexec sleep 100\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(engine_process, "START_S", 1.0)
    with pytest.raises(StorageError, match="did not start within 1 s"):
        keeper.async_save(some_state(), tmp_path / "c").result()
    monkeypatch.undo()
    keeper.async_save(some_state(), tmp_path / "d").result()
    check(tmp_path / "d", some_state())


def test_storages_of_others_are_written_by_a_thread(tmp_path, keeper, caplog):
    def pass_on(name):
        return lambda self, *given, **named: getattr(self.inner, name)(*given, **named)

    names = [*shardkeep.StorageWriter.__abstractmethods__, "settle", "abort", "storage_meta"]
    foreign = type("Foreign", (shardkeep.StorageWriter,), {name: pass_on(name) for name in names})()
    foreign.inner = shardkeep.NativeWriter(tmp_path)
    with caplog.at_level(logging.INFO, "shardkeep"):
        keeper.async_save(some_state(), tmp_path, storage_writer=foreign).result()
    assert "Foreign is not made for that" in caplog.text
    check(tmp_path, some_state())


def test_stores_of_this_process_are_written_by_a_thread(tmp_path, keeper, caplog):
    class OtherStore(LocalStore):
        pass

    writer = shardkeep.NativeWriter(tmp_path / "a", open_store=OtherStore)
    with caplog.at_level(logging.INFO, "shardkeep"):
        keeper.async_save(some_state(), storage_writer=writer).result()
    assert "written by a thread" in caplog.text
    check(tmp_path / "a", some_state())


def test_systems_without_such_memory_are_told(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ValueError, match="writer='process' needs memory"):
        shardkeep.Checkpointer(writer="process")


@pytest.mark.parametrize("executable", ["", None])
def test_programs_that_know_of_no_python_are_told(monkeypatch, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(ValueError, match="a Python that can be started"):
        shardkeep.Checkpointer(writer="process")


def test_a_process_that_ends_at_once_is_not_said_to_be_late(tmp_path, keeper, monkeypatch):
    script = tmp_path / "brief"
    # The end of the socket is seen well before that of the process.
    script.write_text(
        f"#!{sys.executable}\nimport os, time\nos.closerange(3, 999)\ntime.sleep(.5)\nos._exit(3)"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(StorageError, match="ended with exit code 3"):
        keeper.async_save(some_state(), tmp_path / "a").result()


# --- the process dies


def killed(match="killed by SIGKILL"):
    return pytest.raises(StorageError, match=match)


def test_death_before_anything_is_written(tmp_path, keeper, told):
    keeper.async_save(some_state(seed=1), tmp_path).result()
    told.get()
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGSTOP)
    handle = keeper.async_save(some_state(seed=2), tmp_path, overwrite=True)
    told.get(timeout=30)
    os.kill(pid, signal.SIGKILL)
    with killed() as caught:
        handle.result()
    assert caught.value.transient
    check(tmp_path, some_state(seed=1))
    keeper.async_save(some_state(seed=3), tmp_path, overwrite=True).result()
    check(tmp_path, some_state(seed=3))
    assert pid_of(keeper) != pid
    assert len(left_in(tmp_path)) == 2


def begin_with_one_stopped(kept, rank, states, path):
    """A second save of two ranks, the second of which has a process that stands still."""
    kept.async_save({f"r{rank}": states[rank]}, path).result()
    if rank == 1:
        os.kill(pid_of(kept), signal.SIGSTOP)
    return kept.async_save({f"r{rank}": states[2 + rank]}, path, overwrite=True)


def test_death_of_one_ranks_process_fails_the_save_on_all(tmp_path, told):
    states = [some_state(seed=seed)["w0"] for seed in range(4)]

    def save(coordinator):
        rank = coordinator.rank
        with shardkeep.Checkpointer(process_group=coordinator, writer="process") as kept:
            handle = begin_with_one_stopped(kept, rank, states, tmp_path)
            if rank == 1:
                for _ in range(4):  # two of each save
                    told.get(timeout=30)
                os.kill(pid_of(kept), signal.SIGKILL)
            error = handle.exception()
            with shardkeep.open(tmp_path) as opened:
                whole = opened[f"r{rank}"].numpy().tobytes() == states[rank].tobytes()
            kept.async_save({f"r{rank}": states[2 + rank]}, tmp_path, overwrite=True).result()
            return error, whole

    for error, whole in ThreadRanks(2).run(save):
        assert isinstance(error, StorageError)
        assert "killed by SIGKILL" in str(error)
        assert whole
    check(tmp_path, {"r0": states[2], "r1": states[3]})
    assert len(left_in(tmp_path)) == 3


# --- the process is stopped


def test_a_process_that_is_stopped_for_long_is_ended(tmp_path, keeper):
    keeper.async_save(some_state(seed=1), tmp_path).result()
    pid = pid_of(keeper)
    keeper._background.process.gone_s = 2.0
    os.kill(pid, signal.SIGSTOP)
    handle = keeper.async_save(some_state(seed=2), tmp_path, overwrite=True)
    with pytest.raises(StorageError, match="was stopped for 2 s") as caught:
        handle.result(30)
    assert caught.value.transient
    assert not is_running(pid)
    check(tmp_path, some_state(seed=1))
    keeper.async_save(some_state(seed=3), tmp_path, overwrite=True).result()
    check(tmp_path, some_state(seed=3))
    assert len(left_in(tmp_path)) == 2


def test_a_process_that_is_stopped_for_a_moment_goes_on(tmp_path, keeper):
    keeper.async_save(some_state(seed=1), tmp_path).result()
    pid = pid_of(keeper)
    keeper._background.process.gone_s = 3.0
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        handle = keeper.async_save(some_state(seed=2), tmp_path, overwrite=True)
        time.sleep(1.5)
        assert not handle.done()
        os.kill(pid, signal.SIGCONT)
        handle.result(30)
    assert pid_of(keeper) == pid
    check(tmp_path, some_state(seed=2))


def test_one_ranks_process_that_is_stopped_fails_the_save_on_all(tmp_path):
    """After as long as a rank that is stopped would be given up."""
    states = [some_state(seed=seed)["w0"] for seed in range(4)]

    def save(coordinator):
        rank = coordinator.rank
        with shardkeep.Checkpointer(process_group=coordinator, writer="process") as kept:
            handle = begin_with_one_stopped(kept, rank, states, tmp_path)
            return (handle.exception(30),)

    ranks = ThreadRanks(2, patience=Patience(beat_s=0.5, gone_s=2.0))
    for (error,) in ranks.run(save):
        assert isinstance(error, StorageError)
        assert "was stopped for 2 s" in str(error)
    check(tmp_path, {"r0": states[0], "r1": states[1]})
    assert len(left_in(tmp_path)) == 3


def test_a_process_has_as_long_as_a_rank_of_any_group():
    class Own(SingleProcess):
        patience = Patience(beat_s=0.5, gone_s=2.0)

    with shardkeep.Checkpointer(process_group=Own(), writer="process") as kept:
        assert kept._behind().process.gone_s == 2.0


def test_a_group_of_somebody_elses_need_not_say_how_long_it_waits(tmp_path):
    class Bare:
        """Has what a coordinator must have, and nothing besides."""

        def __init__(self):
            self._inner = SingleProcess()

        def __getattr__(self, name):
            if name in ("patience", "twin"):
                raise AttributeError(name)
            return getattr(self._inner, name)

    with shardkeep.Checkpointer(process_group=Bare(), writer="process") as kept:
        kept.async_save({"a": np.ones(3)}, tmp_path / "a").result()
        assert kept._behind().process.gone_s == WriterProcess().gone_s
    assert shardkeep.verify(tmp_path / "a").ok


def test_death_while_the_state_is_staged(tmp_path, keeper, told, monkeypatch):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(300, 300)
    state = {"model": model.state_dict()}
    keeper.async_save(state, tmp_path / "a").result()
    told.get()
    pid = pid_of(keeper)
    with held_staging(monkeypatch) as let:
        caller = {}
        thread = threading.Thread(
            target=lambda: caller.update(handle=keeper.async_save(state, tmp_path / "b"))
        )
        thread.start()
        told.get(timeout=30)
        os.kill(pid, signal.SIGKILL)
        let.set()
        thread.join()
    with killed():
        caller["handle"].result()
    assert shardkeep.verify(tmp_path / "a").ok
    with pytest.raises(CheckpointNotFoundError):
        shardkeep.open(tmp_path / "b")
    assert left_in(tmp_path / "b") == []


def test_death_between_saves_costs_nothing(tmp_path, keeper, caplog):
    keeper.async_save(some_state(), tmp_path / "a").result()
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    keeper.async_save(some_state(), tmp_path / "b").result()
    check(tmp_path / "b", some_state())
    assert "killed by SIGKILL" in caplog.text


def kill_at_random(path, keeper, rounds: int, mib: int, chance: random.Random) -> int:
    """Overwrite one checkpoint again and again, and kill the writer meanwhile; says how often."""
    whole = some_state(mib, 0)
    keeper.async_save(whole, path, overwrite=True).result()
    begun = time.perf_counter()
    keeper.async_save(whole, path, overwrite=True).result()
    took = time.perf_counter() - begun
    deaths = 0
    for step in range(1, rounds + 1):
        state = some_state(mib, step)
        pid = pid_of(keeper)
        killer = threading.Timer(chance.uniform(0, took), os.kill, (pid, signal.SIGKILL))
        killer.start()
        error = keeper.async_save(state, path, overwrite=True).exception()
        killer.join()
        if error is None:
            whole = state
        else:
            assert isinstance(error, StorageError), error
            assert "killed by SIGKILL" in str(error)
            assert error.transient
            deaths += 1
        check(path, whole)
        assert len(left_in(path)) == len(payloads(path)) + 1
        whole = some_state(mib, 1000 + step)
        wait_gone(pid)
        keeper.async_save(whole, path, overwrite=True).result()
    return deaths


def test_death_at_random_moments(tmp_path, keeper):
    kill_at_random(tmp_path, keeper, 3, 16, random.Random())


@pytest.mark.slow
def test_death_at_many_random_moments(tmp_path, keeper):
    chance = random.Random()
    deaths = sum(kill_at_random(tmp_path, keeper, 20, mib, chance) for mib in (1, 32, 128))
    assert deaths >= 10


# --- cancelling


def test_cancelled_while_it_writes(tmp_path, keeper):
    state = some_state(64)
    keeper.async_save(state, tmp_path, overwrite=True).result()
    pid = pid_of(keeper)
    seen = threading.Event()
    go_on = threading.Event()

    def progress(nbytes):
        seen.set()
        go_on.wait(10)

    writer = shardkeep.NativeWriter(tmp_path, overwrite=True, progress=progress)
    handle = keeper.async_save(some_state(64, 1), storage_writer=writer)
    assert seen.wait(30)
    assert handle.cancel()
    go_on.set()
    handle_ended(handle)
    assert handle.cancelled()
    assert not is_running(pid)
    check(tmp_path, state)
    assert len(left_in(tmp_path)) == 2
    keeper.async_save(some_state(1, 2), tmp_path, overwrite=True).result()
    check(tmp_path, some_state(1, 2))


def test_cancelled_while_the_process_is_stuck(tmp_path, keeper, told):
    keeper.async_save(some_state(), tmp_path).result()
    told.get()
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGSTOP)
    handle = keeper.async_save(some_state(seed=1), tmp_path, overwrite=True)
    told.get(timeout=30)
    assert handle.cancel()
    handle_ended(handle)
    assert handle.cancelled()
    assert not is_running(pid)
    check(tmp_path, some_state())
    assert len(left_in(tmp_path)) == 2


def test_cancelled_while_a_stopped_process_takes_no_job(tmp_path, keeper):
    keeper.async_save(some_state(), tmp_path).result()
    pid = pid_of(keeper)
    os.kill(pid, signal.SIGSTOP)
    # More than a socket holds.
    large = {**some_state(seed=1), "value": bytes(8 * MIB)}
    handle = keeper.async_save(large, tmp_path, overwrite=True)
    time.sleep(0.3)
    assert handle.cancel()
    handle_ended(handle, 10)
    assert handle.cancelled()
    assert not is_running(pid)
    check(tmp_path, some_state())
    keeper.async_save(large, tmp_path, overwrite=True).result()
    check(tmp_path, large)


def test_cancelled_while_the_process_does_not_start(tmp_path, keeper, monkeypatch):
    script = tmp_path / "mute"
    script.write_text("#!/bin/sh\nexec sleep 100\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    handle = keeper.async_save(some_state(), tmp_path / "a")
    pid = pid_of(keeper)
    assert handle.cancel()
    handle_ended(handle, 10)
    assert handle.cancelled()
    assert not is_running(pid)


def handle_ended(handle, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not handle.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- the program dies

TRAINER = """
import os, signal, sys, time
import numpy as np
import shardkeep

path, writer = sys.argv[1:]
state = {f"w{i}": np.full(MIB << 17, 1.0) for i in range(4)}
keeper = shardkeep.Checkpointer(writer=writer)
keeper.async_save(state, path).result()
pid = keeper._background.process.pid if writer == "process" else 0
for value in state.values():
    value[:] = 2.0
"""

THEN = {
    "killed": """
if os.fork() == 0:
    time.sleep(15)  # as a data loader's worker, which holds the socket open
    os._exit(0)
handle = keeper.async_save(state, path, overwrite=True)
print(pid, flush=True)
time.sleep(60)
""",
    "stopped": """
os.kill(pid, signal.SIGSTOP)
handle = keeper.async_save(state, path, overwrite=True)
print(pid, flush=True)
""",
    "ends": """
handle = keeper.async_save(state, path, overwrite=True)
print(pid, flush=True)
""",
    "forks": """
child = os.fork()
if child == 0:
    keeper._background.process.close()
    keeper._background.arena.close()
    os._exit(0)
os.waitpid(child, 0)
keeper.async_save(state, path, overwrite=True).result()
assert keeper._background.process.pid == pid
print(pid, flush=True)
keeper.close()
""",
}


def start_trainer(
    path, then: str, mib: int = 8, writer: str = "process", **env
) -> subprocess.Popen:
    code = textwrap.dedent(TRAINER).replace("MIB", str(mib)) + THEN[then]
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path), writer],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env},
    )


def values_of(path) -> set[float]:
    assert shardkeep.verify(path).ok
    with shardkeep.open(path) as opened:
        return {float(x) for i in range(4) for x in np.unique(opened[f"w{i}"].numpy())}


def kill_trainer(path, mib: int, after: float) -> None:
    with start_trainer(path, "killed", mib) as trainer:
        pid = int(trainer.stdout.readline())
        time.sleep(after)
        trainer.kill()
        wait_gone(pid)
        trainer.stdout.close()
        trainer.stderr.close()
    assert len(values_of(path)) == 1


def test_the_program_is_killed_while_a_worker_of_it_lives_on(tmp_path):
    kill_trainer(tmp_path, 32, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 0.05, 0.1, 0.2, 0.4, 0.8])
def test_the_program_is_killed_at_other_moments(tmp_path, after):
    kill_trainer(tmp_path, 64, after)


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_the_end_of_the_program_completes_the_save(tmp_path, writer):
    with start_trainer(tmp_path, "ends", writer=writer) as trainer:
        out, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, err
    if sys.version_info < (3, 12):  # later ones start no thread any more
        assert values_of(tmp_path) == {2.0}
    assert len(values_of(tmp_path)) == 1
    assert not is_running(int(out) or -1)


def test_the_end_of_the_program_does_not_wait_for_a_stopped_process_for_ever(tmp_path):
    with start_trainer(tmp_path, "stopped", SHARDKEEP_EXIT_TIMEOUT_S="1") as trainer:
        out, err = trainer.communicate(timeout=60)
    assert "the program ended before" in err
    assert values_of(tmp_path) == {1.0}
    assert not is_running(int(out))


def test_a_fork_of_the_program_does_not_end_the_process(tmp_path):
    with start_trainer(tmp_path, "forks") as trainer:
        out, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 0, err
    assert values_of(tmp_path) == {2.0}
    assert not is_running(int(out))
