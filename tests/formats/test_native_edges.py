"""The native format where something is refused, or is replaced while it is looked at."""

import errno
import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    NativeReader,
    NativeWriter,
    StorageError,
    UnsupportedValueError,
)
from shardkeep.formats.native import commit
from shardkeep.formats.native.copying import copy_checkpoint
from shardkeep.formats.native.layout import Limits
from shardkeep.formats.native.names import lease_name, new_save_id
from shardkeep.formats.native.record import (
    MAX_DEPTH,
    checked_user_metadata,
    decode_record,
    encode_record,
)
from shardkeep.formats.native.verifying import verify_checkpoint
from shardkeep.planner import Place
from shardkeep.stores.local import LocalStore


def save(path, salt: int = 0, **options):
    return shardkeep.save({"w": np.arange(10) + salt, "n": salt}, path, no_dist=True, **options)


def record_of(path):
    return commit.read_record(LocalStore(path))


# --- what a user puts beside a checkpoint

texts = st.text(st.characters(codec="utf-8"), max_size=8)
user_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | texts
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(texts, user_values, max_size=3))
def test_user_metadata_comes_back_as_it_was(once, user):
    record = replace(once, user=checked_user_metadata(user))
    assert decode_record(encode_record(record), "").user == user


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    path = tmp_path_factory.mktemp("once")
    save(path / "a")
    return record_of(path / "a")


def nested(depth):
    return {} if depth == 0 else {"a": nested(depth - 1)}


def nested_lists(depth):
    found = []
    for _ in range(depth - 2):
        found = [found]
    return {"a": found}


class Text(str):
    """Not quite one."""


@pytest.mark.parametrize(
    ("user", "what"),
    [
        ([1], "user_metadata is a list; use a dict"),
        ("text", "user_metadata is a str; use a dict"),
        ({"a": {1: 2}}, r"user_metadata\['a'\] has the key 1; JSON has texts"),
        ({"a": [0, 2**63]}, r"user_metadata\['a'\]\[1\] is 9223372036854775808"),
        ({"a": -(2**63) - 1}, "which JSON does not have"),
        ({"a": math.nan}, "which JSON does not have"),
        ({"a": math.inf}, "which JSON does not have"),
        ({"a": object}, "which JSON does not have"),
        ({"a": b"x"}, "which JSON does not have"),
        ({"a": "\ud800"}, "UTF-8 cannot carry"),
        ({"a": {"\ud800": 1}}, "UTF-8 cannot carry"),
        (nested(MAX_DEPTH + 1), "nested more than 32 deep"),
        (nested_lists(MAX_DEPTH + 2), "nested more than 32 deep"),
        ({"a": "x" * (1 << 20)}, "user_metadata has 1048584 bytes, at most 1048576"),
    ],
)
def test_user_metadata_that_json_does_not_have(tmp_path, user, what):
    with pytest.raises(UnsupportedValueError, match=what):
        save(tmp_path / "a", user_metadata=user)
    assert not (tmp_path / "a").exists()


def test_user_metadata_just_within_its_limits():
    deepest, lists = nested(MAX_DEPTH), nested_lists(MAX_DEPTH + 1)
    largest = {"a": "x" * ((1 << 20) - 8)}
    for user in (deepest, lists, largest, {"a": 2**63 - 1, "b": -(2**63)}, {}):
        assert checked_user_metadata(user) == user
    assert checked_user_metadata(None) == {}
    assert type(checked_user_metadata({"a": Text("b")})["a"]) is str


def test_a_record_that_no_reader_would_read_is_not_written(once):
    summary = {"a": "x" * (64 << 20)}
    with pytest.raises(FormatError, match="larger than 67108864"):
        encode_record(replace(once, summary=summary))


