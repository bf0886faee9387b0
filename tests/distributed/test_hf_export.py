"""Files for Hugging Face from real ranks: read by torch and safetensors; ranks that fail or die."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from safetensors.torch import load_file

import shardkeep
from shardkeep import RankError, StorageError
from shardkeep.coordination import Patience

WORLD = 4
SHORT = Patience(beat_s=0.25, gone_s=2.0, linger_s=1.0)
ROWS = 600


@pytest.fixture(scope="module")
def processes():
    pytest.importorskip("torch")
    from shardkeep.testing.processes import PRELOAD, RankServer

    with RankServer((*PRELOAD, "torch._dynamo", "shardkeep.formats.huggingface.writer")) as server:
        yield server


def whole():
    import torch

    generator = torch.Generator().manual_seed(5)
    return {
        "rows": torch.randn(ROWS + 3, 900, generator=generator),
        "columns": torch.randn(ROWS, 901, generator=generator).to(torch.bfloat16),
        "both": torch.randn(ROWS, 902, generator=generator),
        "middle": torch.randint(-9, 9, (5, 130, 700), generator=generator),
        "same": torch.randn(700, 700, generator=generator),
        "count": torch.tensor(12345678901),
        "flags": torch.tensor([True, False, True]),
    }


def state(world, *, empty=False):
    """DTensors on one and two dimensions of ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line = init_device_mesh("cpu", (world,))
    plane = init_device_mesh("cpu", (2, world // 2)) if world % 2 == 0 else line
    made = whole()
    if empty:
        made = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    two = [Shard(0), Shard(1)] if world % 2 == 0 else [Shard(1)]
    return {
        "rows": distribute_tensor(made["rows"], line, [Shard(0)]),
        "columns": distribute_tensor(made["columns"], line, [Shard(1)]),
        "both": distribute_tensor(made["both"], plane, two),
        "middle": distribute_tensor(made["middle"], line, [Shard(1)]),
        "same": distribute_tensor(made["same"], line, [Replicate()]),
        "count": made["count"],
        "flags": made["flags"],
    }


def export(rank, path, world, **options):
    call = {"memory_budget": 8 << 20}
    call |= {k: options.pop(k) for k in ("overwrite", "process_group") if k in options}
    writer = shardkeep.HuggingFaceWriter(max_shard_size="4MB", **options)
    shardkeep.save(state(world), path, storage_writer=writer, **call)


def load_by_torch(rank, path, world):
    """torch's own reader, into other shardings."""
    import torch
    import torch.distributed.checkpoint as dcp

    target = state(world, empty=True)
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(path))
    return {
        name: bool(torch.equal(_full(tensor), whole()[name])) for name, tensor in target.items()
    }


def load_by_us(rank, path, world):
    import torch

    target = state(world, empty=True)
    shardkeep.load(target, path)
    return {
        name: bool(torch.equal(_full(tensor), whole()[name])) for name, tensor in target.items()
    }


def _full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.slow), 4])
def test_torch_safetensors_and_we_read_what_ranks_wrote(processes, tmp_path, world):
    import torch

    path = str(tmp_path / "x")
    processes.run(world, export, path, world)
    found = {}
    for file in sorted((tmp_path / "x").glob("*.safetensors")):
        found |= load_file(file)
    assert found.keys() == whole().keys()
    for name, tensor in whole().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    other = {1: 2, 3: 4, 4: 3}[world]
    for reader in (load_by_torch, load_by_us):
        for told in processes.run(other, reader, path, other):
            assert all(told.values()), (reader.__name__, told)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_the_number_of_ranks_does_not_show(processes, tmp_path):
    for world in (1, 2, 4):
        processes.run(world, export, str(tmp_path / str(world)), world)
    names = sorted(os.listdir(tmp_path / "1"))
    for name in names:
        one, *others = ((tmp_path / str(world) / name).read_bytes() for world in (1, 2, 4))
        assert all(other == one for other in others), name


# --- ranks that fail


def failing(rank, path):
    """A disk that is full, on one rank."""
    from shardkeep.stores.local import WriteFile

    if rank == 2:
        WriteFile.write_at = _full_disk
    export(rank, path, WORLD)


