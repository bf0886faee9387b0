"""Ranks lost in everything that ranks do together: some here, all with `--all`, any number with
`python -m tests.ranks`.
"""

import hosts
import pytest
from losing import Pulse, attempt, each, run_seeds
from losses import VERBS, Case, Wrong, lengths_of, run


@pytest.fixture(scope="module")
def pulse():
    noted = Pulse()
    yield noted
    noted.close()


def tried(processes, case, pulse):
    """How it ended."""
    result = attempt(processes, case, pulse)
    if isinstance(result, BaseException):
        raise result
    return result.outcome


BEFORE = "commit, before the claim"
LOST = [
    Case("process", "kill", 2, 1, "done write"),
    Case("windows", "stop", 2, 1, "move share reads"),
    Case("manager behind", "wake", 3, 0, BEFORE),
    Case("again", "wake", 3, 2, "move commit"),
]
"""Stand for many, and run in every check."""
LOST_TOO = [
    Case("thread", "kill", 3, 1, "work write"),
    Case("overwrite", "kill", 3, 1, "wait"),
    Case("messages", "stop", 3, 0, "move pass blocks on"),
    Case("manager", "wake", 3, 0, BEFORE),
    Case("save", "wake", 2, 0, BEFORE, store="rank 0"),
    Case("process", "wake", 2, 0, BEFORE),
    Case("restore", "wake", 2, 0, "move share reads"),
    Case("restore", "wake", 3, 1, "wait"),
]


@pytest.mark.parametrize(
    "case", [*LOST, *(pytest.param(case, marks=pytest.mark.slow) for case in LOST_TOO)], ids=str
)
def test_a_rank_is_lost(processes, pulse, case):
    assert tried(processes, case, pulse) == "lost"


def test_a_rank_that_stops_for_a_moment_is_not_given_up(processes, pulse):
    case = Case("manager behind", "pause", 3, 1, "work write", pause_s=0.5)
    assert tried(processes, case, pulse) == "late"


CARELESS = [
    Case("save", "wake", 2, 0, BEFORE, careless="commit"),
    Case("overwrite", "raise", 2, 1, "work write", careless="names"),
    Case("overwrite", "raise", 2, 1, "work write", careless="thread"),
    Case("windows", "raise", 2, 1, "work read", careless="file"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CARELESS, ids=lambda case: case.careless)
def test_trials_find_what_is_wrong(processes, tmp_path, case):
    """A coordinator that commits what the others have given up; an error that names nobody; a
    thread and a file that are left."""
    with pytest.raises(Wrong):
        run(processes, case, tmp_path)


# --- hosts


CUT = [
    Case("overwrite", "cut", 3, 2, "work write", hosts=(0, 0, 1)),
    Case("thread", "cut", 3, 0, "work write", hosts=(0, 0, 1)),
    Case("messages", "cut", 3, 2, "move pass blocks on", hosts=(0, 0, 1)),
    Case("manager", "cut", 2, 0, BEFORE, hosts=(0, 1)),
    Case("restore", "cut", 3, 0, "work read", hosts=(0, 1, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CUT, ids=str)
def test_a_host_is_cut_off(processes, pulse, case):
    why = hosts.why_not()
    if why:
        pytest.skip(why)
    with hosts.Hosts(2) as two:
        assert tried(processes, two.placed(case), pulse) == "lost"


# --- all of them


def all_well(results):
    """How many there were."""
    ended = list(results)
    for _, _, result in ended:
        if isinstance(result, BaseException):
            raise result
    return len(ended)


@pytest.mark.slow
def test_losses_by_chance():
    assert all_well(run_seeds(range(200), 4)) == 200


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("verb", VERBS)
def test_losses_at_every_point(verb, victim):
    ((_, _, well),) = each(lengths_of([verb]), 1)
    points, _ = well.lengths[victim]
    cases = [
        Case(verb, what, 3, victim, at, store=("harness", "rank 0")[at % 2])
        for at in range(points)
        for what in ("kill", "stop", "wake", "raise")
    ]
    assert all_well(each(list(enumerate(cases)), 4)) == 4 * points
