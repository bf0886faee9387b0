"""Links in and around a checkpoint: files are removed by name, and must be the checkpoint's own."""

import shutil

import numpy as np
import pytest

import shardkeep
from shardkeep import CheckpointError, UnsafeCheckpointError


def state(salt: int = 0) -> dict:
    return {"w": np.arange(100) + salt, "step": salt}


def save(path, salt: int = 0, **options) -> None:
    shardkeep.save(state(salt), path, no_dist=True, **options)


def holds(path, salt: int) -> bool:
    with shardkeep.open(path) as ckpt:
        return shardkeep.verify(path).ok and bool((ckpt["w"][:] == state(salt)["w"]).all())


@pytest.fixture
def linked(tmp_path):
    """`linked` has the record of `real`, and a link in place of its data."""
    save(tmp_path / "real")
    (tmp_path / "linked").mkdir()
    shutil.copy(tmp_path / "real/checkpoint.json", tmp_path / "linked")
    (tmp_path / "linked/data").symlink_to("../real/data")
    return tmp_path / "linked"


@pytest.mark.parametrize(
    "use",
    [
        shardkeep.open,
        shardkeep.verify,
        shardkeep.gc,
        lambda path: shardkeep.load(state(), path, no_dist=True),
        lambda path: save(path, 1, overwrite=True),
        lambda path: shardkeep.gc(path, stale_s=0),
    ],
    ids=["open", "verify", "gc", "load", "overwrite", "gc_now"],
)
def test_a_link_in_place_of_data_is_refused(linked, use):
    with pytest.raises(UnsafeCheckpointError, match="is a symbolic link"):
        use(linked)
    assert holds(linked.parent / "real", 0)
    assert sorted(path.name for path in linked.iterdir()) == ["checkpoint.json", "data"]


def test_collecting_through_a_link_would_remove_what_is_another_s(linked):
    """The files of a newer save of `real` are named by no record of `linked`."""
    real = linked.parent / "real"
    save(real, 1, overwrite=True)
    with pytest.raises(UnsafeCheckpointError):
        shardkeep.gc(linked, stale_s=0)
    assert holds(real, 1)


def test_nothing_is_saved_where_data_is_a_link_without_a_checkpoint(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "new").mkdir()
    for target in ("../elsewhere", "../nowhere"):
        (tmp_path / "new/data").symlink_to(target)
        with pytest.raises(UnsafeCheckpointError):
            save(tmp_path / "new")
        (tmp_path / "new/data").unlink()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not (tmp_path / "nowhere").exists()


def test_a_checkpoint_that_is_linked_as_a_whole_is_fine(tmp_path):
    save(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert holds(tmp_path / "link", 0)
    save(tmp_path / "link", 1, overwrite=True)
    assert shardkeep.gc(tmp_path / "link").removed == ()
    assert holds(tmp_path / "real", 1)
    assert (tmp_path / "link").is_symlink()


def test_data_that_is_a_file(tmp_path):
    save(tmp_path / "a")
    shutil.rmtree(tmp_path / "a/data")
    (tmp_path / "a/data").write_bytes(b"")
    for use in (shardkeep.open, lambda path: save(path, 1, overwrite=True)):
        with pytest.raises(CheckpointError):
            use(tmp_path / "a")
    assert not shardkeep.verify(tmp_path / "a").ok
    assert shardkeep.gc(tmp_path / "a").removed == ()
