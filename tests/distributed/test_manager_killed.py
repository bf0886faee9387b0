"""A real training on up to four processes, killed again and again while it saves, copies to another
tier, removes old steps and cleans up: it always goes on from the newest step it was told is safe,
bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep import (
    CheckpointManager,
    EverySteps,
    FastTier,
    KeepBest,
    KeepLast,
    ShardedArray,
)

ROWS, WIDTH = 50, 300
SHARDED = ("rows", "exp_avg", "exp_avg_sq")
STALE_S = 0.2
PIN_STALE_S = 1.0
KEPT = 3
"""Two last ones, and the best."""
COPY_RATE = 4 << 20
"""Bytes a second: slow enough that copies are often killed, and that saves wait for them."""
WAITING = 1
LOST = 0.15
"""How often the fast tier is lost with its host."""


# --- the program


class Job:
    """A layer whose rows are dealt to the ranks, each with an AdamW for its own."""

    def __init__(self, rank, world):
        import torch

        self.rank, self.world = rank, world
        self.low, self.high = ROWS * rank // world, ROWS * (rank + 1) // world
        first = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
        self.rows = torch.nn.Parameter(first[self.low : self.high].clone())
        self.optimizer = torch.optim.AdamW([self.rows], lr=1e-3)
        self.batches = torch.Generator().manual_seed(0)
        self.rows.grad = torch.zeros_like(self.rows)
        self.optimizer.step()  # so that there is a state to load into
        self.step = 0
        self.frozen = np.full((self.high - self.low, WIDTH), 0.5, np.float32)

    def train_step(self):
        import torch
        import torch.distributed as dist

        whole = torch.zeros(ROWS, WIDTH)
        whole[self.low : self.high] = self.rows.detach()
        if self.world > 1:
            dist.all_reduce(whole)
        whole.requires_grad_()
        x = torch.randn(8, WIDTH, generator=self.batches)
        loss = (x @ whole.T).square().mean()
        loss.backward()
        self.rows.grad = whole.grad[self.low : self.high].clone()
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def state(self):
        """Arrays that are the tensors' own memory."""
        kept = self.optimizer.state[self.rows]
        return {
            "rows": self._part(self.rows.detach()),
            "exp_avg": self._part(kept["exp_avg"]),
            "exp_avg_sq": self._part(kept["exp_avg_sq"]),
            "optimizer_step": kept["step"],
            "batches": self.batches.get_state(),
            "step": self.step,
            "frozen": self._part(self.frozen),
        }

    def _part(self, local):
        array = local if isinstance(local, np.ndarray) else local.numpy()
        return ShardedArray.from_local(array, (self.low, 0), (ROWS, WIDTH))

    def use(self, state):
        """All but what was filled in place."""
        assert (self.frozen == 0.5).all()
        self.step = state["step"]
        self.batches.set_state(state["batches"])

    def digest(self, state):
        """Of every bit of a state, whoever holds it; on all ranks alike."""
        import torch.distributed as dist

        mine = [state[name].local_shards[0].array.tobytes() for name in SHARDED]
        parts = [mine] * self.world
        if self.world > 1:
            dist.all_gather_object(parts, mine)
        total = hashlib.sha256()
        for rows in zip(*parts, strict=True):
            total.update(b"".join(rows))
        for name in ("optimizer_step", "batches"):
            total.update(state[name].numpy().tobytes())
        total.update(str(state["step"]).encode())
        return total.hexdigest()


def settings(fast):
    """Of the tier, and what files steps share: with it all of it, without it none."""
    if fast is None:
        return {}
    tier = FastTier(fast, keep=1, copy_rate=COPY_RATE, most_waiting=WAITING, close_s=60)
    return {"fast": tier, "full_every": 5}


