"""A step on its way from one folder to another: whole there or absent, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import fill, is_state, state

import shardkeep
from shardkeep.engine.pace import Pace
from shardkeep.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptionError,
    StorageError,
)
from shardkeep.formats.native import copying
from shardkeep.formats.native.commit import read_record
from shardkeep.formats.native.copying import copy_checkpoint, known_files
from shardkeep.manager.catalog import Catalog, copying_name
from shardkeep.manager.cleaning import clean
from shardkeep.manager.naming import StepNames
from shardkeep.manager.pins import Pins
from shardkeep.manager.publishing import copy_step
from shardkeep.manager.tiers import FastTier, Tier, Tiers
from shardkeep.manager.upkeep import Upkeep
from shardkeep.stores.local import LocalStore
from shardkeep.testing.disk import crash_points
from shardkeep.testing.operations import Move, State, materialize
from shardkeep.testing.recording import OperationLog


class UnsyncedStore(LocalStore):
    """For looking at what a crash left."""

    def _sync_directory(self, path):
        pass

    def sync_file(self, name):
        pass

    def create(self, name):
        file = super().create(name)
        file.sync = lambda: None
        return file


def catalog_of(root, open_store=UnsyncedStore):
    return Catalog(root, StepNames(), open_store)


def brought(source, target, step, **options):
    """Copy a step that is there."""
    options = {"moving": threading.Lock(), "may_appear": lambda: True, **options}
    return copy_step(source.find(step), source, target, **options)


def steps_in(root):
    """Every step that is listed is whole, and says which it is."""
    listing = catalog_of(root).look()
    assert listing.damaged == ()
    found = {}
    for step in listing.steps:
        assert shardkeep.verify(step.path).ok
        with shardkeep.open(step.path) as opened:
            told = opened["step"]
            assert is_state(opened.state_dict(), told)
        found[step.step] = told
    return found


def after_crash(point, where, allowed):
    """What is left is whole, one pass later it is clean, and the copy can be made again."""
    materialize(point.state, where)
    there = steps_in(where)
    assert there in allowed, (point.position, point.variant, there)
    catalog = catalog_of(where)
    clean(catalog, Pins(catalog.store), catalog.look(), stale_s=0)
    assert steps_in(where) == there, point.variant
    assert set(os.listdir(where)) - {".shardkeep"} == {f"step-{step}" for step in there}
    for step in there:
        assert len(os.listdir(where / f"step-{step}")) == 2, point.variant
        assert len(os.listdir(where / f"step-{step}/data")) == 2, point.variant
    return there


def crashes(base, log, tmp_path, allowed, again, samples=0):
    """All that a crash may leave; how many different things that was."""
    seen = set()
    ends = []
    for number, point in enumerate(crash_points(log.initial, log.operations, samples=samples)):
        if point.state.digest() in seen:
            continue
        seen.add(point.state.digest())
        where = tmp_path / str(number)
        ends.append(after_crash(point, where, allowed))
        again(where)
        shutil.rmtree(where)
    assert allowed[0] in ends
    assert allowed[-1] in ends
    return len(seen)


def test_a_crash_at_any_moment_leaves_no_copy_or_all_of_it(tmp_path):
    fast, base = tmp_path / "fast", tmp_path / "run"
    for root in (fast, base):
        root.mkdir()
    fill(fast, [2])
    fill(base, [1])
    log = OperationLog(base)
    done = brought(catalog_of(fast), catalog_of(base, log.store), 2)
    assert done.nbytes > 0
    assert steps_in(base) == {1: 1, 2: 2}

    def again(where):
        brought(catalog_of(fast), catalog_of(where), 2)
        assert steps_in(where) == {1: 1, 2: 2}

    count = crashes(base, log, tmp_path, [{1: 1}, {1: 1, 2: 2}], again)
    assert count > 20


@pytest.mark.parametrize("there", ["another save", "what a killed save left"])
def test_a_crash_while_a_step_is_replaced_leaves_the_old_or_the_new(tmp_path, there):
    fast, base = tmp_path / "fast", tmp_path / "run"
    for root in (fast, base):
        root.mkdir()
    shardkeep.save(state(-2), fast / "step-2")
    if there == "another save":
        fill(base, [2])
        allowed = [{2: 2}, {2: -2}]
    else:
        (base / "step-2/data").mkdir(parents=True)
        allowed = [{}, {2: -2}]
    log = OperationLog(base)
    brought(catalog_of(fast), catalog_of(base, log.store), 2)
    assert steps_in(base) == {2: -2}
    assert os.listdir(base) == ["step-2"]

    def again(where):
        brought(catalog_of(fast), catalog_of(where), 2)
        assert steps_in(where) == {2: -2}

    assert crashes(base, log, tmp_path, allowed, again) > 20


@pytest.mark.parametrize("reads", [1, 2, 3])
def test_a_replacement_that_a_server_does_late_leaves_the_old_or_the_new(tmp_path, reads):
    """It was said to have failed, and is done after the record was looked at so many times."""
    fast, base = tmp_path / "fast", tmp_path / "run"
    shardkeep.save(state(-2), fast / "step-2")
    fill(base, [2])
    waiting, looks = [], []

    class Late(UnsyncedStore):
        def rename(self, old, new):
            waiting.append((super().rename, old, new))
            raise TimeoutError(110, "no answer")

        def read(self, name, limit):
            try:
                return super().read(name, limit)
            finally:
                looks.extend(waiting[:1])
                if len(looks) == reads:
                    do()

    def do():
        while waiting:
            call, *names = waiting.pop()
            with contextlib.suppress(OSError):
                call(*names)

    with pytest.raises(StorageError, match="no answer"):
        brought(catalog_of(fast), catalog_of(base, Late), 2)
    do()
    assert steps_in(base) in ({2: 2}, {2: -2})


def test_a_killed_copy_is_made_again_at_once_beside_what_it_left(tmp_path):
    """The process is killed, not the machine: its leftovers are young."""
    fast, base = tmp_path / "fast", tmp_path / "run"
    for root in (fast, base):
        root.mkdir()
    fill(fast, [2])
    fill(base, [2])
    shutil.rmtree(fast / "step-2")
    shardkeep.save(state(-2), fast / "step-2")
    log = OperationLog(base)
    brought(catalog_of(fast), catalog_of(base, log.store), 2)
    for position in range(len(log.operations)):
        killed = log.resumed(position, tmp_path / f"killed-{position}")
        brought(catalog_of(fast), catalog_of(killed.base), 2)
        assert steps_in(killed.base) == {2: -2}
        # Its first maker may not be dead after all, and go on; what is there already stays.
        brought(catalog_of(fast), catalog_of(killed.base), 2)
        assert steps_in(killed.base) == {2: -2}
        shutil.rmtree(killed.base)


def kept_up(base, open_store):
    """What looks after the two folders of a run, without threads."""
    made = Tiers(base / "run", FastTier(base / "fast", keep=1), StepNames(), 900.0)
    made.all = tuple(
        Tier(found, Pins(found.store))
        for found in (catalog_of(base / name, open_store) for name in ("fast", "run"))
    )
    made._is_ours = True
    upkeep = Upkeep(
        made,
        None,
        FastTier(base / "fast", keep=1),
        stale_s=3600.0,
        leads=False,
        spared=set,
        busy=set,
        moving=threading.Lock(),
    )
    upkeep.saved(2, made.first.catalog.find(2).save_id)
    return upkeep


def test_a_step_leaves_the_fast_tier_only_when_its_copy_is_durable(tmp_path):
    """Killed at any moment of a copy, then taken over, and then the power fails."""
    base = tmp_path / "both"
    for name in ("fast", "run"):
        (base / name).mkdir(parents=True)
    fill(base / "fast", [1, 2])
    fill(base / "run", [0])
    log = OperationLog(base)
    brought(catalog_of(base / "fast", log.store), catalog_of(base / "run", log.store), 1)
    seen, left = set(), []
    moved = next(at for at, each in enumerate(log.operations) if isinstance(each, Move))
    for position in (0, moved // 2, *range(moved - 1, len(log.operations) + 1)):
        again = log.resumed(position, tmp_path / f"killed-{position}")
        upkeep = kept_up(again.base, again.store)
        left.append(upkeep._retentions[1].run())
        for number, point in enumerate(
            crash_points(again.initial, again.operations, start=position, samples=0)
        ):
            if point.state.digest() not in seen:
                seen.add(point.state.digest())
                where = tmp_path / f"{position}-{number}"
                materialize(point.state, where)
                there = [steps_in(where / name) for name in ("fast", "run")]
                assert 1 in there[0] or 1 in there[1], (position, point.variant)
                assert 2 in there[0], (position, point.variant)
                shutil.rmtree(where)
        shutil.rmtree(again.base)
    assert left[0] == []
    assert left[-1] == ["step-1"]


def test_a_copy_that_is_not_wanted_any_more_does_not_appear(tmp_path):
    fill(tmp_path / "fast", [1])
    (tmp_path / "run").mkdir()
    run = catalog_of(tmp_path / "run")
    assert brought(catalog_of(tmp_path / "fast"), run, 1, may_appear=lambda: False) is None
    assert os.listdir(tmp_path / "run") == []


class Stop(Exception):
    pass


def test_what_stops_a_copy_leaves_nothing(tmp_path):
    fill(tmp_path / "fast", [1])
    moved = []

    def pace(nbytes):
        moved.append(nbytes)
        if len(moved) == 2:
            raise Stop

    run = catalog_of(tmp_path / "run")
    with pytest.raises(Stop):
        brought(catalog_of(tmp_path / "fast"), run, 1, pace=pace)
    assert os.listdir(tmp_path / "run") == []
    assert run.copying == set()


def test_leftovers_of_copies_go_when_they_are_old(tmp_path):
    (tmp_path / "run").mkdir()
    fill(tmp_path / "run", [1])
    old, young, ours = (copying_name("step-2", digit * 16) for digit in "abc")
    for name in (old, young, ours):
        shutil.copytree(tmp_path / "run/step-1", tmp_path / "run" / name)
        if name != young:
            for path in [tmp_path / "run" / name, *(tmp_path / "run" / name).iterdir()]:
                os.utime(path, (time.time() - 4000,) * 2)
    catalog = catalog_of(tmp_path / "run")
    catalog.copying.add(ours)
    listing = catalog.look()
    assert listing.copying == (old, young, ours)
    pins = Pins(catalog.store)
    assert clean(catalog, pins, listing, dry_run=True).removed == (old,)
    cleaned = clean(catalog, pins, listing)
    assert cleaned.removed == (old,)
    assert cleaned.nbytes > 8192
    assert [step.step for step in catalog.look().steps] == [1]
    assert set(os.listdir(tmp_path / "run")) == {young, ours, "step-1", ".shardkeep"}


# --- every byte


def large(path, mebibytes=3):
    """A checkpoint of several pieces, in two files."""
    data = np.random.default_rng(0).random(mebibytes << 17)
    shardkeep.save({"a": data, "b": list(range(100))}, path)
    return {name.name: name.read_bytes() for name in (path / "data").iterdir()}


def copied(source, target, **options):
    save_id = read_record(LocalStore(source)).save_id
    return copy_checkpoint(LocalStore(source), LocalStore(target), save_id=save_id, **options)


@pytest.mark.parametrize("mebibytes", [1, 5])
def test_the_copy_is_the_same_bit_for_bit(tmp_path, mebibytes):
    files = large(tmp_path / "a", mebibytes)
    done = copied(tmp_path / "a", tmp_path / "b")
    assert {p.name: p.read_bytes() for p in (tmp_path / "b/data").iterdir()} == files
    assert done.nbytes == sum(map(len, files.values()))
    assert sorted(os.listdir(tmp_path / "b")) == ["checkpoint.json", "data"]
    assert shardkeep.verify(tmp_path / "b").ok


@given(st.data())
def test_any_changed_bit_is_found_before_it_is_copied_on(once, data):
    path, files = once
    name = data.draw(st.sampled_from(sorted(files)))
    at = data.draw(st.integers(0, len(files[name]) - 1))
    bit = data.draw(st.integers(0, 7))
    damaged = bytearray(files[name])
    damaged[at] ^= 1 << bit
    target = path.parent / "copy"
    try:
        (path / "data" / name).write_bytes(damaged)
        with pytest.raises(CorruptionError):
            copied(path, target)
        assert not (target / "checkpoint.json").exists()
    finally:
        (path / "data" / name).write_bytes(files[name])
        shutil.rmtree(target)


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    path = tmp_path_factory.mktemp("copied") / "a"
    return path, large(path)


def test_a_copy_never_replaces_what_is_there(tmp_path):
    large(tmp_path / "a", 1)
    large(tmp_path / "b", 1)
    was = (tmp_path / "b/checkpoint.json").read_bytes()
    with pytest.raises(CheckpointExistsError):
        copied(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b/checkpoint.json").read_bytes() == was
    assert sorted(os.listdir(tmp_path / "b")) == ["checkpoint.json", "data"]
    assert shardkeep.verify(tmp_path / "b").ok


def test_a_copy_whose_commit_failed_after_it_succeeded_is_one(tmp_path):
    class Repeated(LocalStore):
        def link(self, old, new):
            super().link(old, new)
            raise FileExistsError(errno.EEXIST, "there already")

    large(tmp_path / "a", 1)
    source = LocalStore(tmp_path / "a")
    save_id = read_record(source).save_id
    copy_checkpoint(source, Repeated(tmp_path / "b"), save_id=save_id)
    assert shardkeep.verify(tmp_path / "b").ok


def test_every_byte_of_a_copy_is_told_and_every_file_closed(tmp_path):
    large(tmp_path / "a", 5)
    before = os.listdir("/proc/self/fd")
    for name, known in (("b", None), ("c", known_files([LocalStore(tmp_path / "a")]))):
        told, planned = [], []
        done = copied(
            tmp_path / "a",
            tmp_path / name,
            known=known,
            progress=told.append,
            planned=planned.append,
        )
        assert sum(told) == sum(planned) == done.nbytes + done.linked
        assert bool(done.linked) == bool(known)
    assert os.listdir("/proc/self/fd") == before


def test_files_that_are_cut_gone_or_replaced(tmp_path):
    files = large(tmp_path / "a")
    name = max(files, key=lambda name: len(files[name]))
    os.truncate(tmp_path / "a/data" / name, 5000)
    with pytest.raises(CorruptionError, match="has 5000 bytes, the record says"):
        copied(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a/data" / name).unlink()
    with pytest.raises(CorruptionError, match="is named by the record, and is not there"):
        copied(tmp_path / "a", tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError, match="was replaced"):
        copy_checkpoint(LocalStore(tmp_path / "a"), LocalStore(tmp_path / "d"), save_id="0" * 32)


# --- at a pace


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


@given(
    st.floats(1, 1e9),
    st.lists(st.tuples(st.integers(1, 1 << 21), st.floats(0, 10)), min_size=1, max_size=50),
)
def test_in_no_time_more_bytes_than_allowed(rate, pieces):
    clock = Clock()
    pace = Pace(rate, clock, clock.sleep)
    moved = []
    for nbytes, pause in pieces:
        pace(nbytes)
        moved.append((clock.now, nbytes))
        clock.now += pause
    for first in range(len(moved)):
        total = 0
        for last in range(first, len(moved)):
            total += moved[last][1]
            elapsed = moved[last][0] - moved[first][0]
            assert total - moved[last][1] <= rate * (elapsed + 1e-6)


def test_a_copy_keeps_the_pace_with_every_byte_it_writes(tmp_path, monkeypatch):
    files = large(tmp_path / "a", 5)
    monkeypatch.setattr(copying, "UNIT", 1 << 20)
    clock, told = Clock(), []
    pace = Pace(1 << 20, clock, clock.sleep)

    def counted(nbytes):
        pace(nbytes)
        told.append(nbytes)

    copied(tmp_path / "a", tmp_path / "b", pace=counted)
    total = sum(map(len, files.values()))
    assert sum(told) == total
    assert max(told) <= 1 << 20
    assert (total - told[-1]) / (1 << 20) == pytest.approx(clock.now)


def test_without_a_rate_nothing_waits():
    def never(seconds):
        raise AssertionError

    pace = Pace(None, sleep=never)
    for _ in range(3):
        pace(1 << 40)


# --- what is shared


def test_known_files_are_linked_and_what_links_refuse_is_copied(tmp_path, monkeypatch):
    base = np.random.default_rng(0).random(1 << 17)
    for root in ("fast", "run"):
        (tmp_path / root).mkdir()
    fast, run = catalog_of(tmp_path / "fast"), catalog_of(tmp_path / "run")
    shardkeep.save({"a": base, "step": 1}, tmp_path / "fast/step-1")
    for step in (2, 3):
        shardkeep.save(
            {"a": base, "step": step},
            tmp_path / f"fast/step-{step}",
            base=tmp_path / f"fast/step-{step - 1}",
        )
    assert brought(fast, run, 2).linked == 0
    later = brought(fast, run, 3)
    assert later.linked > base.nbytes
    assert brought(fast, run, 1).linked == later.linked  # also from a later one
    assert later.nbytes < base.nbytes / 10

    def refuse(self, other, old, new):
        raise OSError(1, "no links here")

    shutil.rmtree(tmp_path / "run/step-3")
    with monkeypatch.context() as inside:
        inside.setattr(LocalStore, "link_from", refuse)
        assert brought(fast, run, 3).linked == 0
    for step in (1, 2, 3):
        assert shardkeep.verify(tmp_path / f"run/step-{step}").ok


def test_a_known_file_that_is_damaged_is_not_linked(tmp_path):
    files = large(tmp_path / "a", 1)
    copied(tmp_path / "a", tmp_path / "b")
    (name,) = (name for name in files if "index" not in name)
    with open(tmp_path / "b/data" / name, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([files[name][-1] ^ 1]))
    done = copied(tmp_path / "a", tmp_path / "c", known=known_files([LocalStore(tmp_path / "b")]))
    assert done.linked == 0
    assert shardkeep.verify(tmp_path / "c").ok


def test_a_known_file_that_cannot_be_made_durable_is_copied(tmp_path):
    class Unsure(LocalStore):
        def sync_file(self, name):
            raise OSError(errno.EIO, "broken")

    large(tmp_path / "a", 1)
    source = LocalStore(tmp_path / "a")
    target, save_id = Unsure(tmp_path / "b"), read_record(source).save_id
    done = copy_checkpoint(source, target, save_id=save_id, known=known_files([source]))
    assert done.linked == 0
    assert shardkeep.verify(tmp_path / "b").ok
    assert all(file.stat().st_nlink == 1 for file in (tmp_path / "b/data").iterdir())


def test_states_are_compared_with_what_a_recording_sees(tmp_path):
    """The replay knows all that a copy does: what it ends with is what is there."""
    for root in ("fast", "run"):
        (tmp_path / root).mkdir()
    fill(tmp_path / "fast", [1])
    log = OperationLog(tmp_path / "run")
    brought(catalog_of(tmp_path / "fast"), catalog_of(tmp_path / "run", log.store), 1)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(tmp_path / "run/.shardkeep")
    assert log.state() == State.of(tmp_path / "run")
