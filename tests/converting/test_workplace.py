"""Where a result is built, and how it gets to its place: also where others, or disks, interfere."""

import errno
import fcntl
import os
import shutil

import numpy as np
import pytest

from shardkeep.converting import workplace
from shardkeep.converting.workplace import Workplace, check_free
from shardkeep.errors import CheckpointExistsError, StorageError


def failing(code, *, after=None):
    """A call that fails, maybe after it has done its work: network file systems say so."""

    def call(*args):
        if after is not None:
            after(*args)
        raise OSError(code, os.strerror(code))

    return call


def publish(destination, *, overwrite=False, is_file=True):
    with Workplace(destination, "same", overwrite=overwrite) as place:
        if is_file:
            place.made.write_bytes(b"new")
        else:
            place.made.mkdir()
            (place.made / "model.safetensors").write_bytes(b"new")
        place.publish()


def content(path):
    return path.read_bytes() if path.is_file() else (path / "model.safetensors").read_bytes()


def old(destination, is_file):
    """A checkpoint that may be replaced."""
    from safetensors.numpy import save_file

    if not is_file:
        destination.mkdir()
    save_file({"w": np.zeros(2)}, destination if is_file else destination / "model.safetensors")
    return content(destination)


def alone(tmp_path):
    """Nothing is left of the folder in which it was built."""
    return not (tmp_path / "x.safetensors.converting").exists()


@pytest.fixture
def there(tmp_path):
    return tmp_path / "x.safetensors"


def test_a_link_is_not_replaced(tmp_path, there):
    there.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointExistsError, match="is a link"):
        check_free(there, overwrite=True)


def test_a_file_takes_the_place_of_an_empty_directory(there):
    there.mkdir()
    publish(there)
    assert content(there) == b"new"


# --- moves


@pytest.mark.parametrize("is_file", [True, False])
def test_a_move_that_was_made_and_is_denied(tmp_path, there, monkeypatch, is_file):
    name = "link" if is_file else "rename"
    monkeypatch.setattr(os, name, failing(errno.ENOENT, after=getattr(os, name)))
    publish(there, is_file=is_file)
    assert content(there) == b"new"
    assert alone(tmp_path)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_replacement_that_was_made_and_is_denied(tmp_path, there, monkeypatch, is_file):
    old(there, is_file)
    name = "replace" if is_file else "rename"
    after = getattr(os, name)

    def rename(one, other):
        shutil.rmtree(other)
        after(one, other)

    monkeypatch.setattr(os, name, failing(errno.EIO, after=after if is_file else rename))
    publish(there, overwrite=True, is_file=is_file)
    assert content(there) == b"new"


def test_where_there_are_no_hard_links_a_file_is_renamed(tmp_path, there, monkeypatch):
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    publish(there)
    assert content(there) == b"new"
    assert alone(tmp_path)


@pytest.mark.parametrize("is_file", [True, False])
def test_what_appears_meanwhile_is_not_replaced(tmp_path, there, monkeypatch, is_file):
    name = "link" if is_file else "rename"
    real = getattr(os, name)

    def call(one, other):
        old(there, is_file)
        real(one, other)

    monkeypatch.setattr(os, name, call)
    with pytest.raises(CheckpointExistsError, match="made by somebody else"):
        publish(there, is_file=is_file)
    assert content(there) != b"new"
    assert alone(tmp_path)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_move_that_fails_leaves_what_was_there(tmp_path, there, monkeypatch, is_file):
    before = old(there, is_file)
    monkeypatch.setattr(os, "replace" if is_file else "rename", failing(errno.EIO))
    with pytest.raises(StorageError, match="moving the result"):
        publish(there, overwrite=True, is_file=is_file)
    assert content(there) == before
    assert alone(tmp_path)


def test_an_exchange_that_fails_leaves_what_was_there(tmp_path, there, monkeypatch):
    before = old(there, False)
    monkeypatch.setattr(workplace, "exchange_names", failing(errno.EIO))
    with pytest.raises(StorageError, match="moving the result"):
        publish(there, overwrite=True, is_file=False)
    assert content(there) == before


@pytest.mark.parametrize("fails", ["the first", "neither, but denied"])
def test_where_names_cannot_change_places(there, monkeypatch, fails):
    """Two moves, of which the first may fail, and the second be denied though it was made."""
    before = old(there, False)
    monkeypatch.setattr(workplace, "exchange_names", failing(errno.EINVAL))
    real, moves = os.rename, []

    def rename(one, other):
        moves.append(os.path.basename(other))
        if fails == "the first" and moves[1:] == ["replaced"]:
            raise OSError(errno.EIO, "broken")
        real(one, other)
        if len(moves) == 3:
            raise OSError(errno.EIO, "it was made")

    monkeypatch.setattr(os, "rename", rename)
    if fails == "the first":
        with pytest.raises(StorageError, match="broken"):
            publish(there, overwrite=True, is_file=False)
        assert content(there) == before
    else:
        publish(there, overwrite=True, is_file=False)
        assert content(there) == b"new"


# --- the folder


def test_a_folder_that_goes_while_it_is_locked_is_made_again(there, monkeypatch):
    real, seen = workplace._lock, []

    def lock(fd, folder):
        real(fd, folder)
        if not seen:
            shutil.rmtree(folder)  # by whoever held it until now
        seen.append(folder)

    monkeypatch.setattr(workplace, "_lock", lock)
    publish(there)
    assert len(seen) == 2
    assert content(there) == b"new"


@pytest.mark.parametrize(
    ("code", "goes_on"), [(errno.ENOLCK, True), (errno.EWOULDBLOCK, False), (errno.EACCES, False)]
)
def test_locks_that_are_not_to_be_had(there, monkeypatch, code, goes_on):
    monkeypatch.setattr(fcntl, "flock", failing(code))
    if goes_on:
        publish(there)
        assert content(there) == b"new"
        return
    with pytest.raises(StorageError, match="another convert is at work"):
        publish(there)
    assert not there.exists()


def test_a_file_that_was_taken_away_goes_once_something_better_is_there(tmp_path, there):
    before = old(there, True)
    folder = tmp_path / "x.safetensors.converting"
    folder.mkdir()
    (folder / "replaced").write_bytes(b"older")
    with Workplace(there, "same", overwrite=True):
        assert not (folder / "replaced").exists()
    assert content(there) == before
