"""What a convert may remove, what it may go on with, and what it must not do a second time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file

import shardkeep
from shardkeep.converting import driver, workplace
from shardkeep.converting.driver import ConvertResult

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals, flock")


def left_in(path):
    return sorted(entry.name for entry in path.iterdir())


def content(path):
    """All that is below a directory."""
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    shardkeep.save({"w": np.full((4, 3), 2.0)}, path, no_dist=True)
    return path


# --- what there is to be replaced


def hf(path):
    path.mkdir()
    save_file({"w": np.zeros((4, 3))}, path / "model.safetensors")


def hf_with_index(path):
    path.mkdir()
    files = {f"model-0000{n}-of-00002.safetensors": f"w{n}" for n in (1, 2)}
    for file, name in files.items():
        save_file({name: np.zeros(3)}, path / file)
    table = {"weight_map": {name: file for file, name in files.items()}}
    (path / "model.safetensors.index.json").write_text(json.dumps(table))


def torch_dcp(path):
    dcp.save({"w": torch.zeros(4, 3), "step": 7}, checkpoint_id=str(path), no_dist=True)


def torch_dcp_file_by_file(path):
    """The value lies in a file of its own."""
    writer = dcp.FileSystemWriter(str(path), single_file_per_rank=False)
    dcp.save({"w": torch.zeros(4, 3), "step": 7}, storage_writer=writer, no_dist=True)


def torch_dcp_by_rank(path):
    torch_dcp(path)
    (path / ".metadata").rename(path / "__0.metadata")


def megatron(path):
    torch_dcp(path)
    torch.save({"iteration": 3}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


def mindspore_folder(path):
    path.mkdir()
    save_file({"w": np.zeros((4, 3))}, path / "part0.safetensors")
    (path / "param_name_map.json").write_text('{"w": "part0.safetensors"}')


def made(to, **options):
    def make(path):
        state = {"w": np.zeros((4, 3)), "e": np.zeros((0, 2))}
        shardkeep.save(state, path.with_name("at"), no_dist=True)
        shardkeep.convert(path.with_name("at"), path, to=to, **options)

    return make


def native(path):
    shardkeep.save({"w": np.zeros((4, 3))}, path, no_dist=True)


DIRECTORIES = {
    "native": native,
    "hf": hf,
    "hf with an index": hf_with_index,
    "torch dcp": torch_dcp,
    "torch dcp, file by file": torch_dcp_file_by_file,
    "torch dcp, by rank": torch_dcp_by_rank,
    "megatron": megatron,
    "mindspore folder": mindspore_folder,
    "hyper-parallel": made("hyper-parallel"),
    "our torch-dcp": made("torch-dcp", max_shard_size=40),
    "our hf": made("hf", max_shard_size=40),
}
FILES = {
    "torch-save": made("torch-save"),
    "mindspore": made("mindspore"),
    "mindspore safetensors": made("mindspore", options={"format": "safetensors"}),
    "hf": made("hf", options={"single_file": True}),
}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_checkpoint_is_replaced_if_nothing_else_is_there(source, tmp_path, kind):
    there = tmp_path / "there"
    DIRECTORIES[kind](there)
    shardkeep.convert(source, there, overwrite=True)
    with shardkeep.open(there) as checkpoint:
        assert (checkpoint["w"][:] == 2).all()


STRANGE = [
    "run.metadata",
    "important_metadata",
    "secret.bytes",
    "x.distcp",
    "notes.safetensors.index.json",
    "7.txt",
]


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("kind", DIRECTORIES)
def test_what_the_checkpoint_does_not_name_is_not_removed(source, tmp_path, kind, name):
    there = tmp_path / "there"
    DIRECTORIES[kind](there)
    (there / name).write_text("mine")
    before = content(there)
    with pytest.raises(shardkeep.CheckpointExistsError, match=name):
        shardkeep.convert(source, there, overwrite=True)
    assert content(there) == before


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_replaced_by_what_it_is_and_not_by_its_name(source, tmp_path, kind):
    there = tmp_path / "weights"
    FILES[kind](there)
    assert there.is_file()
    shardkeep.convert(source, there, to="torch-save", overwrite=True)
    shardkeep.convert(source, there, to="torch-save", overwrite=True)
    with shardkeep.open(there) as checkpoint:
        assert (checkpoint["w"][:] == 2).all()


@pytest.mark.parametrize("name", ["photo.bin", "thesis.pt", "list.ckpt", "a.safetensors"])
@pytest.mark.parametrize("to", ["native", "torch-save"])
def test_a_file_that_is_no_checkpoint_is_not_replaced(source, tmp_path, name, to):
    (tmp_path / name).write_bytes(b"\xff\xd8\xff\xe0 a picture " * 9)
    with pytest.raises(shardkeep.CheckpointExistsError, match="is no checkpoint"):
        shardkeep.convert(source, tmp_path / name, to=to, overwrite=True)
    assert (tmp_path / name).read_bytes().endswith(b"picture ")


def test_where_the_record_is_not_ours_nothing_is_removed(source, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/checkpoint.json").write_text('{"mine": 1}')
    with pytest.raises(shardkeep.CheckpointExistsError, match=r"would remove: checkpoint.json\."):
        shardkeep.convert(source, tmp_path / "there", overwrite=True)
    assert left_in(tmp_path / "there") == ["checkpoint.json"]


@pytest.mark.parametrize("left", [0, 9, 100])
def test_one_of_ours_with_a_damaged_record_is_replaced(source, tmp_path, left):
    there = tmp_path / "there"
    native(there)
    record = there / "checkpoint.json"
    data = record.read_bytes()[:left]
    record.unlink()
    record.write_bytes(data)
    (there / "mine").write_text("mine")
    with pytest.raises(shardkeep.CheckpointExistsError, match=r"would remove: mine\."):
        shardkeep.convert(source, there, overwrite=True)
    (there / "mine").unlink()
    shardkeep.convert(source, there, overwrite=True)
    with shardkeep.open(there) as checkpoint:
        assert (checkpoint["w"][:] == 2).all()


@pytest.mark.parametrize("kind", ["hf with an index", "torch dcp", "hyper-parallel"])
def test_where_the_description_is_damaged_nothing_is_removed(source, tmp_path, kind):
    there = tmp_path / "there"
    DIRECTORIES[kind](there)
    (told,) = [p for p in there.iterdir() if p.name.endswith((".metadata", ".json"))]
    told.write_bytes(told.read_bytes()[:-9])
    before = content(there)
    with pytest.raises(shardkeep.CheckpointExistsError, match=r"not known.*would remove"):
        shardkeep.convert(source, there, overwrite=True)
    assert content(there) == before


def test_a_folder_of_many_files_is_not_replaced(source, tmp_path):
    """Nothing in these says which files there are."""
    folder = tmp_path / "there/zero/w"
    folder.mkdir(parents=True)
    torch.save({"param": torch.zeros(3)}, folder / "fp32.pt")
    with pytest.raises(shardkeep.CheckpointExistsError, match="DeepSpeed"):
        shardkeep.convert(source, tmp_path / "there", overwrite=True)
    assert (folder / "fp32.pt").is_file()


# --- what is gone on with

PART = {"max_shard_size": 2 << 20}


def state(number):
    return {f"t{i}": np.full(1 << 17, number + i, np.float64) for i in range(12)}


def interrupted(source, made, **options):
    def stop(done, total):
        if done > 0.7 * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardkeep.convert(source, made, **PART, **options, progress=stop)
    assert made.with_name(made.name + ".converting").exists()


@pytest.mark.parametrize("how", ["another file", "written in place"])
def test_a_source_of_the_same_size_and_time_is_another(tmp_path, how):
    source, other = tmp_path / "model.safetensors", tmp_path / "other"
    save_file(state(1), source)
    save_file(state(50), other)
    interrupted(source, tmp_path / "made")
    was = source.stat()
    if how == "another file":
        other.replace(source)
    else:
        with source.open("r+b") as file:
            file.write(other.read_bytes())
    os.utime(source, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (source.stat().st_size, source.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    assert not shardkeep.convert(source, tmp_path / "made", **PART).resumed
    with shardkeep.open(tmp_path / "made") as checkpoint:
        assert [checkpoint[f"t{i}"][0] for i in range(12)] == [50 + i for i in range(12)]


@pytest.mark.parametrize("options", [{"verify": False}, {"allow_pickle": True}])
def test_what_was_read_otherwise_is_not_gone_on_with(tmp_path, options):
    shardkeep.save(state(1), tmp_path / "source", no_dist=True)
    interrupted(tmp_path / "source", tmp_path / "made", **options)
    assert not shardkeep.convert(tmp_path / "source", tmp_path / "made", **PART).resumed
    interrupted(tmp_path / "source", tmp_path / "more", **options)
    assert shardkeep.convert(tmp_path / "source", tmp_path / "more", **PART, **options).resumed


def test_a_damaged_source_is_not_passed_on_by_what_was_not_checked(tmp_path):
    shardkeep.save(state(1), tmp_path / "source", no_dist=True)
    (data,) = (tmp_path / "source/data").glob("*-r00000-0.safetensors")
    data.chmod(0o644)
    with data.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xff")
    interrupted(tmp_path / "source", tmp_path / "made", verify=False)
    with pytest.raises(shardkeep.CorruptionError):
        shardkeep.convert(tmp_path / "source", tmp_path / "made", **PART)
    assert not (tmp_path / "made").exists()


# --- onto itself, and killed

SWAP = {"a": "b", "b": "a"}

ONTO_ITSELF = """
import errno, os, shutil, signal
import shardkeep
from shardkeep.converting import workplace

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def then_kill(call):
    def both(*args):
        call(*args)
        kill()
    return both