def test_where_values_and_content_digests_may_lie(once):
    (row,) = once.files

    def decoded(**changed):
        changed = replace(row, **changed)
        return decode_record(encode_record(replace(once, files=(changed,))), "").files == (changed,)

    assert row.values is not None
    most = row.values // 24  # a digest, and where its chunk begins
    assert decoded(chunks=most)
    assert decoded(values=1, chunks=0)
    assert decoded(values=row.payload)
    for wrong in (
        {"chunks": most + 1},
        {"values": None, "chunks": row.payload // 24 + 1},
        {"values": 0, "chunks": 0},
        {"values": row.payload + 1},
    ):
        with pytest.raises(FormatError, match=r"values at|do not fit"):
            decoded(**wrong)


@pytest.mark.parametrize("block", [2048, 3 << 17, (1 << 20) + 4096, 1 << 21])
def test_digest_blocks_that_no_writer_would_take(once, block):
    """Files of less than a block have digests of the same size, so nothing else is wrong."""
    assert decode_record(encode_record(replace(once, block=1 << 20)), "").block == 1 << 20
    with pytest.raises(FormatError, match=f"digest block of {block} bytes"):
        decode_record(encode_record(replace(once, block=block)), "")


@pytest.mark.parametrize("block", [2048, 4095, 4097, 12288, (1 << 20) + 1, 1 << 21, 0, -4096])
def test_digest_blocks_that_no_reader_would_take(block):
    with pytest.raises(ValueError, match="use a power of two from 4096 to 1048576"):
        NativeWriter(block=block)


@pytest.mark.parametrize("block", [4096, 1 << 20])
def test_the_smallest_and_the_largest_digest_blocks(tmp_path, block):
    writer = NativeWriter(block=block)
    shardkeep.save({"w": np.arange(10_000)}, tmp_path / "a", storage_writer=writer, no_dist=True)
    assert record_of(tmp_path / "a").block == block
    assert shardkeep.verify(tmp_path / "a").ok


def test_a_writer_replaces_only_what_it_is_told_to(tmp_path):
    save(tmp_path / "a")
    with pytest.raises(CheckpointExistsError):
        NativeWriter(tmp_path / "a").set_up_storage_writer(Place(0, 1))
    writer = NativeWriter(tmp_path / "a", overwrite=True)
    writer.set_up_storage_writer(Place(0, 1))
    writer.abort()
    assert shardkeep.verify(tmp_path / "a").ok


# --- replaced while it is looked at


def test_whether_a_reader_reads_what_is_there(tmp_path):
    """Only what is surely another checkpoint is taken for one."""
    path = tmp_path / "a"
    save(path)
    record = path / "checkpoint.json"
    with shardkeep.open(path):
        reader = NativeReader(path)
        reader.read_metadata()
        assert reader.is_current()
        whole = record.read_bytes()
        record.write_bytes(whole[:-20])
        assert reader.is_current()
        record.unlink()
        assert not reader.is_current()
        record.write_bytes(whole)
        save(path, 1, overwrite=True)
        assert not reader.is_current()
        reader.close()


def test_what_is_replaced_all_the_time_cannot_be_verified(tmp_path, monkeypatch):
    path = tmp_path / "a"
    save(path)
    seen = NativeReader._open

    def replaced(self, row, check):
        if row.name != self.record.index.name:
            save(path, 1, overwrite=True)
        return seen(self, row, check)

    monkeypatch.setattr(NativeReader, "_open", replaced)
    with pytest.raises(StorageError, match="replaced faster than it can be verified") as caught:
        shardkeep.verify(path)
    assert caught.value.transient
    monkeypatch.undo()
    assert shardkeep.verify(path).ok


@pytest.mark.parametrize("part", ["index", "-r0"])
@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.EIO])
def test_what_may_pass_is_no_damage(tmp_path, monkeypatch, part, code):
    """And is told as it is; what may not pass is a problem of that file."""
    save(tmp_path / "a")
    opened = LocalStore.open

    def fail(self, name):
        if part in name:
            raise OSError(code, "broken")
        return opened(self, name)

    monkeypatch.setattr(LocalStore, "open", fail)
    if code == errno.ETIMEDOUT:
        with pytest.raises(StorageError, match="broken") as caught:
            shardkeep.verify(tmp_path / "a")
        assert caught.value.transient
        assert caught.value.errno == code
    else:
        report = shardkeep.verify(tmp_path / "a")
        assert {part in problem.file for problem in report.problems} == {True}
        assert "broken" in report.problems[0].text
    monkeypatch.undo()
    assert shardkeep.verify(tmp_path / "a").ok


