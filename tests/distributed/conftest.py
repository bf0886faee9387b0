"""Real processes: one server per session forks the ranks of every test."""

import pytest

from shardkeep.testing.processes import PRELOAD, RankServer


class _Telling(RankServer):
    """Prints what ranks wrote: pytest shows it with a test that failed."""

    def outcomes(self, *args, **options):
        outcomes = super().outcomes(*args, **options)
        for outcome in outcomes:
            if outcome.log:
                print(f"--- rank {outcome.rank}, {outcome.seconds:.2f} s\n{outcome.log}")
        return outcomes


@pytest.fixture(scope="session")
def processes():
    pytest.importorskip("torch")
    with _Telling() as server:
        yield server


TRAINING = (
    "torch._dynamo",  # which optimizers bring along
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "shardkeep.manager.driver",
)
"""What a training imports, and takes seconds."""


@pytest.fixture(scope="session")
def training():
    """The same, for ranks that train."""
    pytest.importorskip("torch")
    with _Telling((*PRELOAD, *TRAINING)) as server:
        yield server