def live(rank, world, root, fast, notes, expected, last):
    """One life: resume, train, save, until killed, or until the last step."""
    with open(f"{notes}/pid-{rank}", "w") as file:
        file.write(str(os.getpid()))
    acks = os.open(f"{notes}/acks", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    job = Job(rank, world)
    with CheckpointManager(
        root,
        save=EverySteps(2),
        keep=KeepLast(2) | KeepBest(1, "loss"),
        stale_s=STALE_S,
        pin_stale_s=PIN_STALE_S,
        **settings(fast),
    ) as manager:
        state = job.state()
        job.frozen[:] = 0 if manager.latest() else 0.5
        found = manager.restore(state)
        assert (None if found is None else found.step) == expected, (found, expected)
        if found is not None:
            assert found.damaged == ()
            assert job.digest(state) == found.metadata["digest"]
            job.use(state)
            assert job.digest(job.state()) == found.metadata["digest"]
        if rank == 0:
            open(f"{notes}/up", "x").close()
        while job.step < last:
            loss = job.train_step()
            if not manager.should_save(job.step):
                continue
            state = job.state()
            options = {"metrics": {"loss": loss}, "metadata": {"digest": job.digest(state)}}
            if job.step % 3:
                handle = manager.async_save(job.step, state, **options)
                if rank == 0:
                    handle.add_done_callback(partial(_ended, acks, job.step))
            else:
                manager.save(job.step, state, **options)
                _acknowledge(acks, job.step)
    return job.step


def _ended(acks, step, handle):
    if not handle.cancelled() and handle.exception() is None:
        _acknowledge(acks, step)


def _acknowledge(acks, step):
    os.write(acks, f"{step}\n".encode())


# --- the killer


def kill(notes, world, chance, over):
    """All at once, or one of them and the others soon after."""
    pids = []
    for rank in range(world):
        path = notes / f"pid-{rank}"
        while not over.is_set() and not (path.exists() and path.read_text()):
            time.sleep(0.005)
        if over.is_set():
            return
        pids.append(int(path.read_text()))
    chance.shuffle(pids)
    if chance.random() < 0.8:  # else also while it starts, and restores
        while not over.is_set() and not (notes / "up").exists():
            time.sleep(0.005)
    if over.wait(chance.random() * 1.0):
        return
    for number, pid in enumerate(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if number == 0 and chance.random() < 0.4:
            over.wait(chance.random() * 0.3)


def collect(root, fast, over):
    """`gc` from outside, all the time, as an operator's cron job would."""
    manager = CheckpointManager(root, no_dist=True, fast=fast)
    while not over.wait(0.05):
        manager.clean()


def evaluate(root, fast, over, seen):
    """Whatever appears is read to its end, although it would be removed meanwhile."""
    manager = CheckpointManager(root, no_dist=True, pin_stale_s=PIN_STALE_S, fast=fast)
    while not over.is_set():
        for step in manager.watch(max(seen, default=0), timeout=0.05, newest=True):
            state = {"step": None, "rows": np.empty((ROWS, WIDTH), np.float32)}
            found = manager.restore(state, step.step, strict=False)
            assert found.state_dict["step"] == step.step
            seen.append(step.step)


def survive(server, root, fast, notes, world, expected, chance, last):
    """A life and its end; how many ranks were killed."""
    for old in [*notes.glob("pid-*"), *notes.glob("up")]:
        old.unlink()
    over = threading.Event()
    errors, seen = [], []
    threads = [
        threading.Thread(target=_noting, args=(errors, evaluate, root, fast, over, seen)),
        threading.Thread(target=kill, args=(notes, world, chance, over)),
        threading.Thread(target=_noting, args=(errors, collect, root, fast, over)),
    ]
    for thread in threads:
        thread.start()
    try:
        outcomes = server.outcomes(
            world, live, world, str(root), fast, str(notes), expected, last, timeout_s=120
        )
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert errors == []
    for outcome in outcomes:
        assert not outcome.hung, outcome.log
        # Who was not killed itself may only have met the death of the others.
        error = outcome.error
        assert outcome.ok or outcome.died == signal.SIGKILL or _is_bereaved(error), outcome.log
    return sum(outcome.died == signal.SIGKILL for outcome in outcomes)


def _noting(errors, work, *args):
    try:
        work(*args)
    except BaseException as error:
        traceback.print_exc()
        errors.append(error)


def _is_bereaved(error):
    text = f"{type(error).__name__}: {error}"
    return any(
        word in text
        for word in ("RankError", "Connection closed by peer", "Connection reset", "gloo")
    )


def acknowledged(notes):
    path = notes / "acks"
    return max(map(int, path.read_text().split()), default=0) if path.exists() else 0


def nbytes(root):
    total = 0
    for folder, _, files in os.walk(root):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def check_bound(root, fast, steps):
    """What the policy keeps, and as much again for what was cut off and is not yet old enough."""
    if steps:
        most = max(step.nbytes for step in steps)
        assert nbytes(root) <= (2 * KEPT + 6) * most
        assert nbytes(fast or root) <= (2 * KEPT + 6) * most


def lose(root, fast, notes):
    """The host dies, and its RAM disk with it: what is durable is all there is."""
    shutil.rmtree(fast, ignore_errors=True)
    newest = CheckpointManager(root, no_dist=True).latest()
    (notes / "acks").write_text("" if newest is None else f"{newest.step}\n")


@pytest.fixture
def ram(tmp_path):
    """A RAM disk, where there is one."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    with tempfile.TemporaryDirectory(dir=shared, prefix="shardkeep-test-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tiers", [1, 2])
def test_killed_at_any_moment_it_goes_on_from_the_newest_acknowledged_step(
    training, tmp_path, ram, kills, tiers
):
    root, notes = tmp_path / "run", tmp_path / "notes"
    fast = str(ram / "run") if tiers == 2 else None
    notes.mkdir()
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    looks = CheckpointManager(root, no_dist=True, fast=fast)
    killed, lives, resumed, lost, cut, world = 0, 0, 0, 0, 0, 4
    while killed < kills:
        if fast is not None and lives and chance.random() < LOST:
            lose(root, fast, notes)
            lost += 1
        steps = looks.steps()
        for step in steps[-2:]:
            for path in step.copies:
                assert shardkeep.verify(path).ok
        newest = steps[-1].step if steps else None
        assert (newest or 0) >= acknowledged(notes), "an acknowledged step is gone"
        check_bound(root, fast, steps)
        resumed += newest is not None
        died = survive(training, root, fast, notes, world, newest, chance, (newest or 0) + 60)
        killed += died > 0
        lives += 1
        cut += bool(list(root.glob(".copying-*")))
        world = chance.choice([n for n in (1, 2, 3, 4) if n != world])
    time.sleep(max(STALE_S, PIN_STALE_S) + 0.1)
    newest = looks.latest()
    assert newest is not None or kills < 10
    assert (newest.step if newest else 0) >= acknowledged(notes)
    (notes / "up").unlink(missing_ok=True)
    # The last life ends well, and nothing is left but what is to be kept.
    step = newest and newest.step
    training.run(
        world, live, world, str(root), fast, str(notes), step, (step or 0) + 9, timeout_s=120
    )
    durable = CheckpointManager(root, no_dist=True)
    kept, best = durable.steps(), looks.best("loss", highest=False)
    assert len(kept) <= KEPT
    assert best.step in {step.step for step in kept}
    check_tidy(root, kept)
    if fast is not None:
        assert cut or kills < 10
        (last,) = CheckpointManager(fast, no_dist=True).steps()
        assert last.save_id == kept[-1].save_id
        check_tidy(ram / "run", [last])
    print(
        f"{killed} kills in {lives} lives, {resumed} resumed, {lost} fast tiers lost, {cut} copies "
        f"cut short, last step {kept[-1].step}"
    )


def check_tidy(root, kept):
    """Whole steps, and nothing else."""
    assert sorted(os.listdir(root)) == sorted([".shardkeep", *(f"step-{s.step}" for s in kept)])
    assert list(root.glob(".shardkeep/pins/*")) == []
    for step in kept:
        assert shardkeep.verify(step.path).ok
    word = root / ".shardkeep/run"
    assert nbytes(root) == sum(step.nbytes for step in kept) + (word.exists() and 32)