def test_damage_is_named_as_far_as_a_damaged_index_says(tmp_path):
    """The chunk rows are damaged too; values are known from the tables."""
    path = tmp_path / "a"
    shardkeep.save({"w": np.arange(40_000), "n": 1}, path, no_dist=True)
    reader = NativeReader(path)
    reader.read_metadata()
    assert reader.names_in(0) == ("n", "w")
    assert reader.names_in(0, 0, reader.record.files[0].values) == ("w",)
    reader.index._held.clear()
    reader.index.first_chunk = reader.index.first_chunk * 2
    reader.index.coord_start = reader.index.coord_start * 2
    assert reader.names_in(0) == ("n",)
    reader.close()


# --- copies


class Racing(LocalStore):
    """Something happens when a data file is opened."""

    happens = staticmethod(lambda: None)

    def open(self, name):
        if name.startswith("data/"):
            type(self).happens()
        return super().open(name)


def racing(what):
    return type("Store", (Racing,), {"happens": staticmethod(what)})


def copied(store, source, target):
    save_id = record_of(source).save_id
    return copy_checkpoint(store(source), LocalStore(target), save_id=save_id)


def test_a_checkpoint_that_is_replaced_while_it_is_copied(tmp_path):
    path, target = tmp_path / "a", tmp_path / "b"
    save(path)
    store = racing(lambda: save(path, 1, overwrite=True))
    with pytest.raises(CheckpointNotFoundError, match="was replaced while it was copied"):
        copied(store, path, target)
    assert not (target / "checkpoint.json").exists()
    assert shardkeep.verify(path).ok


def test_a_file_that_cannot_be_opened_is_not_taken_for_damage(tmp_path):
    path, target = tmp_path / "a", tmp_path / "b"
    save(path)

    def fail():
        raise OSError(errno.EIO, "broken")

    with pytest.raises(StorageError, match="broken") as caught:
        copied(racing(fail), path, target)
    assert caught.value.errno == errno.EIO
    assert not (target / "checkpoint.json").exists()


def test_a_file_that_is_cut_while_it_is_copied(tmp_path):
    path, target = tmp_path / "a", tmp_path / "b"
    save(path)

    class Cut(LocalStore):
        def open(self, name):
            file = super().open(name)
            if name.startswith("data/"):
                os.truncate(self.root / name, 4096)
            return file

    with pytest.raises(CorruptionError, match="was cut while it was copied"):
        copied(Cut, path, target)
    assert not (target / "checkpoint.json").exists()


# --- leftovers