def never(*args):
    raise OSError(errno.EINVAL, "names cannot change places")

if {when!r} == "exchange":
    workplace.exchange_names = then_kill(workplace.exchange_names)
elif {when!r} == "two steps":
    workplace.exchange_names, rename = never, os.rename
    def move(one, other):
        rename(one, other)
        if os.path.basename(one) == "made":
            kill()
    os.rename = move
elif {when!r} == "replace":
    os.replace = then_kill(os.replace)
elif {when!r} == "before":
    workplace.exchange_names = os.replace = lambda *args: kill()
elif {when!r} == "cleaning":
    removed = []
    def remove(path, **options):
        rmtree(path, **options)
        kill()
    rmtree, shutil.rmtree = shutil.rmtree, remove
shardkeep.convert({path!r}, {path!r}, to={to!r}, mapping={mapping!r}, overwrite=True)
"""


def onto_itself(path, to, **options):
    return shardkeep.convert(path, path, to=to, mapping=SWAP, overwrite=True, **options)


def killed(path, to, when, mapping=SWAP):
    program = textwrap.dedent(ONTO_ITSELF).format(path=str(path), to=to, when=when, mapping=mapping)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def found_at(path):
    with shardkeep.open(path) as checkpoint:
        return {name: int(checkpoint[name][0]) for name in ("a", "b")}


@pytest.fixture
def swapped(tmp_path, request):
    """A checkpoint of a 1 and a 2."""
    path = tmp_path / "here"
    shardkeep.save({"a": np.full(9, 1), "b": np.full(9, 2)}, tmp_path / "first", no_dist=True)
    shardkeep.convert(tmp_path / "first", path, to=request.param)
    return SimpleNamespace(path=path, to=request.param)


PLACES = [
    ("native", "exchange"),
    ("native", "two steps"),
    ("native", "cleaning"),
    ("hf", "exchange"),
    ("torch-dcp", "exchange"),
    ("torch-save", "replace"),
    ("mindspore", "replace"),
]


@pytest.mark.parametrize(("swapped", "when"), PLACES, indirect=["swapped"])
def test_what_is_done_is_not_done_again(swapped, tmp_path, when):
    path, to = swapped.path, swapped.to
    wanted = shardkeep.convert(path, path, to=to, mapping=SWAP, overwrite=True, dry_run=True)
    killed(path, to, when)
    assert found_at(path) == {"a": 2, "b": 1}
    assert left_in(tmp_path) == ["first", "here", "here.converting"]
    before = path.stat().st_ino
    result = onto_itself(path, to)
    assert found_at(path) == {"a": 2, "b": 1}
    assert path.stat().st_ino == before
    assert left_in(tmp_path) == ["first", "here"]
    assert isinstance(result, ConvertResult)
    assert result.resumed
    assert (result.path, result.to, result.rows) == (str(path), to, wanted.rows)
    assert result.nbytes == wanted.nbytes
    assert sum(result.files.values()) > result.nbytes
    if to == "native":
        assert shardkeep.open(path).digest == result.digest
    # Once more, it is another wish.
    assert not onto_itself(path, to).resumed
    assert found_at(path) == {"a": 1, "b": 2}


@pytest.mark.parametrize("swapped", ["native", "torch-save"], indirect=True)
def test_what_was_not_done_yet_is_done(swapped, tmp_path):
    killed(swapped.path, swapped.to, "before")
    assert found_at(swapped.path) == {"a": 1, "b": 2}
    assert onto_itself(swapped.path, swapped.to).resumed
    assert found_at(swapped.path) == {"a": 2, "b": 1}
    assert left_in(tmp_path) == ["first", "here"]


@pytest.mark.parametrize("swapped", ["native", "torch-save"], indirect=True)
def test_another_source_is_taken(swapped, tmp_path):
    path, to = swapped.path, swapped.to
    killed(path, to, "replace" if to == "torch-save" else "exchange")
    result = shardkeep.convert(tmp_path / "first", path, to=to, rename=["^a$=c"], overwrite=True)
    assert sorted(shardkeep.open(path)) == ["b", "c"]
    assert not result.resumed
    assert left_in(tmp_path) == ["first", "here"]


def refused(path, to, **options):
    """That call changes nothing, and does what it says once the folder is gone."""
    before = content(path.parent)
    for _ in range(2):
        with pytest.raises(shardkeep.CheckpointExistsError, match="onto itself was finished"):
            shardkeep.convert(path, path, to=to, overwrite=True, **options)
        assert content(path.parent) == before
    dry = shardkeep.convert(path, path, to=to, overwrite=True, dry_run=True, **options)
    assert dry.dry_run
    assert content(path.parent) == before
    shutil.rmtree(path.with_name("here.converting"))
    assert not shardkeep.convert(path, path, to=to, overwrite=True, **options).resumed
    assert left_in(path.parent) == ["first", "here"]


OTHERWISE = {
    "not verified": {"mapping": SWAP, "verify": False},
    "shards": {"mapping": SWAP, "shards": 2},
    "sizes of files": {"mapping": SWAP, "max_shard_size": "1MB"},
    "pickles": {"mapping": SWAP, "allow_pickle": True},
    "one more option": {"mapping": SWAP, "cast": ["i64=i32"]},
    "something else": {"rename": ["^a$=c"]},
}


@pytest.mark.parametrize("otherwise", OTHERWISE)
@pytest.mark.parametrize(
    ("swapped", "when"),
    [("native", "exchange"), ("native", "two steps"), ("hf", "cleaning")],
    indirect=["swapped"],
)
def test_what_is_done_is_not_done_again_otherwise(swapped, when, otherwise):
    killed(swapped.path, swapped.to, when)
    refused(swapped.path, swapped.to, **OTHERWISE[otherwise])


@pytest.mark.parametrize("otherwise", ["not verified", "something else", "pickles"])
@pytest.mark.parametrize("swapped", ["torch-save"], indirect=True)
def test_nor_is_a_file(swapped, otherwise):
    killed(swapped.path, swapped.to, "replace")
    refused(swapped.path, swapped.to, **OTHERWISE[otherwise])


@pytest.mark.parametrize("otherwise", OTHERWISE)
@pytest.mark.parametrize("swapped", ["native"], indirect=True)
def test_what_was_not_done_yet_may_be_done_otherwise(swapped, tmp_path, otherwise):
    killed(swapped.path, swapped.to, "before")
    options = OTHERWISE[otherwise]
    assert not shardkeep.convert(swapped.path, swapped.path, overwrite=True, **options).resumed
    assert left_in(tmp_path) == ["first", "here"]
    with shardkeep.open(swapped.path) as checkpoint:
        found = {name: int(checkpoint[name][0]) for name in checkpoint}
    assert found == ({"c": 1, "b": 2} if otherwise == "something else" else {"a": 2, "b": 1})


@pytest.mark.parametrize("swapped", ["native", "torch-save"], indirect=True)
def test_what_was_changed_since_is_looked_at_first(swapped):
    path, to = swapped.path, swapped.to
    killed(path, to, "replace" if to == "torch-save" else "exchange")
    more = {"a": torch.full((9,), 5), "b": torch.full((9,), 6)}
    if to == "native":
        shardkeep.save(more, path, no_dist=True, overwrite=True)
    else:
        torch.save(more, path)
    refused(path, to, mapping=SWAP)
    assert found_at(path) == {"a": 6, "b": 5}


@pytest.mark.parametrize("damage", ["a field less", "no result", "no object", "another mark"])
@pytest.mark.parametrize("swapped", ["native"], indirect=True)
def test_a_note_of_another_version_is_no_reason_to_do_it_again(swapped, tmp_path, damage):
    killed(swapped.path, swapped.to, "exchange")
    journal = tmp_path / "here.converting/journal"
    *lines, last = journal.read_bytes().splitlines(keepends=True)
    note = json.loads(last)
    if damage == "a field less":
        del note["result"]["rows"]
    elif damage == "no result":
        del note["result"]
    else:
        note["result" if damage == "no object" else "publishing"] = 7
    journal.write_bytes(b"".join(lines) + json.dumps(note).encode() + b"\n")
    refused(swapped.path, swapped.to, mapping=SWAP)


@pytest.mark.parametrize("swapped", ["native"], indirect=True)
def test_the_order_of_a_mapping_means_nothing(swapped, tmp_path):
    killed(swapped.path, swapped.to, "exchange")
    mapping = dict(reversed(SWAP.items()))
    assert shardkeep.convert(swapped.path, swapped.path, mapping=mapping, overwrite=True).resumed
    assert found_at(swapped.path) == {"a": 2, "b": 1}
    assert left_in(tmp_path) == ["first", "here"]


@pytest.mark.parametrize(("to", "when"), [("native", "exchange"), ("torch-save", "replace")])
def test_the_same_call_after_the_parent_was_renamed(tmp_path, to, when):
    here, there = tmp_path / "one", tmp_path / "other"
    shardkeep.save({"a": np.full(9, 1), "b": np.full(9, 2)}, tmp_path / "first", no_dist=True)
    here.mkdir()
    shardkeep.convert(tmp_path / "first", here / "here", to=to)
    killed(here / "here", to, when)
    here.rename(there)
    result = onto_itself(there / "here", to)
    assert result.resumed
    assert result.path == str(there / "here")
    assert found_at(there / "here") == {"a": 2, "b": 1}
    assert left_in(there) == ["here"]


def test_what_tells_files_lasts_when_they_are_mounted_again(source, monkeypatch):
    """Their device has another number then."""

    class Mounted:
        def __init__(self, stat):
            self.stat = stat

        def __getattr__(self, name):
            return getattr(self.stat, name) + (name == "st_dev")

    def looks():
        return workplace.fingerprint(source), workplace._mark(source)

    before = looks()
    with monkeypatch.context() as later:
        for call in ("stat", "lstat"):
            real = getattr(type(source), call)
            again = lambda path, real=real, **more: Mounted(real(path, **more))  # noqa: E731
            later.setattr(type(source), call, again)
        assert source.stat().st_dev != os.stat(source).st_dev
        assert looks() == before
    (source / "checkpoint.json").rename(source / "other")
    assert looks()[0] != before[0]
    assert looks()[1] != before[1]


@pytest.mark.parametrize("swapped", ["native"], indirect=True)
def test_a_dry_run_leaves_what_was_left(swapped, tmp_path):
    killed(swapped.path, swapped.to, "exchange")
    onto_itself(swapped.path, swapped.to, dry_run=True)
    assert left_in(tmp_path) == ["first", "here", "here.converting"]


@pytest.mark.parametrize("swapped", ["native"], indirect=True)
def test_a_result_that_may_not_last_is_finished_later(swapped, tmp_path, monkeypatch):
    """It is in its place, and then the disk fails: that is no reason to do it again."""
    real = workplace.LocalStore.sync_directory

    def fail(self, *args):
        if str(self.root) == str(tmp_path):
            raise OSError(5, "the disk is sick")
        return real(self, *args)

    with monkeypatch.context() as sick:
        sick.setattr(workplace.LocalStore, "sync_directory", fail)
        for _ in range(2):
            with pytest.raises(shardkeep.StorageError, match="is sick"):
                onto_itself(swapped.path, swapped.to)
            assert found_at(swapped.path) == {"a": 2, "b": 1}
            assert left_in(tmp_path) == ["first", "here", "here.converting"]
    assert onto_itself(swapped.path, swapped.to).resumed
    assert found_at(swapped.path) == {"a": 2, "b": 1}
    assert left_in(tmp_path) == ["first", "here"]


@pytest.mark.parametrize("swapped", ["native"], indirect=True)
def test_the_same_call_by_another_path(swapped, tmp_path):
    killed(swapped.path, swapped.to, "exchange")
    (tmp_path / "link").symlink_to(tmp_path)
    assert onto_itself(tmp_path / "link/here", swapped.to).resumed
    assert found_at(swapped.path) == {"a": 2, "b": 1}


@pytest.mark.parametrize("swapped", ["native"], indirect=True)
def test_a_journal_that_says_nonsense_is_not_believed(swapped, tmp_path):
    killed(swapped.path, swapped.to, "exchange")
    journal = tmp_path / "here.converting/journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    for nonsense in (b"[1]\n", b"null\n", b'{"publishing": true}\n', b'{"publishing": {}}\n', b"{"):
        journal.write_bytes(lines[0] + nonsense)
        assert driver.finished(swapped.path, "anything", ConvertResult) is None
    journal.write_bytes(b"".join(lines))
    assert onto_itself(swapped.path, swapped.to).resumed
