"""The bulk plane of torch: a gloo group that ends whoever waits in it."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch.distributed as dist

from shardkeep.adapters.torch_groups import _GlooBulk


def connected(world):
    """Of ranks that are threads."""
    store, made = dist.HashStore(), {}

    def connect(rank):
        made[rank] = _GlooBulk(store, rank, world, 60.0)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(world)]


def test_closing_ends_a_wait_for_one_rank_after_another_has_hung_up():
    """Else its thread would stay until gloo gives up by itself, ten minutes later."""
    first, second, third = connected(3)
    nothing = np.zeros(0, np.uint8)
    ended = []

    def wait():
        try:
            second.exchange([nothing] * 3, [0, 0, 5])
        except RuntimeError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not second._is_busy:
        time.sleep(0.01)
    first._is_busy = True  # so that it closes its connections
    first.close()
    time.sleep(0.2)
    assert waiting.is_alive()
    second.close()
    waiting.join(10)
    assert ended
    third.close()
