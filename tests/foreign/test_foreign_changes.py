"""Files of other systems that change between being looked at and being read."""

from __future__ import annotations

import os
import shutil
import time

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardkeep
from shardkeep import ThreadRanks
from shardkeep.errors import StorageError
from shardkeep.foreign import reader
from shardkeep.foreign.fingerprint import Fingerprint
from shardkeep.foreign.reader import ForeignReader
from shardkeep.foreign.tables import tables_of

BEFORE = {"a": torch.arange(1000.0), "b": torch.ones(5), "t": torch.arange(12.0).reshape(3, 4).t()}
AFTER = {"zz": torch.full((3000,), 7.0), "a": torch.full((1000,), 9.0), "b": torch.zeros(5)}


@pytest.mark.parametrize("name", ["a", "t"])
@pytest.mark.parametrize("replaced", [False, True])
def test_elements_are_never_read_from_another_save(tmp_path, name, replaced):
    path = tmp_path / "model.pt"
    torch.save(BEFORE, path)
    with shardkeep.open(path) as ckpt:
        if replaced:
            torch.save(AFTER, tmp_path / "new.pt")
            os.replace(tmp_path / "new.pt", path)
        else:
            torch.save(AFTER, path)
        with pytest.raises(StorageError, match="open the checkpoint again") as caught:
            ckpt[name][...]
        assert caught.value.transient


def test_a_file_that_changes_while_it_is_open(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(BEFORE, path)
    with shardkeep.open(path) as ckpt:
        assert np.array_equal(ckpt["a"][:5], np.arange(5.0))
        with path.open("r+b") as file:
            file.seek(1)
            file.write(b"K")  # the same bytes, at another time
        later = time.time() + 1
        os.utime(path, (later, later))
        with pytest.raises(StorageError, match="after it was looked at"):
            ckpt["a"][5:10]


def test_a_load_begins_again_when_a_file_is_replaced(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(4), "b": torch.zeros(3)}, path)
    times = []
    plan = ForeignReader.prepare_local_plan

    def replaced(self, given):
        times.append(1)
        if len(times) == 1:
            torch.save({"b": torch.ones(3), "more": "x" * 5000, "a": torch.ones(4)}, path)
        return plan(self, given)

    monkeypatch.setattr(ForeignReader, "prepare_local_plan", replaced)
    state = {"a": np.zeros(4, np.float32), "b": np.zeros(3, np.float32)}
    shardkeep.load(state, path, strict=False)
    assert len(times) == 2
    assert (state["a"] == 1).all()
    assert (state["b"] == 1).all()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_changes_while_it_is_parsed(tmp_path, monkeypatch, replaced):
    """What was parsed is then of one save, and what is remembered of the file of another."""
    path, new = tmp_path / "model.pt", tmp_path / "model" / "model.pt"
    new.parent.mkdir()
    torch.save({"a": torch.zeros(4), "step": 1}, path)
    torch.save({"a": torch.ones(4), "step": 2}, new)
    os.utime(new, (1e9, 1e9))
    times = []

    def written_over(found):
        times.append(1)
        if len(times) == 1 and replaced:
            new.replace(path)
        elif len(times) == 1:
            path.write_bytes(new.read_bytes())
        return tables_of(found)

    monkeypatch.setattr(reader, "tables_of", written_over)
    state = {"a": np.zeros(4, np.float32), "step": 0}
    shardkeep.load(state, path)
    assert (state["a"] == 1).all()
    assert state["step"] == 2


def test_a_file_that_never_stops_changing(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    data = []

    def written_over(found):
        os.utime(path, ns=(0, len(data)))
        data.append(1)
        return tables_of(found)

    torch.save(BEFORE, path)
    monkeypatch.setattr(reader, "tables_of", written_over)
    with pytest.raises(StorageError, match="faster than it can be read") as caught:
        shardkeep.open(path)
    assert caught.value.transient


def test_a_rank_that_finds_another_save_says_so(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(BEFORE, path)
    first, same, other = (ForeignReader(path) for _ in range(3))
    first.read_metadata()
    same.read_metadata(first.announcement())
    torch.save(BEFORE, path)  # all is as before, but for the time
    later = time.time() + 1
    os.utime(path, (later, later))
    with pytest.raises(StorageError, match="different checkpoints") as caught:
        other.read_metadata(first.announcement())
    assert caught.value.transient


@pytest.mark.parametrize("after", [{"step": 2}, {"a": torch.zeros(3, 3)}, {"b": 1}])
def test_what_was_found_is_told_apart(tmp_path, after):
    path = tmp_path / "model.pt"
    when = time.time()
    words = []
    for state in ({"a": torch.zeros(9), "step": 1}, {"a": torch.zeros(9), "step": 1} | after):
        torch.save(state, path)
        os.utime(path, (when, when))
        found = ForeignReader(path)
        found.read_metadata()
        words.append(found.announcement())
    assert words[0] != words[1]


def test_ranks_never_load_two_saves(tmp_path, monkeypatch):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(4), "b": torch.zeros(3)}, path)
    times = []
    read = ForeignReader.read_metadata

    def replaced(self, announcement=b""):
        if announcement and not times:
            times.append(1)
            torch.save({"a": torch.ones(4), "b": torch.ones(3)}, path)
            later = time.time() + 1
            os.utime(path, (later, later))
        return read(self, announcement)

    monkeypatch.setattr(ForeignReader, "read_metadata", replaced)

    def work(ranks):
        state = {"a": np.zeros(4, np.float32), "b": np.zeros(3, np.float32)}
        shardkeep.load(state, path, process_group=ranks)
        return state

    for state in ThreadRanks(2).run(work):
        assert (state["a"] == 1).all()
        assert (state["b"] == 1).all()
    assert times


def saved_by_dcp(state, path):
    dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("save", [torch.save, saved_by_dcp])
def test_hosts_may_have_a_copy_each(tmp_path, save):
    """A copy has another time and another number, and is the same all the same."""
    save(BEFORE, tmp_path / "one")
    (shutil.copytree if save is saved_by_dcp else shutil.copyfile)(
        tmp_path / "one", tmp_path / "other"
    )
    for path in [tmp_path / "other", *tmp_path.glob("other/*")]:
        os.utime(path, (1e9, 1e9))
    first, other = (ForeignReader(tmp_path / name) for name in ("one", "other"))
    first.read_metadata()
    other.read_metadata(first.announcement())


def test_copies_are_told_apart_by_values(tmp_path):
    """Wherever in the files they lie."""
    words = []
    for number in (1, 2):
        state = {f"w{at}": torch.zeros(3000) for at in range(9)}
        state |= {f"v{at}": [number if at == 4 else 0] for at in range(9)}
        saved_by_dcp(state, tmp_path / str(number))
        found = ForeignReader(tmp_path / str(number))
        found.read_metadata()
        words.append(Fingerprint.decode(found.announcement()))
    assert not words[0].agrees(words[1])


@pytest.mark.parametrize("save", [torch.save, saved_by_dcp])
def test_copies_of_two_saves_are_told_apart(tmp_path, save):
    """Also where only their elements differ, and somebody has set the times."""
    for name, state in (("one", BEFORE), ("two", {k: t + 1 for k, t in BEFORE.items()})):
        save(state, tmp_path / name)
        for path in [tmp_path / name, *tmp_path.glob(f"{name}/*")]:
            os.utime(path, (1e9, 1e9))
    first, other = (ForeignReader(tmp_path / name) for name in ("one", "two"))
    first.read_metadata()
    with pytest.raises(StorageError, match="different checkpoints"):
        other.read_metadata(first.announcement())
