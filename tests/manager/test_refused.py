"""What a run must not do to what is there, and what must not be left of a run."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest
from runs import blank, damage, fill, is_state, killed_save, state

import shardkeep
from shardkeep import (
    CheckpointExistsError,
    CheckpointManager,
    CorruptionError,
    FormatError,
    StorageError,
    UnsupportedValueError,
)
from shardkeep.formats.native.names import RECORD
from shardkeep.manager import cleaning
from shardkeep.manager.catalog import Catalog
from shardkeep.manager.pins import Pins
from shardkeep.manager.removal import remove_steps
from shardkeep.stores.local import LocalStore


def pin(root, step):
    Pins(LocalStore(root)).hold(f"step-{step}", "the paper's figures")


def contents(root, step):
    found = blank()
    shardkeep.load(found, os.path.join(root, f"step-{step}"))
    return found["step"]


# --- what is pinned, and what is a link


@pytest.mark.parametrize("overwrite", [None, True])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_pinned_step_is_not_replaced_by_a_run_that_went_back(tmp_path, how, overwrite):
    fill(tmp_path, [10, 20])
    pin(tmp_path, 20)
    with CheckpointManager(tmp_path) as manager:
        manager.restore(blank(), 10)
        with pytest.raises(CheckpointExistsError, match=r"pinned by .*figures.* pin .*20 --remove"):
            getattr(manager, how)(20, state(999), overwrite=overwrite)
        assert contents(tmp_path, 20) == 20
        manager.save(30, state(30))
        Pins(LocalStore(tmp_path)).drop("step-20")
        manager.restore(blank(), 10)
        manager.save(20, state(21))
    assert contents(tmp_path, 20) == 21


def test_a_readers_pin_does_not_keep_a_training_from_going_on(tmp_path):
    fill(tmp_path, [10, 20])
    with CheckpointManager(tmp_path) as manager, Pins(LocalStore(tmp_path)).take("step-20"):
        manager.restore(blank(), 10)
        manager.save(20, state(21))
    assert contents(tmp_path, 20) == 21


def test_a_pin_of_a_step_that_is_gone_holds_nothing(tmp_path):
    pin(tmp_path, 20)
    fill(tmp_path, [10])
    with CheckpointManager(tmp_path) as manager:
        manager.restore(blank())
        manager.save(20, state(20))
    assert contents(tmp_path, 20) == 20


@pytest.mark.parametrize("overwrite", [None, True])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_named_like_a_step_is_not_written_through(tmp_path, dangling, overwrite):
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "run"
    root.mkdir()
    if not dangling:
        shardkeep.save(state(7), elsewhere)
    (root / "step-7").symlink_to(elsewhere)
    with CheckpointManager(root) as manager:
        assert manager.restore(blank()) is None
        with pytest.raises(StorageError, match=r"symbolic link.*Remove the link"):
            manager.save(7, state(8), overwrite=overwrite)
    assert elsewhere.exists() != dangling
    if not dangling:
        found = blank()
        shardkeep.load(found, elsewhere)
        assert is_state(found, 7)


# --- what is told beside a step


@pytest.mark.parametrize("given", [[1], "loss", 3.0])
def test_metrics_that_are_no_mapping_are_refused(tmp_path, given):
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(UnsupportedValueError, match="metrics is a"),
    ):
        manager.save(1, state(1), given)
    assert not (tmp_path / "step-1").exists()


def test_a_step_is_not_taken_for_the_run_that_holds_it(tmp_path):
    fill(tmp_path, [10])
    with pytest.raises(FormatError, match="is a checkpoint, and not the folder of a run"):
        CheckpointManager(tmp_path / "step-10").restore(blank())


@pytest.mark.parametrize("which", ["durable", "fast"])
def test_nothing_is_saved_into_a_step(tmp_path, which):
    fill(tmp_path / "run", [1])
    step = tmp_path / "run/step-1"
    before = sorted(os.walk(step))
    fast = {"fast": step} if which == "fast" else {}
    root = tmp_path / "other" if which == "fast" else step
    with CheckpointManager(root, no_dist=True, **fast) as manager:
        for save in (manager.save, manager.async_save):
            with pytest.raises(FormatError, match="is a checkpoint, and not the folder of a run"):
                save(2, state(2))
    assert sorted(os.walk(step)) == before


def test_a_folder_that_cannot_be_listed_costs_a_warning_and_no_save(tmp_path, monkeypatch):
    fill(tmp_path, [10, 20])
    with CheckpointManager(tmp_path) as manager:
        manager.restore(blank(), 10)
        with monkeypatch.context() as patch:

            def refuse():
                raise StorageError("listing: Input/output error")

            patch.setattr(manager._catalog, "look", refuse)
            manager.save(11, state(11))
    assert contents(tmp_path, 11) == 11


# --- managers that nobody closes


def retention_threads():
    return [thread for thread in threading.enumerate() if thread.name == "shardkeep-retention"]


def test_a_manager_that_is_not_closed_goes_with_its_last_reference(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    assert manager.wait_retention(30)
    assert [step.step for step in manager.steps()] == [3]
    gone = weakref.ref(manager)
    del manager
    deadline = time.monotonic() + 10
    while retention_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert retention_threads() == []
    gc.collect()
    assert gone() is None


def test_a_manager_that_is_not_closed_does_not_keep_the_program_from_ending(tmp_path):
    program = textwrap.dedent(
        """
        import sys
        import numpy as np
        import shardkeep

        manager = shardkeep.CheckpointManager(sys.argv[1], keep=1)
        for step in range(5):
            manager.async_save(step, {"w": np.zeros(100)})
        """
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert CheckpointManager(tmp_path).latest().step == 4


def test_passes_go_on_after_the_thread_has_ended(tmp_path):
    with CheckpointManager(tmp_path, keep=2) as manager:
        for step in range(6):
            manager.save(step, state(step))
            assert manager.wait_retention(30)
            assert len(manager.steps()) <= 2


# --- saves that fail, saves that run


def test_a_failed_save_before_one_that_succeeded_does_not_set_the_run_back(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.restore(blank())
        manager.save(5, state(5))
        manager.async_save(10, state(10)).result()
        failed = shardkeep.handles.SaveHandle("nowhere")
        manager._begun = failed, 5
        manager.save(20, state(20))
        failed.end(StorageError("no"))  # while the next one was saved
        with pytest.raises(CheckpointExistsError):
            manager.save(10, state(11))
        with pytest.raises(CheckpointExistsError):
            manager.save(20, state(21))
    assert contents(tmp_path, 20) == 20


def test_restore_waits_for_the_save_that_reads_what_it_loads_into(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        target = state(1, 2_000_000)
        manager.save(1, target)
        target["w"][:] = 2
        target["step"] = 2
        handle = manager.async_save(2, target)
        assert manager.restore(target).step == 2
        assert handle.done()
        assert is_state(target, 2)


def test_a_step_that_is_being_saved_is_not_deleted(tmp_path):
    fill(tmp_path, [1, 2])
    with CheckpointManager(tmp_path) as manager:
        manager._hold(2)
        with pytest.raises(StorageError, match="being saved") as caught:
            manager.delete(2, force=True)
        assert caught.value.transient
        manager._busy.clear()
        manager.delete(2)
        assert [step.step for step in manager.steps()] == [1]


def test_a_step_is_its_own_base_after_the_run_went_back(tmp_path):
    with CheckpointManager(tmp_path, full_every=10) as manager:
        kept = np.random.default_rng(0).random(200_000)
        for step in (10, 20):
            manager.save(step, {"kept": kept, "step": step})
        manager.restore({"kept": kept.copy(), "step": 0}, 10)
        done = manager.save(20, {"kept": kept, "step": 21})
        assert done.stats["kept_bytes"] == kept.nbytes
    found = {"kept": np.zeros_like(kept), "step": 0}
    shardkeep.load(found, tmp_path / "step-20")
    assert found["step"] == 21
    assert (found["kept"] == kept).all()
    for step in (10, 20):
        assert shardkeep.verify(tmp_path / f"step-{step}").ok


@pytest.mark.parametrize("falls", [True, False])
def test_what_was_found_damaged_is_no_base(tmp_path, falls):
    with CheckpointManager(tmp_path, full_every=10) as manager:
        kept = np.random.default_rng(0).random(20_000)
        for step in (10, 20):
            manager.save(step, {"kept": kept, "moving": np.full(20_000, step)})
        damage(tmp_path, 20)  # what only this step has
        target = {"kept": kept.copy(), "moving": np.zeros(20_000, int)}
        if falls:
            assert manager.restore(target).step == 10
        else:
            with pytest.raises(CorruptionError):
                manager.restore(target, fall_back=False)
            manager.restore(target, 10)
        manager.save(20, {"kept": kept, "moving": np.full(20_000, 20)})  # bit for bit as before
    assert shardkeep.verify(tmp_path / "step-20").ok


def test_what_only_a_damaged_step_had_is_not_mixed_into_an_older_one(tmp_path):
    shardkeep.save(state(1), tmp_path / "step-1")
    shardkeep.save({**state(2), "late": np.ones(9)}, tmp_path / "step-2")
    damage(tmp_path, 2)
    target = {**blank(), "late": np.zeros(9)}
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(CorruptionError, match=r"late may hold parts of step 2.*step 1"):
            manager.restore(target, strict=False)
        target = {**blank(), "late": np.zeros(9)}
        assert manager.restore(target, 1, strict=False).step == 1
    assert is_state(target, 1)
    assert not target["late"].any()


# --- who cleans beside who saves


def test_a_save_that_begins_where_somebody_cleans_finds_its_directory(tmp_path, monkeypatch):
    """The directory goes between the moment it is made and the lease in it."""
    killed_save(tmp_path / "step-5", age_s=100)
    catalog = CheckpointManager(tmp_path)._catalog
    made, left = LocalStore.make_directory, [2]

    def make_directory(store, name, **options):
        made(store, name, **options)
        if name == "data" and left[0]:
            left[0] -= 1
            removed = cleaning.clean(
                catalog, Pins(catalog.store), catalog.look(), stale_s=0 if left[0] else 1
            )
            assert "step-5" in removed.removed or not left[0]

    monkeypatch.setattr(LocalStore, "make_directory", make_directory)
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, state(5))
    assert contents(tmp_path, 5) == 5


def test_a_directory_that_a_save_has_begun_in_is_not_taken_for_empty(tmp_path):
    (tmp_path / "step-5/data").mkdir(parents=True)
    store = LocalStore(tmp_path)
    lease = tmp_path / "step-5" / "lease.tmp"
    renamed = store.rename

    def begin(old, new):
        lease.write_bytes(b"")  # after the look, before the move
        store.rename = renamed
        renamed(old, new)

    store.rename = begin
    assert cleaning._remove_empty(store, "step-5") == []
    assert lease.exists()
    assert (tmp_path / "step-5/data").is_dir()
    lease.unlink()
    assert cleaning._remove_empty(store, "step-5") == ["step-5"]
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_one_step_that_will_not_go_does_not_keep_the_others(tmp_path):
    fill(tmp_path, [1, 2, 3])
    locked = tmp_path / "step-1" / "locked"
    (locked / "inner").mkdir(parents=True)
    locked.chmod(0)
    try:
        done = remove_steps(LocalStore(tmp_path), Pins(LocalStore(tmp_path)), ["step-1", "step-2"])
        assert done.failed == ("step-1",)
        assert done.removed == ("step-2",)
    finally:
        for path in tmp_path.glob(".deleted-*/locked"):
            path.chmod(0o755)


def test_a_listing_that_fails_keeps_no_other_step_from_going(tmp_path, caplog):
    fill(tmp_path, [1, 2, 3])
    store = LocalStore(tmp_path)
    listed = store.list

    def fail(name=""):
        if name.endswith("step-1/data"):
            raise PermissionError(13, "Permission denied", name)
        return listed(name)

    store.list = fail
    with caplog.at_level(logging.WARNING, logger="shardkeep"):
        done = remove_steps(store, Pins(store), ["step-1", "step-2"])
    assert (done.failed, done.removed) == (("step-1",), ("step-2",))
    assert not os.path.exists(tmp_path / "step-1" / RECORD)
    catalog = Catalog(tmp_path, CheckpointManager(tmp_path)._catalog.names)
    catalog.store.list = fail
    found = cleaning.clean(catalog, Pins(catalog.store), catalog.look())
    assert found.problems == ("step-1 could not be removed wholly",)


# --- what takes long on one rank, while others wait for it


def counted(manager, monkeypatch):
    told = []
    monkeypatch.setattr(manager.checkpointer.coordinator, "advance", told.append, raising=False)
    return told


def test_a_removal_tells_that_it_goes_on(tmp_path, monkeypatch):
    fill(tmp_path, [1, 2, 3])
    manager = CheckpointManager(tmp_path)
    told = counted(manager, monkeypatch)
    manager.delete(3)
    assert len(told) >= 3
    told.clear()
    manager.restore(blank(), 1, drop_newer=True)
    assert len(told) >= 3
    assert [step.step for step in manager.steps()] == [1]


def test_who_looks_seldom_tells_often(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkeep.manager.waiting.TELL_S", 0.01)
    manager = CheckpointManager(tmp_path)
    told = counted(manager, monkeypatch)
    looks = []
    look = manager._catalog.look
    monkeypatch.setattr(manager._catalog, "look", lambda: looks.append(1) or look())
    with pytest.raises(TimeoutError):
        manager.wait_for(1, timeout=0.7, poll_s=10.0)
    assert len(looks) < len(told)


@pytest.mark.parametrize("poll_s", [0, -1.0, float("nan")])
def test_a_pause_of_nothing_is_refused(tmp_path, poll_s):
    with pytest.raises(ValueError, match="poll_s"):
        CheckpointManager(tmp_path).wait_for(1, timeout=1, poll_s=poll_s)
