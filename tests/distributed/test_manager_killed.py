"""A real training on up to four processes, killed again and again while it saves, removes old steps
and cleans up: it always goes on from the newest step it was told is safe, bit for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import threading
import time
import traceback
from functools import partial

import numpy as np
import pytest

import shardkeep
from shardkeep import CheckpointManager, EverySteps, KeepBest, KeepLast, ShardedArray

ROWS, WIDTH = 50, 300
SHARDED = ("rows", "exp_avg", "exp_avg_sq")
STALE_S = 0.2
PIN_STALE_S = 1.0
KEPT = 3
"""Two last ones, and the best."""


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
        }

    def _part(self, tensor):
        return ShardedArray.from_local(tensor.numpy(), (self.low, 0), (ROWS, WIDTH))

    def use(self, state):
        """All but what was filled in place."""
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


def live(rank, world, root, notes, expected, last):
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
    ) as manager:
        state = job.state()
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


def collect(root, over):
    """`gc` from outside, all the time, as an operator's cron job would."""
    manager = CheckpointManager(root, no_dist=True)
    while not over.wait(0.05):
        manager.clean()


def evaluate(root, over, seen):
    """Whatever appears is read to its end, although it would be removed meanwhile."""
    manager = CheckpointManager(root, no_dist=True, pin_stale_s=PIN_STALE_S)
    while not over.is_set():
        for step in manager.watch(max(seen, default=0), timeout=0.05, newest=True):
            state = {"step": None, "rows": np.empty((ROWS, WIDTH), np.float32)}
            found = manager.restore(state, step.step, strict=False)
            assert found.state_dict["step"] == step.step
            seen.append(step.step)


def survive(server, root, notes, world, expected, chance, last):
    """A life and its end; how many ranks were killed."""
    for old in [*notes.glob("pid-*"), *notes.glob("up")]:
        old.unlink()
    over = threading.Event()
    errors, seen = [], []
    threads = [
        threading.Thread(target=_noting, args=(errors, evaluate, root, over, seen)),
        threading.Thread(target=kill, args=(notes, world, chance, over)),
        threading.Thread(target=_noting, args=(errors, collect, root, over)),
    ]
    for thread in threads:
        thread.start()
    try:
        outcomes = server.outcomes(
            world, live, world, str(root), str(notes), expected, last, timeout_s=120
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


def check_bound(root, steps):
    """What the policy keeps, and as much again for what was cut off and is not yet old enough."""
    if steps:
        most = max(step.nbytes for step in steps)
        assert nbytes(root) <= (2 * KEPT + 6) * most


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_goes_on_from_the_newest_acknowledged_step(
    training, tmp_path, kills
):
    root, notes = tmp_path / "run", tmp_path / "notes"
    notes.mkdir()
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    looks = CheckpointManager(root, no_dist=True)
    killed, lives, resumed, world = 0, 0, 0, 4
    while killed < kills:
        steps = looks.steps()
        for step in steps[-2:]:
            assert shardkeep.verify(step.path).ok
        newest = steps[-1].step if steps else None
        assert (newest or 0) >= acknowledged(notes), "an acknowledged step is gone"
        check_bound(root, steps)
        resumed += newest is not None
        died = survive(training, root, notes, world, newest, chance, (newest or 0) + 60)
        killed += died > 0
        lives += 1
        world = chance.choice([n for n in (1, 2, 3, 4) if n != world])
    time.sleep(max(STALE_S, PIN_STALE_S) + 0.1)
    newest = looks.latest()
    assert newest is not None or kills < 10
    assert (newest.step if newest else 0) >= acknowledged(notes)
    (notes / "up").unlink(missing_ok=True)
    # The last life ends well, and nothing is left but what is to be kept.
    last = (newest.step if newest else 0) + 9
    training.run(
        world, live, world, str(root), str(notes), newest and newest.step, last, timeout_s=120
    )
    kept = looks.steps()
    best = looks.best("loss")
    assert len(kept) <= KEPT
    assert best.step in {step.step for step in kept}
    assert sorted(os.listdir(root)) == sorted([".shardkeep", *(f"step-{s.step}" for s in kept)])
    assert os.listdir(root / ".shardkeep/pins") == []
    for step in kept:
        assert shardkeep.verify(step.path).ok
    assert nbytes(root) == sum(step.nbytes for step in kept)
    print(f"{killed} kills in {lives} lives, {resumed} resumed, last step {kept[-1].step}")
