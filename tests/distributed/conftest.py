"""Real processes: one server per session forks the ranks of every test."""

import pytest

from shardkeep.testing.processes import RankServer


@pytest.fixture(scope="session")
def processes():
    pytest.importorskip("torch")
    with RankServer() as server:
        yield server
