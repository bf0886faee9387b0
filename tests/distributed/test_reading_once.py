"""Real processes: what several ranks want is read once, and passed on over the gloo group.

What happens when a rank fails or dies meanwhile is in `test_failures`.
"""

import numpy as np
import pytest

import shardkeep
from shardkeep import ShardedArray

WORLD = 4
NAMES = [f"layers.{i}.w" for i in range(12)]
SHAPE = (512, 500)
DISTINCT = len(NAMES) * SHAPE[0] * SHAPE[1] * 8


def part(name, rank, dim, empty):
    whole = np.random.default_rng(NAMES.index(name)).standard_normal(SHAPE)
    made = np.zeros(SHAPE) if empty else whole
    if dim is None:
        return made
    each = SHAPE[dim] // WORLD
    cut, offsets = [slice(None)] * 2, [0, 0]
    cut[dim], offsets[dim] = slice(rank * each, (rank + 1) * each), rank * each
    return ShardedArray.from_local(made[tuple(cut)].copy(), tuple(offsets), SHAPE)


def bits(array):
    return (array if isinstance(array, np.ndarray) else array.local_shards[0].array).tobytes()


def save(rank, path, dim):
    shardkeep.save({name: part(name, rank, dim, False) for name in NAMES}, path)


def load(rank, path, dim, read_once):
    state = {name: part(name, rank, dim, True) for name in NAMES}
    result = shardkeep.load(state, path, read_once=read_once)
    for name in NAMES:
        assert bits(state[name]) == bits(part(name, rank, dim, False))
    return result.stats["bytes_read"], result.stats["bytes_received"]


@pytest.mark.parametrize(("saved", "wanted"), [(0, 1), (None, None)])
def test_all_ranks_together_read_every_byte_once(processes, tmp_path, saved, wanted):
    processes.run(WORLD, save, str(tmp_path), saved)
    read, received = zip(*processes.run(WORLD, load, str(tmp_path), wanted, True), strict=True)
    assert sum(read) <= 1.1 * DISTINCT
    assert max(read) <= 0.5 * DISTINCT  # all take part
    assert min(received) > 0
    read, received = zip(*processes.run(WORLD, load, str(tmp_path), wanted, False), strict=True)
    assert sum(read) > 3 * DISTINCT
    assert sum(received) == 0
