"""Short turns at the interpreter end when the last thread of ours does."""

from __future__ import annotations

import sys

import pytest

from shardkeep.engine.parallel import run_in_order
from shardkeep.engine.turns import SHORT_S, short_turns


@pytest.fixture(autouse=True)
def _as_before():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_while_anybody_is_inside():
    sys.setswitchinterval(0.005)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(SHORT_S)
        with short_turns():
            pass
        assert sys.getswitchinterval() == pytest.approx(SHORT_S)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_what_the_program_sets_meanwhile_stays():
    sys.setswitchinterval(0.005)
    with short_turns():
        sys.setswitchinterval(0.002)
    assert sys.getswitchinterval() == pytest.approx(0.002)


def test_turns_that_are_shorter_already_are_left_alone():
    sys.setswitchinterval(1e-5)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(1e-5)
    assert sys.getswitchinterval() == pytest.approx(1e-5)


def test_threads_of_ours_take_short_turns_also_when_one_fails():
    sys.setswitchinterval(0.005)
    seen = []

    def work(task):
        seen.append(sys.getswitchinterval())
        if task == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        run_in_order(range(5), work, 2)
    assert seen[0] == pytest.approx(SHORT_S)
    assert sys.getswitchinterval() == pytest.approx(0.005)
