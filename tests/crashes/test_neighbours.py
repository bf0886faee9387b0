"""Two at one place, at every point of the one; and places that are not what they seem."""

import os
import time

import pytest
from generations import assert_clean, generation_at, save
from machine import scratch_folder
from meetings import MEETINGS
from neighbours import meet

import shardkeep
from shardkeep import CheckpointNotFoundError, StorageError
from shardkeep.formats.native.commit import collect_garbage
from shardkeep.formats.native.names import lease_name, new_save_id
from shardkeep.stores.local import LocalStore


@pytest.mark.parametrize("name", MEETINGS)
def test_short(name):
    first, second, there = MEETINGS[name]
    with scratch_folder() as folder:
        assert meet(first, second, folder, there=there, every=7) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", MEETINGS)
def test_long(name):
    first, second, there = MEETINGS[name]
    with scratch_folder() as folder:
        assert meet(first, second, folder, there=there) > 5


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_lease_is_judged_by_the_clock_of_its_file_system(tmp_path, monkeypatch, hours):
    """That of the host may be hours off: it neither takes a save for dead nor keeps a dead one."""
    save(tmp_path, 1)
    alive, dead = new_save_id(), new_save_id()
    for save_id, age in ((alive, 0), (dead, 3700)):
        (tmp_path / lease_name(save_id)).write_bytes(b"")
        os.utime(tmp_path / lease_name(save_id), (time.time() - age,) * 2)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    assert collect_garbage(LocalStore(tmp_path)).live == (alive,)
    assert not (tmp_path / lease_name(dead)).exists()


@pytest.mark.parametrize("through", ["the place", "its parent"])
def test_a_directory_that_is_a_link(tmp_path, through):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    place = link if through == "the place" else link / "ckpt"
    save(place, 1)
    save(place, 2, overwrite=True)
    save(place, 3, overwrite=True, base=place)
    assert generation_at(place) == 3
    there = real if through == "the place" else real / "ckpt"
    assert generation_at(there) == 3
    shardkeep.gc(place, stale_s=0)
    assert_clean(there)
    assert link.is_symlink()


def test_a_link_that_leads_nowhere(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointNotFoundError):
        shardkeep.open(link)
    with pytest.raises(StorageError):
        save(link, 1)


def test_a_path_that_is_a_file_or_below_one(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    for place in (file, file / "ckpt"):
        with pytest.raises(StorageError):
            save(place, 1, overwrite=True)
        with pytest.raises(shardkeep.CheckpointError):
            shardkeep.load({"x": None}, place)
        with pytest.raises(shardkeep.CheckpointError):
            shardkeep.gc(place)
        with pytest.raises(shardkeep.CheckpointError):
            shardkeep.verify(place)
    assert file.read_bytes() == b"precious"
