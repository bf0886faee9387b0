"""What a folder is said to hold, while others change it and when it cannot be read."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from runs import blank, damage_record, fill, is_state, state

import shardkeep
from shardkeep.errors import StorageError
from shardkeep.formats.native.names import RECORD
from shardkeep.manager.catalog import Catalog, leaving_name
from shardkeep.manager.naming import StepNames
from shardkeep.stores.local import LocalStore


class BusyStore(LocalStore):
    """Something happens after a listing, or at a stat, each time with the next of these."""

    def __init__(self, root, listed=(), stats=()):
        super().__init__(root)
        self.listed, self.stats = list(listed), list(stats)

    def list(self, name=""):
        found = super().list(name)
        if name == "" and self.listed:
            self.listed.pop(0)()
        return found

    def stat(self, name):
        try:
            return super().stat(name)
        finally:
            if name.endswith(RECORD) and self.stats:
                self.stats.pop(0)()


def busy_catalog(root, **when):
    return Catalog(root, StepNames(), lambda path: BusyStore(path, **when))


def numbers(catalog):
    return [found.step for found in catalog.look().steps]


def make_way(root, old, new):
    """As a trainer does that keeps one step."""

    def act():
        fill(root, [new])
        shutil.rmtree(root / f"step-{old}")

    return act


def test_a_step_that_makes_way_while_the_folder_is_listed_is_not_the_end(tmp_path):
    fill(tmp_path, [5])
    acts = [make_way(tmp_path, 5, 6), make_way(tmp_path, 6, 7)]
    assert numbers(busy_catalog(tmp_path, listed=acts)) == [7]


def test_a_restore_beside_a_trainer_that_keeps_one_step_finds_it(tmp_path):
    fill(tmp_path, [5])
    with shardkeep.CheckpointManager(tmp_path) as reader:
        # Between the listing and the look; and between the look and the pin.
        for when in ("listed", "stats"):
            last = reader.latest().step
            reader._catalog.store = BusyStore(
                tmp_path, **{when: [make_way(tmp_path, last, last + 1)]}
            )
            target = blank()
            assert reader.restore(target).step == last + 1
            assert is_state(target, last + 1)
            reader._catalog.store = BusyStore(
                tmp_path, **{when: [make_way(tmp_path, last + 1, last + 2)]}
            )
            with reader.wait_for(timeout=0) as found:
                assert found.step == last + 2


def test_an_older_step_is_not_taken_for_the_newer_one_that_came(tmp_path):
    fill(tmp_path, [5, 6])
    with shardkeep.CheckpointManager(tmp_path) as reader:
        acts = [lambda: None, make_way(tmp_path, 6, 7)]
        reader._catalog.store = BusyStore(tmp_path, stats=acts)
        assert reader.restore(blank()).step == 7


def test_a_step_that_is_moved_away_and_back_is_no_unfinished_one(tmp_path):
    fill(tmp_path, [5])
    away = tmp_path / leaving_name("step-5", "0" * 16)
    catalog = busy_catalog(
        tmp_path,
        listed=[lambda: (tmp_path / "step-5").rename(away)],
        stats=[lambda: away.rename(tmp_path / "step-5")],
    )
    listing = catalog.look()
    assert [found.step for found in listing.steps] == [5]
    assert listing.unfinished == ()


def test_a_folder_that_never_rests_is_not_said_to_be_empty(tmp_path):
    fill(tmp_path, [5])
    acts = [make_way(tmp_path, step, step + 1) for step in range(5, 35)]
    with pytest.raises(StorageError, match="come and go faster") as caught:
        busy_catalog(tmp_path, listed=acts).look()
    assert caught.value.transient


def test_what_is_left_of_removals_alone_is_listed_twice_and_no_more(tmp_path):
    (tmp_path / leaving_name("step-5", "0" * 16)).mkdir()
    listings = []
    listing = busy_catalog(tmp_path, listed=[lambda: listings.append(1)] * 9).look()
    assert (listing.steps, len(listing.leaving), len(listings)) == ((), 1, 2)


class FailingStore(LocalStore):
    """Has no descriptors left."""

    fails = True

    def open(self, name):
        if self.fails and name == f"step-2/{RECORD}":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().open(name)


def test_a_folder_that_cannot_be_looked_at_is_said_to_be_so(tmp_path):
    """It may be a step, also if it has no record that is seen."""

    class Failing(LocalStore):
        def is_directory(self, name):
            if name == "step-2":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().is_directory(name)

    fill(tmp_path, [1])
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-3").mkdir()
    listing = Catalog(tmp_path, StepNames(), Failing).look()
    assert [found.step for found in listing.steps] == [1]
    assert listing.unfinished == ("step-3",)
    assert [(bad.step, bad.kind) for bad in listing.damaged] == [(2, "StorageError")]
    assert "step-2 cannot be read: [Errno 5]" in listing.damaged[0].problem


def test_a_record_that_could_not_be_read_once_is_read_again(tmp_path):
    fill(tmp_path, [1, 2])
    with shardkeep.CheckpointManager(tmp_path) as manager:
        store = manager._catalog.store = FailingStore(tmp_path)
        with pytest.raises(StorageError, match=r"cannot be read.*Too many open files"):
            manager.restore(blank())
        store.fails = False
        assert manager.restore(blank()).step == 2


def test_a_record_that_is_damaged_is_read_once(tmp_path, monkeypatch):
    fill(tmp_path, [1, 2])
    damage_record(tmp_path, 2)
    catalog = Catalog(tmp_path, StepNames())
    first = catalog.look()
    assert [bad.step for bad in first.damaged] == [2]
    monkeypatch.setattr(LocalStore, "open", None)
    assert catalog.look() == first


def test_a_link_is_no_step_and_what_it_leads_to_is_kept(tmp_path, caplog):
    fill(tmp_path, [10, 20])
    (tmp_path / "step-999").symlink_to("step-20")
    (tmp_path / "step-1000").symlink_to("nowhere")
    (tmp_path / "step-1001").symlink_to("step-1001")
    with shardkeep.CheckpointManager(tmp_path, keep=1) as manager:
        assert [found.step for found in manager.steps()] == [10, 20]
        assert manager.restore(blank()).step == 20
        manager.save(30, state(30))
        manager.wait_retention()
        assert [found.step for found in manager.steps()] == [30]
    told = [line for line in caplog.messages if "step-999 is a symbolic link" in line]
    assert len(told) == 1
    assert (tmp_path / "step-999").is_symlink()


def test_a_link_to_the_newest_step_does_not_cost_it(tmp_path):
    fill(tmp_path, [10, 20])
    (tmp_path / "step-999").symlink_to("step-20")
    with shardkeep.CheckpointManager(tmp_path, keep=1) as manager:
        manager._retention.run()
    assert (tmp_path / "step-20" / RECORD).exists()