def _full_disk(self, data, offset):
    raise OSError(28, "No space left on device")


def test_a_full_disk_on_one_rank_is_an_error_on_all(processes, tmp_path):
    outcomes = processes.outcomes(WORLD, failing, str(tmp_path / "x"))
    for outcome in outcomes:
        assert isinstance(outcome.error, StorageError)
        assert "No space left" in str(outcome.error)
        assert "rank 2" in str(outcome.error)
    assert not list(tmp_path.iterdir())


def dying(rank, path, victim, when):
    from shardkeep.adapters.torch_groups import TorchRanks
    from shardkeep.formats.huggingface.building import Building
    from shardkeep.formats.huggingface.gathering import Gathering
    from shardkeep.formats.huggingface.range_files import RangeFiles

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def die_after(name, cls):
        plain = getattr(cls, name)

        def run(self, *args, **options):
            plain(self, *args, **options)
            die()

        setattr(cls, name, run)

    if rank == victim:
        if when == "sending":
            Gathering.parts = die
        elif when == "writing":
            RangeFiles._write_job = die
        elif when == "syncing":
            RangeFiles.finish = die
        elif when == "before the commit":
            Building.commit = die
        else:
            die_after("commit", Building)
    export(rank, path, WORLD, process_group=TorchRanks(patience=SHORT), overwrite=True)


@pytest.mark.parametrize(
    ("victim", "when"),
    [
        (1, "sending"),
        pytest.param(3, "writing", marks=pytest.mark.slow),
        pytest.param(2, "syncing", marks=pytest.mark.slow),
        (0, "before the commit"),
        (0, "after the commit"),
    ],
)
def test_a_rank_that_is_killed_leaves_the_old_or_the_new(processes, tmp_path, victim, when):
    path = tmp_path / "x"
    shardkeep.save(
        {"old": np.arange(5)}, path, storage_writer=shardkeep.HuggingFaceWriter(), no_dist=True
    )
    begun = time.monotonic()
    outcomes = processes.outcomes(WORLD, dying, str(path), victim, when)
    assert time.monotonic() - begun < 25
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome.died == signal.SIGKILL
        else:
            assert isinstance(outcome.error, RankError), outcome
            assert f"rank {victim}" in str(outcome.error)
    found = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    assert set(found) == ({"old"} if when != "after the commit" else set(whole()))
    # What is left of it does not disturb the next one.
    shardkeep.save(
        {"new": np.arange(5)},
        path,
        storage_writer=shardkeep.HuggingFaceWriter(),
        overwrite=True,
        no_dist=True,
    )
    assert set(load_file(path / "model.safetensors")) == {"new"}


def killed_somewhere(rank, path, seconds):
    """All processes at once, as when a machine is turned off by its scheduler."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    export(rank, path, 2, overwrite=True)
    time.sleep(seconds)


@pytest.mark.slow
def test_killed_at_any_moment(processes, tmp_path):
    path = tmp_path / "x"
    shardkeep.save(
        {"old": np.arange(5)}, path, storage_writer=shardkeep.HuggingFaceWriter(), no_dist=True
    )
    seen = set()
    for number in range(40):
        processes.outcomes(2, killed_somewhere, str(path), 0.02 + 0.02 * number)
        found = {}
        for file in path.glob("*.safetensors"):
            found |= load_file(file)
        assert set(found) in ({"old"}, set(whole()))
        seen.add(len(found))
    assert seen == {1, len(whole())}


def memory_of(rank, path):
    """How much more is resident at the highest than before, with a budget of 8 MiB."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(20_000, 2500)  # of 200 MB, so 400 MB in all
    held = {"w": DTensor.from_local(local, mesh, [Shard(1)])}
    shardkeep.save(
        {"x": torch.ones(3)}, path + "-first", storage_writer=shardkeep.HuggingFaceWriter()
    )
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    shardkeep.save(held, path, storage_writer=shardkeep.HuggingFaceWriter(), memory_budget=8 << 20)
    return _status("VmHWM") - before


def _status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


@pytest.mark.slow
def test_memory_is_bounded(processes, tmp_path):
    for grown in processes.run(2, memory_of, str(tmp_path / "x")):
        assert grown < (8 << 20) + (100 << 20)
