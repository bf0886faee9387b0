"""`convert`: whole or absent, whatever happens, and what it makes is what was asked for."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
import zlib
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import shardkeep
import shardkeep.foreign.writing as writing
from shardkeep.converting import driver
from shardkeep.converting.target import TARGETS
from shardkeep.converting.workplace import Workplace
from shardkeep.foreign.layout import Elements, Late, Literal, OutFile
from shardkeep.stores.local import WriteFile
from shardkeep.testing.system_calls import intercepted

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals, flock")


def state_of(size=64):
    rng = np.random.default_rng(7)

    def some(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    tied = some(size, 5)
    return {
        "model": {
            **{f"l.{i}.{n}": some(size, 8) for i in range(3) for n in "qkv"},
            "emb": tied,
            "head": tied,
            "empty": np.zeros((0, 3), np.float16),
        },
        "optimizer": [{"lr": 1e-3, "m": some(7)}, {"lr": 2e-3, "m": some(7)}],
        "step": 12,
        "scalar": np.array(2.5, np.float64),
        "half": some(33).astype(ml_dtypes.bfloat16),
    }


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    shardkeep.save(state_of(), path, no_dist=True, user_metadata={"loss": 0.5})
    return path


def same(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


def left_in(path):
    return sorted(entry.name for entry in path.iterdir())


# --- to our own format


def test_a_checkpoint_stays_what_it_is(source, tmp_path):
    result = shardkeep.convert(source, tmp_path / "made")
    with shardkeep.open(tmp_path / "made") as made:
        assert made.verify().ok
        assert made.digest == result.digest
        assert same(made.state_dict(), shardkeep.open(source).state_dict())
        assert made.user_metadata == {"loss": 0.5}
        assert made.nbytes == result.nbytes == shardkeep.open(source).nbytes
        state = made.state_dict()
        assert state["model"]["emb"] is state["model"]["head"]  # the tie is one
    assert left_in(tmp_path) == ["made", "source"]
    target = state_of()
    target["model"]["l.0.q"][:] = 0
    shardkeep.load(target, tmp_path / "made", no_dist=True)
    assert same(target, state_of())


def test_a_name_that_is_empty_stays_what_it_is(tmp_path):
    state = {"": np.arange(3.0), "m": {"": np.ones(2)}, "step": 1}
    shardkeep.save(state, tmp_path / "source", no_dist=True)
    shardkeep.convert(tmp_path / "source", tmp_path / "made")
    assert same(shardkeep.open(tmp_path / "made").state_dict(), state)


def test_names_types_and_shapes_change(source, tmp_path):
    result = shardkeep.convert(
        source,
        tmp_path / "made",
        exclude=["optimizer", "*.empty"],
        rename=[r"^model\.="],
        mapping={"half": "rest.half"},
        rules=["fuse l.*.q, l.*.k, l.*.v = l.*.qkv @ 0/2", "stack l.#.qkv = qkv @ 1"],
        cast=["qkv:f32=bf16"],
    )
    state = state_of()
    groups = [
        np.concatenate(
            [
                state["model"][f"l.{i}.{n}"][half * 32 : half * 32 + 32]
                for half in range(2)
                for n in "qkv"
            ]
        )
        for i in range(3)
    ]
    with shardkeep.open(tmp_path / "made") as made:
        assert made.verify().ok
        assert sorted(made) == ["emb", "head", "qkv", "rest.half", "scalar", "step"]
        wanted = np.stack(groups, 1).astype(ml_dtypes.bfloat16)
        assert same(made["qkv"].numpy(), wanted)
        assert same(made["emb"].numpy(), state["model"]["emb"])
        assert same(made["rest.half"].numpy(), state["half"])
        assert made["step"] == 12
    row = next(row for row in result.rows if row.name == "qkv")
    assert (row.old_dtype, row.dtype, len(row.old)) == ("float32", "bfloat16", 9)


def test_files_are_as_large_as_asked(source, tmp_path):
    few = shardkeep.convert(source, tmp_path / "one")
    cut = shardkeep.convert(source, tmp_path / "many", max_shard_size=4096)
    assert len([name for name in few.files if "-r" in name]) == 1
    assert len([name for name in cut.files if "-r" in name]) > 4
    assert same(shardkeep.open(tmp_path / "many").state_dict(), state_of())
    parts = shardkeep.convert(source, tmp_path / "three", shards=3)
    assert 3 <= len([name for name in parts.files if "-r" in name]) <= 4


def test_a_dry_run_writes_nothing(source, tmp_path):
    result = shardkeep.convert(source, tmp_path / "made", rename=["model=m"], dry_run=True)
    assert result.dry_run
    assert "m.l.0.q" in [row.name for row in result.rows]
    assert [row.tie for row in result.rows if row.name == "m.head"] == ["m.emb"]
    assert left_in(tmp_path) == ["source"]


def test_progress_ends_with_everything(source, tmp_path):
    seen = []
    shardkeep.convert(source, tmp_path / "made", progress=lambda *at: seen.append(at))
    assert seen[-1][0] == seen[-1][1] >= shardkeep.open(source).nbytes


@pytest.mark.parametrize("to", ["native", "hf"])
@pytest.mark.parametrize("budget", [16 << 20, 100 << 20, 256 << 20])
def test_files_are_written_around_the_page_cache(disk, tmp_path, monkeypatch, to, budget):
    """Whatever the budget makes of units and windows: a copy by way of it is half as fast."""
    rng = np.random.default_rng(3)
    state = {f"t{n}": rng.integers(0, 256, (11 << 20) + 12, np.uint8) for n in range(3)}
    shardkeep.save(state, tmp_path / "source", no_dist=True)
    ended = []
    end_direct = WriteFile._end_direct
    monkeypatch.setattr(
        WriteFile, "_end_direct", lambda file: ended.append(file.path) or end_direct(file)
    )
    made = disk / f"{to}-{budget}"
    shardkeep.convert(tmp_path / "source", made, to=to, memory_budget=budget)
    assert len(ended) <= (to == "hf")  # its last bytes, which are no whole page
    with shardkeep.open(made) as checkpoint:
        for name, array in state.items():
            assert np.array_equal(np.asarray(checkpoint[name]), array)


# --- what is refused


def test_mistakes_are_all_listed_and_nothing_is_written(source, tmp_path):
    with pytest.raises(shardkeep.PlanError) as caught:
        shardkeep.convert(
            source,
            tmp_path / "made",
            select=["nothing.*", "model"],
            rename=["absent=x", r"l\.\d\.q=model.emb"],
            rules=["stack *.nope.# = *.n @ 0"],
            cast=["f64=f16"],
        )
    text = str(caught.value)
    for part in ("nothing.*", "absent", "model.l.0.q and model.l.1.q", "nope", "float64"):
        assert part in text
    assert left_in(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"to": "nonsense"}, ValueError, "use one of native, hf"),
        ({"to": "torch-save", "shards": 2}, ValueError, "makes one file"),
        ({"to": "hf", "options": {"x": 1}}, ValueError, "it has single_file, stem, values"),
        ({"options": {"x": 1}}, ValueError, "it has none"),
        ({"to": "hf", "options": {"single_file": "no"}}, ValueError, "true or false"),
        ({"to": "hf", "options": {"stem": 5}}, ValueError, "use text"),
        ({"to": "torch-dcp", "options": {"chunk_bytes": "1MB"}}, ValueError, "whole number"),
        ({"to": "torch-dcp", "options": {"chunk_bytes": 0}}, ValueError, "whole number"),
        ({"to": "torch-dcp", "options": {"chunk_bytes": True}}, ValueError, "whole number"),
        ({"shards": 0}, ValueError, "shards is 0; use a positive whole number"),
        ({"shards": "3"}, ValueError, "shards is '3'; use"),
        ({"shards": 1.5}, ValueError, "shards is 1.5; use"),
        ({"shards": True}, ValueError, "shards is True; use"),
        ({"max_shard_size": -5}, ValueError, "use bytes"),
        ({"memory_budget": 1 << 20}, ValueError, "at least"),
        ({"rules": ["fuse a"]}, ValueError, "is not a rule"),
        ({"select": "model"}, TypeError, "give a list"),
    ],
)
def test_options_that_make_no_sense(source, tmp_path, options, error, said):
    with pytest.raises(error, match=said):
        shardkeep.convert(source, tmp_path / "made", **options)
    assert left_in(tmp_path) == ["source"]


def test_numbers_of_numpy_are_numbers(source, tmp_path):
    for at, options in enumerate(
        (
            {"to": "torch-dcp", "options": {"chunk_bytes": np.int64(1 << 20)}},
            {"shards": np.int32(2)},
            {"max_shard_size": np.uint64(1 << 20)},
        )
    ):
        shardkeep.convert(source, tmp_path / f"made-{at}", **options)
        assert same(shardkeep.open(tmp_path / f"made-{at}").state_dict(), state_of())


def test_what_is_there_is_not_replaced_unless_asked(source, tmp_path):
    made = tmp_path / "made"
    shardkeep.convert(source, made, select=["step"])
    with pytest.raises(shardkeep.CheckpointExistsError, match="overwrite=True"):
        shardkeep.convert(source, made)
    shardkeep.convert(source, made, overwrite=True)
    assert same(shardkeep.open(made).state_dict(), state_of())
    shardkeep.convert(made, made, select=["step"], overwrite=True)  # onto itself
    assert list(shardkeep.open(made)) == ["step"]
    (made / "thesis.txt").write_text("mine")
    with pytest.raises(shardkeep.CheckpointExistsError, match=r"thesis\.txt"):
        shardkeep.convert(source, made, overwrite=True)
    with pytest.raises(shardkeep.CheckpointExistsError, match="lie in each other"):
        shardkeep.convert(source, source / "inside")
    (tmp_path / "empty").mkdir()
    shardkeep.convert(source, tmp_path / "empty")
    assert left_in(tmp_path) == ["empty", "made", "source"]


@pytest.mark.parametrize("to", ["native", "hf"])
@pytest.mark.parametrize(
    "names",
    [
        ["epoch1.pt", "epoch2.pt"],
        ["a/model.pt", "b/model.pt"],
        ["one.safetensors", "two.safetensors"],
        ["model.safetensors", "optimizer.pt"],
        ["model.safetensors", "lora.safetensors"],
        ["data/photo.jpg"],
        ["1/.metadata", "1/__0_0.distcp", "2/.metadata", "2/__0_0.distcp"],
        ["one.bytes", "two.bytes"],
    ],
)
def test_a_folder_of_several_files_is_not_replaced(source, tmp_path, names, to):
    folder = tmp_path / "folder"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file({"a": np.ones(2)}, folder / name)
        else:
            with (folder / name).open("wb") as file:
                torch.save({"a": torch.ones(2)}, file)
    options = {"values": "drop"} if to == "hf" else {}
    with pytest.raises(shardkeep.CheckpointExistsError, match="would remove"):
        shardkeep.convert(source, folder, to=to, options=options, overwrite=True)
    assert all((folder / name).exists() for name in names)


def test_a_link_to_a_directory_is_not_removed_with_a_checkpoint(source, tmp_path):
    made = tmp_path / "made"
    shardkeep.convert(source, made)
    (made / "best").symlink_to(source)
    with pytest.raises(shardkeep.CheckpointExistsError, match="best"):
        shardkeep.convert(source, made, overwrite=True)
    assert (made / "best").is_symlink()


def test_a_directory_that_cannot_be_looked_into_is_not_empty(source, tmp_path):
    made = tmp_path / "made"
    shardkeep.convert(source, made)
    (made / "private").mkdir()

    def handler(call):
        if call.name == "scandir" and call.path() == made / "private":
            raise OSError(errno.EACCES, "it is not allowed")
        return call.make()

    with intercepted(handler), pytest.raises(shardkeep.StorageError, match="not allowed"):
        shardkeep.convert(source, made, overwrite=True)
    assert (made / "private").exists()


@pytest.mark.parametrize("to", ["hf", "torch-dcp", "torch-save", "hyper-parallel", "mindspore"])
def test_what_a_convert_made_is_replaced_by_another(tmp_path, to):
    shardkeep.save({"a": np.ones((40, 3)), "b": np.zeros(2)}, tmp_path / "source", no_dist=True)
    made = tmp_path / ("made.pt" if to in ("torch-save", "mindspore") else "made")
    sizes = {"max_shard_size": 500} if to in ("hf", "torch-dcp", "hyper-parallel") else {}
    shardkeep.convert(tmp_path / "source", made, to=to, **sizes)
    shardkeep.convert(tmp_path / "source", made, to=to, select=["a"], overwrite=True)
    assert list(shardkeep.open(made)) == ["a"]
    shardkeep.convert(tmp_path / "source", made, overwrite=True)
    assert list(shardkeep.open(made)) == ["a", "b"]


@pytest.mark.parametrize("where", [0.3, 0.9])
def test_a_damaged_source_leaves_nothing(source, tmp_path, where):
    (data,) = (source / "data").glob("*-r00000-0.safetensors")
    raw = bytearray(data.read_bytes())
    raw[int(len(raw) * where)] ^= 1
    data.chmod(0o644)
    data.write_bytes(raw)
    with pytest.raises(shardkeep.CorruptionError):
        shardkeep.convert(source, tmp_path / "made")
    assert left_in(tmp_path) == ["source"]


def test_a_disk_that_is_too_small_is_known_before(source, tmp_path, monkeypatch):
    small = SimpleNamespace(free=10)
    monkeypatch.setattr(driver.shutil, "disk_usage", lambda path: small)
    with pytest.raises(shardkeep.StorageError, match="10 are free") as caught:
        shardkeep.convert(source, tmp_path / "made")
    assert caught.value.errno == errno.ENOSPC
    assert left_in(tmp_path) == ["source"]


@pytest.mark.parametrize("to", ["native", "toy"])
def test_a_disk_that_gets_full_leaves_nothing(tmp_path, small_disk, monkeypatch, to):
    shardkeep.save({"x": np.zeros(1 << 20)}, tmp_path / "source", no_dist=True)
    monkeypatch.setattr(driver, "_check_room", lambda place, nbytes: None)
    monkeypatch.setitem(TARGETS, "toy", TOY)
    with pytest.raises(shardkeep.StorageError, match="No space left") as caught:
        shardkeep.convert(tmp_path / "source", small_disk / "made", to=to)
    assert caught.value.errno == errno.ENOSPC
    assert left_in(small_disk) == []


def test_where_a_file_system_is_mounted_is_known_before(source, small_disk, tmp_path):
    """Nothing can be moved there, and what is beside it lies on another disk."""
    for to in ("native", "torch-save"):
        with pytest.raises(shardkeep.StorageError, match="name a directory in it"):
            shardkeep.convert(source, small_disk, to=to)
    writer = shardkeep.HuggingFaceWriter()
    with pytest.raises(shardkeep.StorageError, match="to a directory in it"):
        shardkeep.save({"x": np.ones(3)}, small_disk, storage_writer=writer, no_dist=True)
    assert left_in(tmp_path) == ["disk", "source"]
    shardkeep.convert(source, small_disk / "in")
    assert shardkeep.verify(small_disk / "in").ok


# --- to a format that lays its files out


def lay_out(outline, **options):
    """A toy: a file of odd offsets with checksums before and after, and one without elements."""
    tensors = list({id(t): t for t in outline.tensors.values() if t.nbytes}.values())
    head = "\n".join(f"{t.name} {t.dtype} {t.shape}" for t in tensors).encode()
    segments = [Literal(0, head + b"!")]
    at = len(head) + 1
    late = Late(at + 2, 4 * len(tensors), lambda crc: sums(crc))
    segments.append(late)
    at += 2 + late.nbytes
    parts = []
    for tensor in tensors:
        at += 3  # a hole, and nothing is aligned
        rows = tensor.shape[0] if tensor.shape else 1
        cuts = [(0, rows // 2), (rows // 2, rows)] if rows > 1 else [(0, rows)]
        for low, high in cuts:
            offsets = (low, *(0,) * (len(tensor.shape) - 1)) if tensor.shape else ()
            sizes = (high - low, *tensor.shape[1:]) if tensor.shape else ()
            parts.append(Elements(at, tensor, offsets, sizes, checked=low == 0))
            segments.append(parts[-1])
            at += parts[-1].nbytes
    checked = [part for part in parts if part.checked]

    def sums(crc):
        return b"".join(crc(part).to_bytes(4, "little") for part in checked)

    note = Literal(0, repr(sorted(outline.values.items())).encode())
    return [
        OutFile("deep/data.toy", at + 5, segments),
        OutFile("values.txt", note.nbytes, [note]),
    ]


TOY = SimpleNamespace(options={}, size="", lay_out=lay_out)


def check_toy(path, state):
    """Every byte of it, from the state and the layout."""
    raw = (path / "deep/data.toy").read_bytes()
    with shardkeep.open(state) as ckpt:
        arrays = {name: ckpt[name] for name in ckpt if hasattr(ckpt[name], "numpy")}
        arrays = {name: view.numpy() for name, view in arrays.items()}
    head, _, _ = raw.partition(b"!")
    lines = [line.split(b" ")[0].decode() for line in head.split(b"\n")]
    at = len(head) + 1
    assert raw[at : at + 2] == bytes(2)
    sums = np.frombuffer(raw, "<u4", len(lines), at + 2)
    at += 2 + 4 * len(lines)
    for name, crc in zip(lines, sums, strict=True):
        assert raw[at : at + 3] == bytes(3)
        at += 3
        data = arrays[name].tobytes()
        assert raw[at : at + len(data)] == data, name
        array = arrays[name]
        half = array[: len(array) // 2] if array.ndim and len(array) > 1 else array
        assert zlib.crc32(half.tobytes()) == crc
        at += len(data)
    assert raw[at:] == bytes(5)


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(TARGETS, "toy", TOY)


@pytest.mark.usefixtures("toy")
def test_laid_out_files_are_written_byte_by_byte(source, tmp_path):
    result = shardkeep.convert(source, tmp_path / "made", to="toy")
    check_toy(tmp_path / "made", source)
    assert result.files["deep/data.toy"] == (tmp_path / "made/deep/data.toy").stat().st_size
    assert "('step', 12)" in (tmp_path / "made/values.txt").read_text()
    assert left_in(tmp_path) == ["made", "source"]


@pytest.mark.usefixtures("toy")
def test_windows_may_cut_files_anywhere(tmp_path):
    state = {f"t{i}": np.arange(i * 401 + 1.0) for i in range(12)}
    state["c"] = (np.arange(3000) * (1 + 2j)).reshape(-1, 3)
    shardkeep.save(state, tmp_path / "source", no_dist=True)
    for window in (4096, 12288):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "WINDOW", window)
            patch.setattr(writing, "NOTE_EVERY", 3 * window)
            shardkeep.convert(tmp_path / "source", tmp_path / f"made{window}", to="toy")
        check_toy(tmp_path / f"made{window}", tmp_path / "source")


@given(st.data())
@settings(max_examples=30)
def test_any_stretch_of_a_file_can_be_filled(data):
    from shardkeep.dtypes import lookup
    from shardkeep.foreign.filling import Filling
    from shardkeep.foreign.layout import Outline, OutTensor

    arrays = {
        "a": np.arange(60, dtype="<u8").reshape(4, 5, 3),
        "b": np.arange(7, dtype="<u2"),
        "c": (np.arange(5) * (1 + 1j)).astype("<c16"),
        "d": np.array(3, "<u4"),
    }
    dtypes = {"a": "uint64", "b": "uint16", "c": "complex128", "d": "uint32"}
    tensors = {n: OutTensor(n, dtypes[n], a.shape) for n, a in arrays.items()}
    file = lay_out(Outline(None, tensors, {}))[0]

    def read(wishes):
        for wish in wishes:
            box = tuple(slice(o, o + s) for o, s in zip(wish.offsets, wish.sizes, strict=True))
            part = np.ascontiguousarray(arrays[wish.tensor.name][box])
            wish.place[...] = part.reshape(wish.sizes).view(lookup(wish.tensor.dtype).bits())

    filling = Filling(file.segments, read)
    whole = np.full(file.size, 7, np.uint8)
    filling.fill(0, file.size, whole)
    for segment in file.segments:
        if isinstance(segment, Elements):
            box = tuple(
                slice(o, o + s) for o, s in zip(segment.offsets, segment.sizes, strict=True)
            )
            stored = whole[segment.start : segment.start + segment.nbytes].tobytes()
            assert stored == arrays[segment.tensor.name][box].tobytes()
    low = data.draw(st.integers(0, file.size - 1))
    high = data.draw(st.integers(low + 1, file.size))
    part = np.full(high - low, 9, np.uint8)
    filling.fill(low, high, part)
    assert part.tobytes() == whole[low:high].tobytes()


# --- killed, and gone on with

KILLED = """
import os, signal, sys
import shardkeep
import shardkeep.foreign.writing as writing
from shardkeep.converting.target import TARGETS
sys.path.insert(0, {tests!r})
import test_convert
TARGETS["toy"] = test_convert.TOY
writing.WINDOW, writing.NOTE_EVERY = 1 << 20, 2 << 20

