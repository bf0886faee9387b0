"""Saved in one parallelism, loaded in another: bit-equal state, and training that goes on."""

from __future__ import annotations

import pytest

import shardkeep

pytest.importorskip("torch")

import training

STEPS, MORE = 1, 2
"""Before the save, and after it: the second loss shows what the optimizer did."""


def save_job(rank, layout, path, options):
    """Train, save, check what was saved, train on; the losses of the steps after the save."""
    job = training.Job(layout, **options)
    for _ in range(STEPS):
        job.step()
    app = job.app()
    shardkeep.save({"app": app}, path)
    training.check({"app": app.state_dict()}, path)
    return [job.step() for _ in range(MORE)]


def load_job(rank, layout, path, options):
    """Load into a program that has not trained yet; the losses of the steps after that."""
    job = training.Job(layout, seed=7, **options)
    app = job.app()
    shardkeep.load({"app": app}, path)
    training.check({"app": app.state_dict()}, path)
    return [job.step() for _ in range(MORE)]


class Saved:
    """Checkpoints made when they are first asked for, and the losses after each."""

    def __init__(self, processes, folder):
        self._processes = processes
        self._folder = folder
        self._done = {}

    def of(self, kind, name):
        if (kind, name) not in self._done:
            world, layout = KINDS[kind][0][name]
            path = self._folder / f"{kind}-{name}"
            losses = self._processes.run(world, save_job, layout, path, KINDS[kind][1])
            assert all(one == losses[0] for one in losses)
            self._done[kind, name] = path, losses[0]
        return self._done[kind, name]


KINDS = {
    "plain": (training.LAYOUTS, {}),
    "experts": (training.EXPERT_LAYOUTS, {"experts": training.Experts()}),
    "tied": (training.TIED_LAYOUTS, {"tied": True}),
}


@pytest.fixture(scope="module")
def saved(processes, tmp_path_factory):
    return Saved(processes, tmp_path_factory.mktemp("saved"))


def go(processes, saved, kind, source, target):
    path, expected = saved.of(kind, source)
    world, layout = KINDS[kind][0][target]
    losses = processes.run(world, load_job, layout, path, KINDS[kind][1])
    assert all(one == losses[0] for one in losses)
    if source == target:
        assert losses[0] == expected
    else:
        assert losses[0] == pytest.approx(expected, abs=1e-5)


SOME = [
    ("fsdp2xtp", "fsdp1x2"),
    ("fsdp1x2", "fsdp2x2"),
    ("fsdp2x2", "tp2"),
    ("ddp2", "hsdp"),
    ("pp2", "one"),
    ("one", "pp2"),
]
ALL = [("plain", a, b) for a in training.LAYOUTS for b in training.LAYOUTS]
ALL += [("experts", a, b) for a in training.EXPERT_LAYOUTS for b in training.EXPERT_LAYOUTS]
ALL += [("tied", a, b) for a in training.TIED_LAYOUTS for b in training.TIED_LAYOUTS]
QUICK = [("plain", *pair) for pair in SOME] + [
    ("experts", "ep4", "ep2"),
    ("tied", "fsdp2x2", "one"),
]


@pytest.mark.parametrize(("kind", "source", "target"), QUICK)
def test_goes_on(processes, saved, kind, source, target):
    go(processes, saved, kind, source, target)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "source", "target"), sorted({*ALL} - {*QUICK}))
def test_all_others(processes, saved, kind, source, target):
    go(processes, saved, kind, source, target)
