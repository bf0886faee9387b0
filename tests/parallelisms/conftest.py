"""Real processes that have imported what every kind of parallelism needs."""

import pytest

from shardkeep.testing.processes import PRELOAD, RankServer

MODULES = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "shardkeep.torch",
)


@pytest.fixture(scope="package")
def processes():
    pytest.importorskip("torch")
    with RankServer((*PRELOAD, *MODULES)) as server:
        yield server