def progress(done, total):
    if done >= {when} * total:
        os.kill(os.getpid(), signal.{how})

shardkeep.convert({source!r}, {made!r}, to={to!r}, max_shard_size={size!r}, progress=progress)
"""


def run_killed(source, made, to, when, how="SIGKILL"):
    size = (2 << 20) if to == "native" else None
    program = textwrap.dedent(KILLED).format(
        tests=os.path.dirname(__file__),
        source=str(source),
        made=str(made),
        to=to,
        when=when,
        size=size,
        how=how,
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def large(tmp_path):
    rng = np.random.default_rng(1)
    state = {f"t{i}": rng.standard_normal(1 << 17) for i in range(12)}
    path = tmp_path / "source"
    shardkeep.save(state, path, no_dist=True)
    return path


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("to", ["native", "toy"])
def test_a_killed_convert_is_gone_on_with(large, tmp_path, to, monkeypatch):
    made, begun = tmp_path / "made", tmp_path / "made.converting"
    done = run_killed(large, made, to, 0.7)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not made.exists()
    journal = (begun / "journal").read_bytes()
    assert journal.count(b"\n") >= 2  # what it is, and how far it was at some time
    (begun / "journal").write_bytes(journal + b'{"file": "cut sho')
    files = {p: p.stat().st_ino for p in begun.rglob("*.safetensors")}
    monkeypatch.setattr(writing, "WINDOW", 1 << 20)
    seen = []
    options = {"max_shard_size": 2 << 20} if to == "native" else {}
    result = shardkeep.convert(large, made, to=to, **options, progress=lambda *at: seen.append(at))
    assert result.resumed
    assert seen[0][0] > 1 << 20  # what was there counts, at once
    if to == "native":
        assert shardkeep.verify(made).ok
        assert same(shardkeep.open(made).state_dict(), shardkeep.open(large).state_dict())
        kept = {p.stat().st_ino for p in made.rglob("*.safetensors")} & set(files.values())
        assert len(kept) >= 3
    else:
        check_toy(made, large)
    assert left_in(tmp_path) == ["made", "source"]


@pytest.mark.parametrize("to", ["native", "hf"])
def test_killed_when_the_result_is_in_its_place(tmp_path, to, monkeypatch):
    """What it replaced lies where it was built then, and must not be taken for it."""
    for number in (1, 2):
        state = {"x": np.full(5000, number, np.float32)}
        shardkeep.save(state, tmp_path / f"source-{number}", no_dist=True)
    made = tmp_path / "made"
    shardkeep.convert(tmp_path / "source-1", made, to=to)
    with monkeypatch.context() as killed:
        killed.setattr(Workplace, "__exit__", lambda self, *_: os.close(self._journal))
        shardkeep.convert(tmp_path / "source-2", made, to=to, overwrite=True)
    for _ in range(2):
        with shardkeep.open(made) as checkpoint:
            assert (checkpoint["x"][:] == 2).all()
        shardkeep.convert(tmp_path / "source-2", made, to=to, overwrite=True)
    assert left_in(tmp_path) == ["made", "source-1", "source-2"]


def test_what_was_taken_away_is_put_back(tmp_path, monkeypatch):
    """Where two directories cannot change places, for a moment there is neither."""
    for number in (1, 2):
        shardkeep.save({"x": np.full(50, number)}, tmp_path / f"source-{number}", no_dist=True)
    made = tmp_path / "made"
    shardkeep.convert(tmp_path / "source-1", made)
    folder = tmp_path / "made.converting"
    folder.mkdir()
    made.rename(folder / "replaced")

    def stop(done, total):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        shardkeep.convert(tmp_path / "source-2", made, overwrite=True, progress=stop)
    assert (shardkeep.open(made)["x"][:] == 1).all()


@contextlib.contextmanager
def exchanges(possible):
    """Whether two directories can change places."""

    def handler(call):
        if call.name == "exchange_names" and not possible:
            raise OSError(errno.EINVAL, "directories cannot change places")
        return call.make()

    with intercepted(handler):
        yield


@pytest.fixture
def replaced(tmp_path):
    """A checkpoint of ones, and another of twos that is to replace it."""
    for number in (1, 2):
        shardkeep.save({"x": np.full(50, number)}, tmp_path / f"source-{number}", no_dist=True)
    shardkeep.convert(tmp_path / "source-1", tmp_path / "made")
    return tmp_path / "made"


def number_at(path):
    with shardkeep.open(path) as checkpoint:
        return int(checkpoint["x"][0])


@pytest.mark.parametrize("exchange", [True, False])
def test_what_was_replaced_is_kept_until_that_lasts(replaced, tmp_path, caplog, exchange):
    """The result is in its place, and nobody knows for how long: then there must be the other."""
    folder = tmp_path / "made.converting"
    moved = []

    def handler(call):
        if call.name == "fsync" and call.path() == tmp_path and number_at(replaced) == 2:
            moved.append(1)
            raise OSError(errno.EIO, "the disk is sick")
        if call.name == "exchange_names" and not exchange:
            raise OSError(errno.EINVAL, "directories cannot change places")
        return call.make()

    with intercepted(handler), pytest.raises(shardkeep.StorageError, match="is sick"):
        shardkeep.convert(tmp_path / "source-2", replaced, overwrite=True)
    assert moved
    aside = folder / ("made" if exchange else "replaced")
    assert (number_at(replaced), number_at(aside)) == (2, 1)
    assert str(aside) in caplog.text
    shardkeep.convert(tmp_path / "source-2", replaced, overwrite=True)
    assert number_at(replaced) == 2
    assert left_in(tmp_path) == ["made", "source-1", "source-2"]


@pytest.mark.parametrize(
    ("exchange", "moves"),
    [
        (True, ["done exchange_names"]),
        (False, ["done rename"]),
        (False, ["rename made"]),
        (False, ["rename made", "rename replaced"]),
    ],
)
def test_moves_that_fail_or_say_so(replaced, tmp_path, exchange, moves):
    """Whatever is said: the old one is there, or the new one, or the next convert finds it."""
    folder, failed = tmp_path / "made.converting", []

    def handler(call):
        what = call.name
        if what == "exchange_names" and not exchange:
            raise OSError(errno.EINVAL, "directories cannot change places")
        if what in ("rename", "exchange_names"):
            done = f"done {what}" in moves and call.path() == (
                folder / "made" if exchange else replaced
            )
            if done:
                call.make()
            is_second = not replaced.exists() and f"rename {call.path().name}" in moves
            if done or is_second:
                failed.append(what)
                raise OSError(errno.ENOENT, "asked twice")
        return call.make()

    with intercepted(handler), contextlib.suppress(shardkeep.StorageError):
        shardkeep.convert(tmp_path / "source-2", replaced, overwrite=True)
    assert len(failed) == len(moves)
    if "rename replaced" in moves:
        assert number_at(folder / "replaced") == 1

        def stop(done, total):
            assert number_at(replaced) == 1
            raise RuntimeError

        with pytest.raises(RuntimeError):
            shardkeep.convert(tmp_path / "source-2", replaced, overwrite=True, progress=stop)
    assert number_at(replaced) == (1 if "rename made" in moves else 2)
    assert left_in(tmp_path) == ["made", "source-1", "source-2"]


def test_what_cannot_be_put_back_stays_where_it_is(replaced, tmp_path):
    folder = tmp_path / "made.converting"
    folder.mkdir()
    replaced.rename(folder / "replaced")
    for calls in (["rename"], ["fsync"]):

        def handler(call, calls=calls):
            if (
                call.name in calls
                and folder.exists()
                and call.path() in (folder / "replaced", tmp_path)
            ):
                raise OSError(errno.EACCES, "it is not allowed")
            return call.make()

        with intercepted(handler), pytest.raises(shardkeep.StorageError, match="not allowed"):
            shardkeep.convert(tmp_path / "source-2", replaced, overwrite=True)
        assert folder.exists()
        assert number_at(folder / "replaced" if calls == ["rename"] else replaced) == 1
    shardkeep.convert(tmp_path / "source-2", replaced, overwrite=True)
    assert number_at(replaced) == 2
    assert left_in(tmp_path) == ["made", "source-1", "source-2"]


def test_onto_itself_after_it_was_taken_away(replaced, tmp_path):
    """A convert onto its own source was killed when there was neither, and is gone on with."""
    folder = tmp_path / "made.converting"
    folder.mkdir()
    replaced.rename(folder / "replaced")
    shardkeep.convert(replaced, replaced, overwrite=True)
    assert number_at(replaced) == 1
    assert left_in(tmp_path) == ["made", "source-1", "source-2"]


def test_what_is_put_back_is_there_though_it_is_not_to_be_replaced(replaced, tmp_path):
    folder = tmp_path / "made.converting"
    folder.mkdir()
    replaced.rename(folder / "replaced")
    with pytest.raises(shardkeep.CheckpointExistsError, match="already exists"):
        shardkeep.convert(tmp_path / "source-2", replaced)
    assert number_at(replaced) == 1
    assert left_in(tmp_path) == ["made", "source-1", "source-2"]


def test_killed_where_directories_cannot_change_places(replaced, tmp_path, monkeypatch):
    """What it replaced is still here, and in the way of the next."""
    with monkeypatch.context() as killed, exchanges(False):
        killed.setattr(Workplace, "__exit__", lambda self, *_: os.close(self._journal))
        shardkeep.convert(tmp_path / "source-2", replaced, overwrite=True)
    assert number_at(tmp_path / "made.converting" / "replaced") == 1
    with exchanges(False):
        shardkeep.convert(tmp_path / "source-1", replaced, overwrite=True)
    assert number_at(replaced) == 1
    assert left_in(tmp_path) == ["made", "source-1", "source-2"]


def test_what_is_kept_in_the_workplace_is_no_source_for_it(source, tmp_path):
    """It holds what was replaced, if nobody knows whether that lasts."""
    kept = tmp_path / "made.converting" / "made"
    kept.parent.mkdir()
    source.rename(kept)
    (kept.parent / "journal").touch()
    before = shardkeep.open(kept).digest
    with pytest.raises(shardkeep.CheckpointExistsError, match="move it first"):
        shardkeep.convert(kept, tmp_path / "made")
    assert shardkeep.open(kept).digest == before
    shardkeep.convert(kept, tmp_path / "other")


def test_a_folder_of_somebody_else_is_not_built_in(source, tmp_path):
    other = tmp_path / "made.converting"
    shardkeep.save({"x": np.ones(3)}, other, no_dist=True)
    (tmp_path / "more.converting" / "made").mkdir(parents=True)
    (tmp_path / "more.converting" / "thesis.txt").write_text("mine")
    for name in ("made", "more"):
        with pytest.raises(shardkeep.CheckpointExistsError, match="holds other things"):
            shardkeep.convert(source, tmp_path / name)
    assert shardkeep.verify(other).ok
    assert left_in(tmp_path / "more.converting") == ["made", "thesis.txt"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_file_takes_the_place_of_a_directory(replaced, tmp_path, exchange):
    made = replaced.rename(tmp_path / "made.pt")
    with exchanges(exchange):
        shardkeep.convert(tmp_path / "source-2", made, to="torch-save", overwrite=True)
        assert made.is_file()
        assert number_at(made) == 2
        shardkeep.convert(tmp_path / "source-1", made, overwrite=True)
        assert number_at(made) == 1
    assert left_in(tmp_path) == ["made.pt", "source-1", "source-2"]


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("change", ["arguments", "source"])
def test_another_convert_begins_anew(large, tmp_path, change):
    made = tmp_path / "made"
    assert run_killed(large, made, "toy", 0.7).returncode == -signal.SIGKILL
    options = {}
    if change == "arguments":
        options["exclude"] = ["t1"]
    else:
        state = shardkeep.open(large).state_dict()
        state["t0"] += 1
        shardkeep.save(state, large, no_dist=True, overwrite=True)
    result = shardkeep.convert(large, made, to="toy", **options)
    assert not result.resumed
    check_toy(made, large)


def test_another_source_with_files_that_look_alike(large, tmp_path, monkeypatch):
    """Sizes and times say nothing where a checkpoint has a digest."""
    monkeypatch.setattr(driver, "fingerprint", lambda path: [])

    def stop(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    options = {"max_shard_size": 2 << 20}
    with pytest.raises(KeyboardInterrupt):
        shardkeep.convert(large, tmp_path / "made", **options, progress=stop)
    state = {name: value + 1 for name, value in shardkeep.open(large).state_dict().items()}
    shardkeep.save(state, large, no_dist=True, overwrite=True)
    assert not shardkeep.convert(large, tmp_path / "made", **options).resumed
    assert same(shardkeep.open(tmp_path / "made").state_dict(), state)


NO_STDIO = """
import os
from pathlib import Path
os.closerange(0, 3)
from shardkeep.foreign.writing import FileNote, _opened
out, _ = _opened(Path({path!r}), FileNote(0, {{}}))
os._exit(0 if out.fd > 2 else 1)
"""


def test_a_file_that_is_gone_on_with_is_not_standard_output(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    program = NO_STDIO.format(path=str(tmp_path / "file"))
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_interrupted_convert_can_be_gone_on_with(large, tmp_path):
    done = run_killed(large, tmp_path / "made", "native", 0.7, how="SIGINT")
    assert "KeyboardInterrupt" in done.stderr
    assert left_in(tmp_path) == ["made.converting", "source"]
    assert shardkeep.convert(large, tmp_path / "made", max_shard_size=2 << 20).resumed


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("to", ["native", "toy"])
def test_what_was_noted_of_a_file_that_is_gone_says_nothing_of_the_next(
    large, tmp_path, to, monkeypatch
):
    """A crash may take away a name that was not durable, while the note of its file is."""
    monkeypatch.setattr(writing, "WINDOW", 1 << 20)
    monkeypatch.setattr(writing, "NOTE_EVERY", 2 << 20)
    made, begun = tmp_path / "made", tmp_path / "made.converting"
    options = {"max_shard_size": 2 << 20} if to == "native" else {}

    def killed_at(part):
        def progress(done, total):
            if done >= part * total:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            shardkeep.convert(large, made, to=to, **options, progress=progress)

    killed_at(0.7)
    files = [path for path in begun.rglob("*") if path.is_file() and path.name != "journal"]
    assert files
    for path in files:
        path.unlink()
    killed_at(0.1)
    assert shardkeep.convert(large, made, to=to, **options).resumed
    if to == "native":
        assert shardkeep.verify(made).ok
        assert same(shardkeep.open(made).state_dict(), shardkeep.open(large).state_dict())
    else:
        check_toy(made, large)


def test_two_converts_to_one_place(source, tmp_path):
    made = tmp_path / "made"

    def again(done, total):
        with pytest.raises(shardkeep.StorageError, match="another convert is at work"):
            shardkeep.convert(source, made)

    shardkeep.convert(source, made, progress=again)
    assert same(shardkeep.open(made).state_dict(), state_of())


def test_an_error_in_the_middle_leaves_nothing(large, tmp_path):
    def fail(done, total):
        if done > total // 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        shardkeep.convert(large, tmp_path / "made", progress=fail)
    assert left_in(tmp_path) == ["source"]
