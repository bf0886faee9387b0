"""One rank of four is told to stop: all save at the same step, and end well."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import shardkeep
from shardkeep import ShardedArray

WORLD = 4


def state(rank, step):
    local = np.full((2, 3), 10.0 * step + rank)
    return {"w": ShardedArray.from_local(local, (2 * rank, 0), (2 * WORLD, 3)), "step": step}


def train(rank, where, told, how):
    """Until somebody is told to stop; the signal comes from outside, in the middle of a step."""
    import torch
    import torch.distributed as dist

    shardkeep.catch_preemption()
    with shardkeep.Checkpointer() as keeper:
        for step in range(1000):
            dist.all_reduce(torch.ones(3))
            if step == 5 and rank == 0:
                victim = torch.tensor([0])
                dist.recv(victim, told)
                os.kill(int(victim), signal.SIGTERM)
            elif step == 5 and rank == told:
                dist.send(torch.tensor([os.getpid()]), 0)
                time.sleep(0.1)  # the signal comes now, or in the next steps
            if keeper.should_stop():
                if how == "save":
                    keeper.save(state(rank, step), where)
                else:
                    keeper.async_save(state(rank, step), where)
                return step
    return -1


@pytest.mark.parametrize(("told", "how"), [(2, "save"), (3, "async_save")])
def test_all_ranks_stop_at_the_same_step_and_save(processes, tmp_path, told, how):
    outcomes = processes.outcomes(WORLD, train, str(tmp_path / "last"), told, how)
    assert [(outcome.ok, outcome.died) for outcome in outcomes] == [(True, 0)] * WORLD
    steps = {outcome.value for outcome in outcomes}
    assert len(steps) == 1
    step = steps.pop()
    assert 5 <= step < 1000
    assert shardkeep.verify(tmp_path / "last").ok
    with shardkeep.open(tmp_path / "last") as found:
        assert found["step"] == step
        assert found["w"][0, 0] == 10.0 * step
