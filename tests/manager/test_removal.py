"""A step that goes is whole or absent at every moment, and is not taken from who reads it."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time

import pytest
from runs import fill, is_state

import shardkeep
from shardkeep import CheckpointManager, KeepLast
from shardkeep.cli.runs import Run
from shardkeep.errors import CheckpointNotFoundError, StorageError
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.cleaning import clean
from shardkeep.manager.naming import StepNames
from shardkeep.manager.pins import FOLDER, Pins
from shardkeep.manager.removal import finish_removals, remove_steps
from shardkeep.manager.retention import Retention
from shardkeep.stores.local import LocalStore
from shardkeep.testing.disk import crash_points
from shardkeep.testing.operations import materialize
from shardkeep.testing.recording import OperationLog
from shardkeep.testing.system_calls import intercepted


class UnsyncedStore(LocalStore):
    """For looking at what a crash left."""

    def _sync_directory(self, path):
        pass


def catalog_of(root, open_store=UnsyncedStore):
    return Catalog(root, StepNames(), open_store)


def check_whole(root):
    """Every step that is listed is whole, and says which it is."""
    listing = catalog_of(root).look()
    assert listing.damaged == ()
    for step in listing.steps:
        with shardkeep.open(step.path) as found:
            assert is_state(found.state_dict(), step.step)
        assert shardkeep.verify(step.path).ok
    return [step.step for step in listing.steps]


def after_crash(point, where, last):
    """What is left is whole, and one pass later it is clean."""
    materialize(point.state, where)
    there = check_whole(where)
    assert set(last) <= set(there), point.variant
    catalog = catalog_of(where)
    clean(catalog, Pins(catalog.store), catalog.look(), stale_s=0)
    assert check_whole(where) == there, point.variant
    assert set(os.listdir(where)) - {".shardkeep"} == {f"step-{step}" for step in there}
    shutil.rmtree(where)


def test_a_crash_at_any_moment_leaves_a_step_whole_or_absent(tmp_path):
    base = tmp_path / "run"
    base.mkdir()
    fill(base, [1, 2, 3])
    log = OperationLog(base)
    store = log.store(base)
    done = remove_steps(store, Pins(store), ["step-1", "step-2"])
    assert done.removed == ("step-1", "step-2")
    assert check_whole(base) == [3]
    points = list(crash_points(log.initial, log.operations, samples=2))
    assert len(points) > 50
    seen = set()
    for number, point in enumerate(points):
        if point.state.digest() not in seen:
            seen.add(point.state.digest())
            after_crash(point, tmp_path / str(number), [3])


def test_a_removal_that_was_killed_is_finished_and_may_be_killed_again(tmp_path):
    base = tmp_path / "run"
    base.mkdir()
    fill(base, [1, 2])
    log = OperationLog(base)
    remove_steps(log.store(base), Pins(log.store(base)), ["step-1"])
    seen = set()
    for position in range(len(log.operations)):
        again = log.resumed(position, tmp_path / f"again-{position}")
        store = again.store(again.base)
        leaving = catalog_of(again.base).look().leaving
        finish_removals(store, Pins(store), leaving)
        there = check_whole(again.base)
        assert there == ([2] if leaving or position > 0 else [1, 2])
        for number, point in enumerate(
            crash_points(again.initial, again.operations, start=position, samples=1)
        ):
            if point.state.digest() not in seen:
                seen.add(point.state.digest())
                after_crash(point, tmp_path / f"{position}-{number}", [2])


def test_the_new_name_is_durable_before_a_byte_goes(tmp_path):
    base = tmp_path / "run"
    base.mkdir()
    fill(base, [1, 2])
    log = OperationLog(base)
    store = log.store(base)
    remove_steps(store, Pins(store), ["step-1"])
    kinds = [type(operation).__name__ for operation in log.operations]
    assert kinds[:2] == ["Move", "SyncDirectory"]
    assert set(kinds[2:]) == {"Remove"}


def test_what_a_link_leads_to_stays(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    fill(tmp_path / "elsewhere", [1])
    base = tmp_path / "run"
    base.mkdir()
    fill(base, [2])
    (base / "step-1").symlink_to(tmp_path / "elsewhere/step-1")
    store = LocalStore(base)
    assert remove_steps(store, Pins(store), ["step-1"]).removed == ("step-1",)
    assert os.listdir(base) == ["step-2"]
    assert check_whole(tmp_path / "elsewhere") == [1]


# --- pins


class Interrupted(LocalStore):
    """Something happens just before or just after a step is moved away."""

    def __init__(self, root, before=None, after=None):
        super().__init__(root)
        self._before, self._after = before, after

    def rename(self, old, new):
        if self._before is not None and old.startswith("step-"):
            self._before()
        super().rename(old, new)
        if self._after is not None and old.startswith("step-"):
            self._after()


def test_a_pin_that_comes_in_between_is_respected(tmp_path):
    fill(tmp_path, [1, 2])
    plain = Pins(LocalStore(tmp_path))
    taken = []
    store = Interrupted(tmp_path, before=lambda: taken.append(plain.take("step-1")))
    done = remove_steps(store, plain, ["step-1"])
    assert done.pinned == ("step-1",)
    assert check_whole(tmp_path) == [1, 2]
    taken[0].release()
    assert remove_steps(LocalStore(tmp_path), plain, ["step-1"]).removed == ("step-1",)


def test_a_remover_killed_before_it_looked_at_the_pins_takes_nothing_away(tmp_path):
    fill(tmp_path, [1, 2])
    pins = Pins(LocalStore(tmp_path))
    kept = []

    def pinned_and_killed():
        kept.append(pins.take("step-1"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remove_steps(Interrupted(tmp_path, after=pinned_and_killed), pins, ["step-1"])
    catalog = catalog_of(tmp_path)
    assert check_whole(tmp_path) == [2]
    clean(catalog, pins, catalog.look())
    assert check_whole(tmp_path) == [1, 2]
    kept[0].release()


def test_a_name_that_is_taken_again_is_not_given_back(tmp_path):
    fill(tmp_path, [1, 2])
    pins = Pins(LocalStore(tmp_path))

    def pinned_and_saved_again():
        pins.take("step-1")
        fill(tmp_path, [1])

    done = remove_steps(Interrupted(tmp_path, after=pinned_and_saved_again), pins, ["step-1"])
    assert done.removed == ("step-1",)
    assert check_whole(tmp_path) == [1, 2]


def test_pins_for_good_and_of_the_dead(tmp_path):
    fill(tmp_path, [1, 2, 3])
    store = LocalStore(tmp_path)
    pins = Pins(store, stale_s=60)
    pins.hold("step-1", "the one of the paper")
    dead = pins.take("step-2", "evaluation")
    assert set(pins.held()) == {"step-1", "step-2"}
    assert "the one of the paper" in pins.describe(pins.held()["step-1"])
    assert f"process {os.getpid()}" in pins.describe(pins.held()["step-2"])
    for name in os.listdir(tmp_path / FOLDER):
        os.utime(tmp_path / FOLDER / name, (time.time() - 61,) * 2)
    assert set(pins.held()) == {"step-1"}
    assert remove_steps(store, pins, ["step-1", "step-2"]).removed == ("step-2",)
    assert pins.remove_dead() == 1
    assert pins.drop("step-1") == 1
    assert pins.drop("step-1") == 0
    assert remove_steps(store, pins, ["step-1"]).removed == ("step-1",)
    assert remove_steps(store, pins, ["step-1"]).removed == ()
    dead.release()
    assert os.listdir(tmp_path / FOLDER) == []


def test_a_reader_keeps_its_pin_fresh_as_long_as_it_lives(tmp_path):
    fill(tmp_path, [1])
    pins = Pins(LocalStore(tmp_path), stale_s=0.5, touch_s=0.1)
    pin = pins.take("step-1")
    time.sleep(1.0)
    assert set(pins.held()) == {"step-1"}
    del pin  # forgotten, as by an exception
    deadline = time.monotonic() + 20
    while pins.held():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_readers_and_removers_that_race_never_lose(tmp_path):
    """Whoever pinned and then found the step reads it to the end."""
    fill(tmp_path, range(12))
    catalog = Catalog(tmp_path, StepNames())
    pins = Pins(catalog.store)
    stop, errors, read = threading.Event(), [], []

    def reader():
        mine = Catalog(tmp_path, StepNames())
        while not stop.is_set():
            for step in mine.look().steps:
                with contextlib.ExitStack() as inside:
                    inside.callback(pins.take(f"step-{step.step}").release)
                    if not mine.copies(step.step):
                        continue
                    for _ in range(2):
                        try:
                            with shardkeep.open(step.path) as found:
                                assert is_state(found.state_dict(), step.step)
                                read.append(step.step)
                            break
                        except CheckpointNotFoundError as error:
                            # Moved away and back: it is there again, as it is pinned.
                            time.sleep(0.05)
                            lost = error
                    else:
                        errors.append(lost)

    readers = [threading.Thread(target=reader) for _ in range(2)]
    for thread in readers:
        thread.start()
    for number in range(11):
        while (tmp_path / f"step-{number}").exists():
            remove_steps(catalog.store, pins, [f"step-{number}"])
    stop.set()
    for thread in readers:
        thread.join()
    assert errors == []
    assert read
    assert check_whole(tmp_path) == [11]


class AskedTwice(LocalStore):
    """A network file system that moves a directory, is asked again, and says there is none."""

    def rename(self, old, new):
        super().rename(old, new)
        raise FileNotFoundError(2, "No such file or directory")


def test_a_step_that_moved_though_it_was_not_said(tmp_path):
    fill(tmp_path, [1, 2])
    store = AskedTwice(tmp_path)
    assert remove_steps(store, Pins(store), ["step-1"]).removed == ("step-1",)
    assert check_whole(tmp_path) == [2]
    assert not catalog_of(tmp_path).look().leaving


def test_a_pinned_step_that_moved_back_though_it_was_not_said(tmp_path):
    fill(tmp_path, [1, 2])
    store = AskedTwice(tmp_path)
    pins = Pins(store)
    held = iter([{}, {"step-1": ()}])  # pinned between the first look and the move
    pins.held = lambda: next(held)
    done = remove_steps(store, pins, ["step-1"])
    assert (done.pinned, done.removed) == (("step-1",), ())
    assert check_whole(tmp_path) == [1, 2]


def test_nothing_goes_for_the_sake_of_a_step_that_may_not_last(tmp_path):
    """It is seen, and whoever saved it could not make it durable."""
    fill(tmp_path, [1, 2, 3])

    def handler(call):
        if call.name == "fsync" and call.path() == tmp_path / "step-3":
            raise OSError(5, "Input/output error")
        return call.make()

    catalog = catalog_of(tmp_path, LocalStore)
    retention = Retention(catalog, Pins(catalog.store), KeepLast(1), stale_s=3600)
    manager = CheckpointManager(tmp_path, no_dist=True)
    with intercepted(handler):
        for remove in (
            retention.run,
            lambda: manager.delete(2),
            lambda: Run(str(tmp_path), "step-{step}").remove([2], force=False, dry_run=False),
        ):
            with pytest.raises(StorageError, match="Input/output"):
                remove()
    assert check_whole(tmp_path) == [1, 2, 3]
    assert retention.run() == ["step-1", "step-2"]


def test_a_pass_for_which_a_step_is_gone_removes_nothing(tmp_path):
    fill(tmp_path, [1, 2, 3])
    catalog = catalog_of(tmp_path, LocalStore)
    retention = Retention(catalog, Pins(catalog.store), KeepLast(1), stale_s=3600)
    listing = catalog.look()
    shutil.rmtree(tmp_path / "step-3")
    assert retention._remove(listing.steps, KeepLast(1), set()) == []
    assert check_whole(tmp_path) == [1, 2]
