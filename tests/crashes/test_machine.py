"""The crash machine in short, at length with `--all`; and that it finds what is wrong."""

import pytest
from machine import LONG, SHORT, Violation, record, replay, run, scratch_folder
from scenarios import scenarios

from shardkeep.testing.disk import Disk, crash_points
from shardkeep.testing.operations import (
    Enter,
    Exchange,
    Move,
    State,
    SyncDirectory,
    SyncFile,
    Truncate,
    Write,
)

NAMES = list(scenarios())


@pytest.mark.parametrize("name", NAMES)
def test_short(tmp_path, name):
    tally = run(scenarios()[name], SHORT, tmp_path)
    assert tally.states >= 2
    assert tally.points > 8


@pytest.mark.parametrize(
    "name", ["convert over hf", "convert to hf, resumed", "convert to native, resumed"]
)
def test_what_was_found_wrong_once(tmp_path, name):
    """A convert that went on took what it had replaced, or what came back, for its own."""
    assert run(scenarios()[name], LONG, tmp_path).states > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_long(tmp_path, name):
    assert run(scenarios()[name], LONG, tmp_path).states > 10


# --- the machine itself


@pytest.mark.parametrize("forgotten", [SyncFile, SyncDirectory])
@pytest.mark.parametrize(
    "name", ["overwrite", "async", "incremental", "export over another", "convert over hf"]
)
def test_what_is_not_synced_is_found(tmp_path, name, forgotten):
    scenario = scenarios()[name]
    log = record(scenario, tmp_path / "run")
    operations = [op for op in log.operations if not isinstance(op, forgotten)]
    with scratch_folder() as scratch, pytest.raises(Violation):
        replay(scenario, log, scratch, SHORT, operations)


def left(operations, initial=None, **options):
    """All that a crash after the last operation may leave."""
    points = crash_points(
        State(initial or {}), operations, start=len(operations), exhaustive=12, **options
    )
    found = {tuple(sorted(point.state.entries.items())) for point in points}
    return [dict(each) for each in found]


def test_names_and_contents_are_kept_apart():
    made = [Enter(0, "a", 1, "file"), Write(1, 0, b"xy")]
    may_be = left(made)
    assert {} in may_be
    for data in (b"", b"xy", b"\0\0", b"x\0", b"\0y"):
        assert {"a": data} in may_be
    assert len(may_be) == 6
    assert left([*made, SyncFile(1)]) in ([{}, {"a": b"xy"}], [{"a": b"xy"}, {}])
    assert left([*made, SyncFile(1), SyncDirectory(0)]) == [{"a": b"xy"}]


def test_bytes_beyond_the_size_are_not_seen():
    disk = Disk(State({"a": b"1234"}))
    disk.apply(Truncate(1, 2))
    disk.apply(Write(1, 2, b"zz"))
    assert disk.whole().entries == {"a": b"12zz"}
    may_be = left([Truncate(1, 2), Write(1, 2, b"zz")], {"a": b"1234"})
    assert {"a": b"12zz"} in may_be
    assert {"a": b"12"} in may_be
    assert {"a": b"1234"} in may_be
    assert {"a": b"12z4"} in may_be


def test_moves_between_directories_are_atomic():
    there = {"d": None, "d/a": b"1", "e": None}
    move = Move(1, "a", "b", 2, 3)
    both = [{"d": None, "d/a": b"1", "e": None}, {"d": None, "e": None, "e/b": b"1"}]
    assert sorted(map(repr, left([move], there))) == sorted(map(repr, both))
    for directory in (1, 3):
        assert left([move, SyncDirectory(directory)], there) == both[1:]


def test_a_move_that_lasts_asks_for_what_came_before_it():
    made = [Enter(0, "d", 1, "directory"), SyncDirectory(0), Enter(1, "a", 2, "directory")]
    moved = [*made, Move(1, "a", "b", 2, 0), SyncDirectory(0)]
    assert left(moved) == [{"d": None, "b": None}]


def test_exchanged_names():
    there = {"a": b"1", "d": None, "d/b": b"2"}
    exchange = Exchange(0, "a", 1, 2, "b", 3)
    new = {"a": b"2", "d": None, "d/b": b"1"}
    assert left([exchange, SyncDirectory(2)], there) == [new]
    assert sorted(map(repr, left([exchange], there))) == sorted(map(repr, [there, new]))
