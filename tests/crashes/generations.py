"""States that tell by every leaf when they were saved, and what a place may hold of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import shardkeep
from shardkeep.errors import CheckpointNotFoundError
from shardkeep.formats.native.commit import read_record
from shardkeep.formats.native.names import RECORD
from shardkeep.stores.local import LocalStore

ABSENT = 0
"""The generation of a place that holds no checkpoint."""
FROZEN = 1000
"""Generations from this one on have something in common."""
OPTIONS = {"memory_budget": 8 << 20, "no_dist": True}


def state(generation):
    """Every leaf tells its generation, but for what is frozen; NaN payloads and all."""
    bits = np.arange(48, dtype=np.uint32) + 0x7FC00000 + 1000 * generation
    out = {
        "model": {"w": bits.view(np.float32), "b": np.full((3, 5), generation, np.int64)},
        "big": np.full(3000, generation, np.uint16),
        "step": generation,
        "name": f"generation {generation}" * (generation % FROZEN),
    }
    if generation >= FROZEN:
        out["frozen"] = np.arange(20000, dtype=np.uint16)
    return out


def weights(generation):
    """The same without plain values, which not every format has."""
    return {key: value for key, value in state(generation).items() if key not in ("step", "name")}


def blank(like):
    model = {"w": np.zeros(48, np.float32), "b": np.zeros((3, 5), np.int64)}
    out = {"model": model, "big": np.zeros(3000, np.uint16), "step": None, "name": None}
    return {**out, **{key: np.zeros_like(like[key]) for key in like if key not in out}}


def exact(tree):
    """A nested state as something `==` compares bit for bit."""
    if isinstance(tree, dict):
        return {key: exact(value) for key, value in tree.items()}
    if isinstance(tree, np.ndarray):
        return tree.dtype.str, tree.shape, tree.tobytes()
    return type(tree), tree


def generation_at(place, *, thorough=True):
    """Which generation loads, whole and verified."""
    try:
        with shardkeep.open(place) as checkpoint:
            found = checkpoint.state_dict()
    except CheckpointNotFoundError:
        return ABSENT
    assert exact(found) == exact(state(found["step"])), "a mix of generations"
    if not thorough:
        return found["step"]
    loaded = shardkeep.load(blank(found), place).state_dict
    assert exact(loaded) == exact(found)
    report = shardkeep.verify(place)
    assert report.ok, report.problems
    return found["step"]


def weights_at(place):
    """Which generation of weights a checkpoint of any format holds, whole."""
    try:
        with shardkeep.open(place) as checkpoint:
            found = {name: np.asarray(checkpoint[name]) for name in checkpoint}
    except CheckpointNotFoundError:
        return ABSENT
    generation = int(found["big"][0])
    wanted = weights(generation)
    flat = {f"model.{key}": value for key, value in wanted.pop("model").items()} | wanted
    assert exact(found) == exact(flat), "a mix of generations"
    return generation


def assert_clean(place):
    """Nothing is there but the checkpoint, if that is there."""
    store = LocalStore(place)
    try:
        record = read_record(store)
    except CheckpointNotFoundError:
        named, names = set(), set()
    else:
        named = {Path(row.name).name for row in (record.index, *record.files)}
        names = {RECORD}
    assert set(store.list("data")) == named
    assert set(store.list()) - {"data"} == names


def save(place, generation, **options):
    writer = shardkeep.NativeWriter(place, block=4096, overwrite=options.get("overwrite", False))
    return shardkeep.save(state(generation), place, storage_writer=writer, **OPTIONS, **options)


def allowed(marks, first=ABSENT):
    """Generations that may be there: begun, and not older than one the program was told of."""
    begun, returned = {first: -1}, {first: -1}
    for at, label in enumerate(marks):
        what, number = label.split()
        (begun if what == "begin" else returned).setdefault(int(number), at)
    never = len(marks)
    return {
        one
        for one in begun
        if not any(begun[other] > returned.get(one, never) for other in returned)
    }
