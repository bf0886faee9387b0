"""Generators and positions in the data, over real processes: stopped, and on as many or others."""

from __future__ import annotations

import random

import numpy as np
import pytest

import shardkeep
from shardkeep import PerRank, resizing

TOTAL = 480


class Loader:
    """Deals samples in turn."""

    def __init__(self, rank, world):
        self.rank, self.world, self.seen = rank, world, 0

    def take(self, count):
        taken = [self.rank + (self.seen + n) * self.world for n in range(count)]
        self.seen += count
        return [sample for sample in taken if sample < TOTAL]

    def state_dict(self):
        return {"seen": self.seen, "order": np.arange(4)}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def draws():
    import torch

    random_ones = [random.random(), random.gauss(0, 1), np.random.random(), np.random.randn()]
    return [*random_ones, torch.rand(2).tolist(), torch.randn(1).item()]


def begin(rank, world, where, how):
    """A run that saves in the middle and goes on; what it drew then, and all it has seen."""
    import torch

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(40 + rank)
    loader = Loader(rank, world)
    draws()
    seen = loader.take(12)
    state = {
        "rng": shardkeep.torch.rng_state(),
        "loader": PerRank(loader, resize=resizing.deal_counts("seen")),
        "w": torch.ones(4),
    }
    if how == "save":
        shardkeep.save(state, where)
        return [draws() for _ in range(3)], seen
    handle = shardkeep.async_save(state, where, snapshot=how)
    drawn = [draws() for _ in range(3)]
    handle.result(timeout=60)
    return drawn, seen


def go_on(rank, world, where):
    import torch

    loader = Loader(rank, world)
    state = {
        "rng": shardkeep.torch.rng_state(),
        "loader": PerRank(loader, resize=resizing.deal_counts("seen")),
        "w": torch.zeros(4),
    }
    shardkeep.load(state, where)
    assert state["w"].all()
    return [draws() for _ in range(3)], loader.take(TOTAL)


@pytest.mark.parametrize("how", ["save", "eager", "lazy"])
def test_a_run_goes_on_as_if_it_had_not_stopped(processes, tmp_path, how):
    begun = processes.run(4, begin, 4, str(tmp_path), how)
    again = processes.run(4, go_on, 4, str(tmp_path))
    assert [drawn for drawn, _ in again] == [drawn for drawn, _ in begun]
    seen = [sample for _, samples in [*begun, *again] for sample in samples]
    assert sorted(seen) == list(range(TOTAL))


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 1), (1, 3), (3, 4)])
def test_on_other_numbers_no_sample_and_no_stream_is_used_twice(processes, tmp_path, before, after):
    begun = processes.run(before, begin, before, str(tmp_path), "save")
    again = processes.run(after, go_on, after, str(tmp_path))
    twice = processes.run(after, go_on, after, str(tmp_path))
    assert again == twice
    seen = [sample for _, samples in [*begun, *again] for sample in samples]
    assert sorted(seen) == list(range(TOTAL))
    streams = [str(part) for drawn, _ in [*begun, *again] for part in drawn[0]]
    assert len(set(streams)) == len(streams)


def broken(rank, where):
    import torch

    def resize(values, mine, world_size):
        if mine == 2:
            raise LookupError("no shard for this one")
        return values[0]

    state = {"loader": PerRank({"seen": -1}, resize=resize), "w": torch.zeros(4)}
    with pytest.raises(shardkeep.MismatchError, match="no shard for this one") as caught:
        shardkeep.load(state, where, keys=["loader*", "w"])
    assert state["loader"].value == {"seen": -1}
    assert not state["w"].any()
    return str(caught.value)


def test_a_policy_that_fails_on_one_process_stops_all(processes, tmp_path):
    processes.run(2, begin, 2, str(tmp_path), "save")
    told = processes.run(3, broken, str(tmp_path))
    assert len(set(told)) == 1