def test_a_collection_needs_a_directory(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for name in ("none", "file"):
        with pytest.raises(CheckpointNotFoundError):
            shardkeep.gc(tmp_path / name)


@pytest.mark.parametrize("gone", ["lease", "file"])
def test_what_goes_while_it_is_collected_does_not_matter(tmp_path, gone):
    path, save_id = tmp_path / "a", new_save_id()
    save(path)
    lease, file = lease_name(save_id), f"data/{save_id}-r00000-0.safetensors"
    for name in (lease, file):
        (path / name).write_bytes(b"x")
    victim = {"lease": lease, "file": file}[gone]

    class Store(LocalStore):
        def stat(self, name):
            if name == victim:
                (path / name).unlink(missing_ok=True)
            return super().stat(name)

    result = commit.collect_garbage(Store(path), stale_s=0)
    assert not (path / lease).exists()
    assert not (path / file).exists()
    assert result.nbytes == 1
    assert result.live == ()
    assert shardkeep.verify(path).ok


def begun(path):
    """The writers of two ranks that have begun a save, and a file of the second."""
    first, second = NativeWriter(path), NativeWriter(path)
    word = first.set_up_storage_writer(Place(0, 2))
    second.set_up_storage_writer(Place(1, 2), word)
    mine = f"data/{first.save_id}-r00001-0.safetensors"
    (path / mine).write_bytes(b"x")
    second._written.append(mine)
    return first, second, mine


def test_a_rank_alone_takes_the_lease_with_it(tmp_path):
    """The coordinator is gone: nobody else would remove it for an hour."""
    first, second, mine = begun(tmp_path / "a")
    lease = tmp_path / "a" / lease_name(first.save_id)
    second.abort(alone=True)
    assert not lease.exists()
    assert not (tmp_path / "a" / mine).exists()
    first.abort()


def test_a_rank_that_is_not_alone_leaves_the_lease(tmp_path):
    first, second, mine = begun(tmp_path / "a")
    second.abort()
    assert (tmp_path / "a" / lease_name(first.save_id)).exists()
    assert not (tmp_path / "a" / mine).exists()
    first.abort()
    assert os.listdir(tmp_path / "a") == ["data"]


def test_once_it_may_be_committed_a_rank_removes_nothing(tmp_path):
    """Only the coordinator knows whether the checkpoint exists, with this rank's files."""
    first, second, mine = begun(tmp_path / "a")
    second.abort(committing=True, alone=True)
    assert (tmp_path / "a" / lease_name(first.save_id)).exists()
    assert (tmp_path / "a" / mine).exists()
    first.abort()


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_coordinator_that_cannot_tell_removes_nothing(tmp_path, code):
    path = tmp_path / "a"

    class Unreadable(LocalStore):
        def read(self, name, most):
            raise OSError(code, "broken")

    writer = NativeWriter(path, open_store=Unreadable)
    writer.set_up_storage_writer(Place(0, 1))
    mine = f"data/{writer.save_id}-r00000-0.safetensors"
    (path / mine).write_bytes(b"x")
    writer._written.append(mine)
    writer.abort(committing=True)
    assert (path / mine).exists()


def test_an_error_after_all_is_done_takes_nothing_away(tmp_path):
    """Whoever aborts then does not know that the checkpoint is there, and need not."""
    path = tmp_path / "a"
    for overwrite in (False, True):
        writer = NativeWriter(path, overwrite=overwrite)
        save(path, storage_writer=writer, overwrite=overwrite)
        for committing in (False, True):
            writer.abort(committing=committing)
            assert shardkeep.verify(path).ok


def test_a_directory_that_goes_before_the_lease_is_made_again(tmp_path):
    """Who cleans takes what a killed save left for empty."""
    path = tmp_path / "a"

    class Cleaned(LocalStore):
        left = 3

        def create(self, name):
            if name.endswith(".tmp") and Cleaned.left:
                Cleaned.left -= 1
                (path / "data").rmdir()
                path.rmdir()
            return super().create(name)

    shardkeep.save(
        {"w": np.arange(3)}, path, storage_writer=NativeWriter(open_store=Cleaned), no_dist=True
    )
    assert Cleaned.left == 0
    assert shardkeep.verify(path).ok
    Cleaned.left = 4
    writer = NativeWriter(open_store=Cleaned)
    with pytest.raises(StorageError) as caught:
        shardkeep.save({"w": np.arange(3)}, tmp_path / "a", storage_writer=writer, no_dist=True,
                       overwrite=True)  # fmt: skip
    assert caught.value.errno


# --- several files of one rank


@pytest.mark.parametrize("contiguous", [True, False])
def test_chunks_go_to_their_file_however_they_lie_in_memory(tmp_path, contiguous):
    """What lies in rows is taken from memory as it is, other arrays are copied piece by piece."""
    numbers = np.arange(24 * 256 * 256, dtype=np.float64).reshape(24, 256, 256)
    state = {f"w{n:02}": part if contiguous else part.T for n, part in enumerate(numbers)}
    limits = Limits(payload=6 << 20, least=1, together=1)
    writer = NativeWriter(limits=limits, memory_budget=16 << 20)
    shardkeep.save(state, tmp_path / "a", storage_writer=writer, no_dist=True)
    assert len(record_of(tmp_path / "a").files) >= 2
    assert verify_checkpoint(tmp_path / "a", memory_budget=16 << 20).ok
    with shardkeep.open(tmp_path / "a") as ckpt:
        found = ckpt.state_dict()
    for name, array in state.items():
        assert np.array_equal(found[name], array), name


# --- what is told


def test_a_record_asks_no_more_of_readers_than_it_needs(tmp_path):
    for name, options, minor in (("a", {}, 0), ("b", {"user_metadata": {"x": 1}}, 1)):
        save(tmp_path / name, allow_pickle=True, **options)
        table = json.loads((tmp_path / name / "checkpoint.json").read_bytes())
        assert table["format"] == {"major": 1, "minor": minor}
        assert table["requires"] == []
        assert not any(row.kept for row in record_of(tmp_path / name).files)
    state = {"w": np.arange(200_000), "n": 1}
    shardkeep.save(state, tmp_path / "base", no_dist=True)
    shardkeep.save(state, tmp_path / "c", base=tmp_path / "base", no_dist=True)
    table = json.loads((tmp_path / "c" / "checkpoint.json").read_bytes())
    assert table["format"] == {"major": 1, "minor": 1}
    assert [row.kept for row in record_of(tmp_path / "c").files] == [False, True]


def test_verify_tells_what_it_has_read(tmp_path):
    saved = save(tmp_path / "a")
    record, told, planned = record_of(tmp_path / "a"), [], []
    report = verify_checkpoint(tmp_path / "a", progress=told.append, planned=planned.append)
    total = sum(row.size for row in (record.index, *record.files))
    assert report.ok
    assert report.digest == saved.digest
    assert report.files == 2 + len(record.files)
    assert report.nbytes == sum(told) == sum(planned) == total


def test_contents_are_compared_only_of_tensors_that_are_cut_alike(tmp_path):
    data = np.arange(8)
    cut = shardkeep.ShardedArray.from_shards([(data[:4], (0,)), (data[4:], (4,))], (8,))
    state = {"a": data, "b": data.copy(), "c": cut, "d": data[::-1].copy(), "e": data[:4].copy()}
    shardkeep.save(state, tmp_path / "a", no_dist=True)
    reader = shardkeep.NativeReader(tmp_path / "a")
    reader.read_metadata()
    same = {name for name in state if reader.same_content("a", name)}
    reader.close()
    assert same == {"a", "b"}


def test_equal_bytes_of_other_boxes_are_not_the_same_content(tmp_path):
    def cut(shape, second):
        parts = [(np.zeros((2, 2)), (0, 0)), (np.zeros((2, 2)), second)]
        return shardkeep.ShardedArray.from_shards(parts, shape)

    state = {
        "half": np.zeros(8, "f4"),
        "whole": np.zeros(4),
        "tall": cut((4, 2), (2, 0)),
        "wide": cut((2, 4), (0, 2)),
        "again": cut((2, 4), (0, 2)),
    }
    shardkeep.save(state, tmp_path / "a", no_dist=True)
    reader = shardkeep.NativeReader(tmp_path / "a")
    reader.read_metadata()
    assert not reader.same_content("half", "whole")
    assert not reader.same_content("tall", "wide")
    assert reader.same_content("wide", "again")
    reader.close()
