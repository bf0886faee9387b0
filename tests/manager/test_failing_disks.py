"""Steps on disks that fail while something is removed, pinned or brought: nothing more is lost."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from runs import blank, fill, is_state, killed_save, state

import shardkeep
from shardkeep.formats.native.commit import read_record
from shardkeep.formats.native.copying import copy_checkpoint
from shardkeep.manager import restoring
from shardkeep.manager.belonging import WORD, bind, say_whose
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.cleaning import Cleaned, _remove_empty, joined_cleaned
from shardkeep.manager.naming import StepNames
from shardkeep.manager.pins import FOLDER, Pins
from shardkeep.manager.publishing import _appear, _replace, remove_dead_copies
from shardkeep.manager.removal import remove_steps, remove_tree
from shardkeep.stores.local import LocalStore


def failing(*calls, code=errno.EIO, when=lambda name: True):
    """A store some of whose calls fail."""

    def method(call):
        def fail(self, name="", *args, **options):
            if when(str(name)):
                raise OSError(code, os.strerror(code))
            return getattr(LocalStore, call)(self, name, *args, **options)

        return fail

    return type("Failing", (LocalStore,), {call: method(call) for call in calls})


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    fill(root, [1, 2])
    return root


def whole(root, step):
    with shardkeep.open(root / f"step-{step}") as found:
        return is_state(found.state_dict(), step)


# --- removal


def test_a_step_that_cannot_be_moved_away_stays_whole(run):
    store = failing("rename", when=lambda name: name == "step-1")(run)
    done = remove_steps(store, Pins(store), ["step-1", "step-2", "step-3"])
    assert (done.failed, done.removed) == (("step-1",), ("step-2",))
    assert whole(run, 1)
    assert os.listdir(run) == ["step-1"]


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_step_that_is_pinned_while_it_goes(run, comes_back):
    """It gets its name again; where that fails it goes, as it would have without the pin."""
    reader = Pins(LocalStore(run))

    class Store(LocalStore):
        def rename(self, old, new):
            if new == "step-1" and not comes_back:
                raise OSError(errno.EIO, "broken")
            super().rename(old, new)
            if old == "step-1":
                reader.hold("step-1")

    store = Store(run)
    done = remove_steps(store, Pins(store), ["step-1"])
    assert bool(done.pinned) is comes_back
    assert bool(done.removed) is not comes_back
    assert (run / "step-1").exists() is comes_back
    assert not comes_back or whole(run, 1)


def test_a_pinned_step_does_not_take_the_place_of_a_newer_one(run):
    """Somebody has saved a step of that name meanwhile."""
    reader = Pins(LocalStore(run))

    class Store(LocalStore):
        def rename(self, old, new):
            super().rename(old, new)
            if old == "step-1":
                fill(run, [1])
                reader.hold("step-1")

    store = Store(run)
    done = remove_steps(store, Pins(store), ["step-1"])
    assert done.pinned == ()
    assert whole(run, 1)
    assert sorted(os.listdir(run)) == [".shardkeep", "step-1", "step-2"]


@pytest.mark.parametrize("call", ["is_directory", "list"])
def test_what_cannot_be_looked_at_is_not_removed(run, call):
    store = failing(call, when=lambda name: name == "step-1")(run)
    assert remove_tree(store, "step-1") == (0, False)
    assert whole(run, 1)


@pytest.mark.parametrize("call", ["unlink", "stat"])
def test_the_rest_goes_though_a_file_will_not(run, call):
    data = sorted(os.listdir(run / "step-1/data"))
    store = failing(call, when=lambda name: name.endswith(data[0]))(run)
    nbytes, gone = remove_tree(store, "step-1")
    assert (nbytes > 0, gone) == (True, False)
    assert os.listdir(run / "step-1") == ["data"]
    assert os.listdir(run / "step-1/data") == data[:1]
    assert remove_tree(LocalStore(run), "step-1")[1]
    assert os.listdir(run) == ["step-2"]


def test_a_directory_that_will_not_go(run):
    store = failing("remove_directory", code=errno.EBUSY, when=lambda name: name == "step-1")(run)
    assert remove_tree(store, "step-1")[1] is False
    assert os.listdir(run / "step-1") == []


def test_others_may_remove_the_same(run):
    class Racing(LocalStore):
        def stat(self, name):
            (run / name).unlink()
            return super().stat(name)

        def remove_directory(self, name):
            super().remove_directory(name)
            super().remove_directory(name)

    assert remove_tree(Racing(run), "step-1") == (0, True)
    assert os.listdir(run) == ["step-2"]
    assert remove_tree(LocalStore(run), "step-1") == (0, True)


# --- pins


def test_who_may_not_write_reads_without_a_pin_and_is_told_once(run, caplog):
    pins = Pins(failing("create", code=errno.EROFS)(run))
    assert pins.take("step-1") is None
    assert pins.take("step-2") is None
    assert [r.levelname for r in caplog.records if "cannot be pinned" in r.message] == ["WARNING"]


def test_a_pin_that_is_not_durable_is_none(run):
    class Failing(LocalStore):
        def create(self, name):
            file = super().create(name)
            unwritable = os.open(os.devnull, os.O_RDONLY)
            os.dup2(unwritable, file.fd)
            os.close(unwritable)
            return file

    pins = Pins(Failing(run))
    with pytest.raises(shardkeep.StorageError):
        pins.hold("step-1")
    assert os.listdir(run / FOLDER) == []
    assert Pins(LocalStore(run)).held() == {}


def test_a_pin_whose_age_cannot_be_told_holds(run):
    Pins(LocalStore(run)).hold("step-1")
    pin = Pins(LocalStore(run)).take("step-2")
    store = failing("stat", code=errno.EACCES, when=lambda name: FOLDER in name)(run)
    assert set(Pins(store, stale_s=0.0, touch_s=1.0).held()) == {"step-1", "step-2"}
    pin.release()


# --- copies that replace a step


@pytest.fixture
def brought(run, tmp_path):
    """A copy of step 2 that is to come where step 1 is."""
    source, inside = LocalStore(run / "step-2"), LocalStore(tmp_path / "copy")
    save_id = read_record(source).save_id
    return inside, copy_checkpoint(source, inside, save_id=save_id)


@pytest.mark.parametrize("call", ["link_from", "rename", "sync_directory"])
def test_a_copy_that_cannot_come_leaves_what_is_there(run, brought, call):
    inside, done = brought
    before = sorted(os.listdir(run / "step-1/data"))
    calls = {"link_from": ["link_from"], "rename": ["rename"], "sync_directory": []}[call]
    made = failing(*calls)

    class Store(made):
        def sync_directory(self, name=""):
            if call == "sync_directory" and name == "data":
                raise OSError(errno.EIO, "broken")
            super().sync_directory(name)

    with pytest.raises((OSError, shardkeep.CheckpointError)):
        _replace(inside, Store(run / "step-1"), done)
    assert whole(run, 1)
    assert sorted(os.listdir(run / "step-1/data")) == before
    assert sorted(os.listdir(run / "step-1")) == ["checkpoint.json", "data"]


def test_what_replaced_a_copy_is_durable_before_its_files_go(run, brought):
    """Its record could come back after a crash, and its files would be gone."""
    inside, done = brought
    ours = {row.name for row in done.record.files}
    events = []

    class Store(LocalStore):
        def rename(self, old, new):
            events.append("commit")
            raise OSError(errno.EIO, "no answer")

        def sync_directory(self, name=""):
            super().sync_directory(name)
            events.append(f"sync {name}")

        def unlink(self, name):
            super().unlink(name)
            events.append("remove" if name in ours else name)

    with pytest.raises(shardkeep.CheckpointError):
        _replace(inside, Store(run / "step-1"), done)
    after = events[events.index("commit") :]
    assert "remove" in after
    assert "sync " in after[: after.index("remove")]
    assert whole(run, 1)


def test_a_copy_replaces_another_save_a_damaged_one_and_not_itself(run, brought):
    inside, done = brought
    there = LocalStore(run / "step-1")
    _replace(inside, there, done)
    with shardkeep.open(run / "step-1") as found:
        assert is_state(found.state_dict(), 2)
    files = sorted(os.listdir(run / "step-1/data"))
    _replace(inside, there, done)
    assert sorted(os.listdir(run / "step-1/data")) == files
    record = run / "step-1/checkpoint.json"
    record.write_bytes(record.read_bytes()[:-30])
    _replace(inside, there, done)
    assert shardkeep.verify(run / "step-1").ok


def test_cleanings_of_two_tiers_are_told_as_one():
    fast = Cleaned(("a",), 3, ("b",), ("c: no",)).under("/fast")
    assert fast == Cleaned(("/fast/a",), 3, ("/fast/b",), ("/fast/c: no",))
    both = joined_cleaned([Cleaned(("d",), 4), fast])
    assert both == Cleaned(("d", "/fast/a"), 7, ("/fast/b",), ("/fast/c: no",))


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EIO])
def test_a_copy_whose_place_is_taken_at_the_last_moment(run, brought, code):
    """It replaces what has come there; where nothing has, the error is told."""
    inside, done = brought
    os.rename(inside.root, run / "copy")

    class Store(LocalStore):
        def is_directory(self, name):
            return False

        def rename(self, old, new):
            if (old, new) == ("copy", "step-1"):
                raise OSError(code, os.strerror(code))
            super().rename(old, new)

    target = Catalog(run, StepNames("step-{step}"), Store)
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output"):
            _appear(target, "copy", "step-1", done)
        assert whole(run, 1)
        return
    _appear(target, "copy", "step-1", done)
    with shardkeep.open(run / "step-1") as found:
        assert is_state(found.state_dict(), 2)


def test_dead_copies_that_will_not_go_are_not_said_to_be_gone(run):
    target = Catalog(run, StepNames("step-{step}"), failing("remove_directory"))
    names, _ = remove_dead_copies(target, ["step-1"], 0.0)
    assert names == []
    assert os.listdir(run / "step-1") == ["data"]
    assert remove_dead_copies(target, [], 0.0) == ([], 0)


# --- what cannot be deleted


def test_a_step_that_cannot_be_deleted_is_named(run, monkeypatch):
    plain = LocalStore.rename

    def rename(self, old, new):
        if old == "step-1":
            raise OSError(errno.EIO, "broken")
        plain(self, old, new)

    monkeypatch.setattr(LocalStore, "rename", rename)
    with shardkeep.CheckpointManager(run) as manager:
        with pytest.raises(shardkeep.StorageError, match=r"step-1 in .* could not be removed"):
            manager.delete(1)
        assert [step.step for step in manager.steps()] == [1, 2]
    assert whole(run, 1)


# --- steps that go while they are restored


class Racing(shardkeep.Checkpointer):
    """Somebody removes what is about to be loaded."""

    removed = 0

    def load(self, state, path, **options):
        if self.removed < self.most:
            shutil.rmtree(path)
            self.removed += 1
        return super().load(state, path, **options)


def test_a_step_that_vanishes_is_passed_over_for_an_older_one(run):
    with Racing(no_dist=True) as keeper, shardkeep.CheckpointManager(run, checkpointer=keeper) as m:
        keeper.most = 1
        target = blank()
        assert m.restore(target).step == 1
        assert is_state(target, 1)


def test_steps_that_vanish_for_ever_are_an_error(run, monkeypatch):
    monkeypatch.setattr(restoring, "TRIES", 2)
    with Racing(no_dist=True) as keeper, shardkeep.CheckpointManager(run, checkpointer=keeper) as m:
        keeper.most = 2
        with pytest.raises(shardkeep.CheckpointNotFoundError):
            m.restore(blank())


# --- cleaning


def test_what_killed_saves_left_in_both_tiers_is_cleaned(run, tmp_path):
    fast = tmp_path / "fast"
    with shardkeep.CheckpointManager(run, fast=fast, stale_s=10.0) as manager:
        manager.save(3, state(3))
        manager.wait_copied()
        killed_save(run / "step-8", age_s=100.0)
        killed_save(fast / "step-9", age_s=100.0)
        killed_save(run / "step-2", age_s=100.0)
        planned = manager.clean(dry_run=True)
        assert (run / "step-8").exists()
        done = manager.clean()
        assert set(done.removed) - set(planned.removed) == {"step-8", str(fast / "step-9")}
        assert (done.nbytes, done.problems) == (planned.nbytes, ())
        assert sorted(os.listdir(run)) == [".shardkeep", "step-1", "step-2", "step-3"]
        assert sorted(os.listdir(fast)) == [".shardkeep", "step-3"]
        assert whole(run, 2)


def test_a_directory_that_is_not_empty_stays(run):
    store = LocalStore(run)
    assert _remove_empty(store, "step-1") == []
    for empty in ("step-5", "step-6/data"):
        (run / empty).mkdir(parents=True)
        assert _remove_empty(store, empty[:6]) == [empty[:6]]
    assert sorted(os.listdir(run)) == ["step-1", "step-2"]


def test_a_fast_tier_that_another_run_has_taken(run, tmp_path):
    fast, durable = LocalStore(tmp_path / "fast"), LocalStore(run)
    fast.make_directory("")
    word = bind(fast, durable)
    say_whose(fast, word)
    (tmp_path / "fast" / WORD).unlink()
    say_whose(fast, word)
    with pytest.raises(shardkeep.StorageError, match="another run than this one"):
        say_whose(fast, "another word")
