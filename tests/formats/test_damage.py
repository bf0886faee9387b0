"""Damage: whatever happens to the files, nothing ever loads changed, and `verify` sees it all."""

import contextlib
import json
import os
import random
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    NativeWriter,
    PerRank,
    ShardedArray,
    StorageError,
    ThreadRanks,
)
from shardkeep.formats.native.header import read_header

BLOCK = 4096
BUDGET = 8 << 20


def state(rank: int, salt: int = 0) -> dict:
    rng = np.random.default_rng(salt)
    whole = rng.standard_normal((12, 300)).astype(np.float32)
    rows = slice(rank * 5, 12 if rank else 5)  # uneven: 5 and 7
    return {
        "model": {
            "sharded": ShardedArray.from_local(whole[rows], (rank * 5, 0), whole.shape),
            "plain": rng.integers(0, 2**15, 1700, np.int16),
            "scalar": rng.standard_normal(()),
            "empty": np.zeros((0, 3), np.float32),
            "bytes": rng.integers(0, 256, 777, np.uint8),
        },
        "only": {f"rank{rank}": rng.standard_normal(9)},
        "step": 100 + salt,
        "names": ["a", ("b", None), {1, 2}],
        "rng": PerRank({"seed": bytes(range(40)), "at": rank + salt}),
    }


def save(path: Path, salt: int = 0, **options) -> shardkeep.SaveResult:
    return ThreadRanks(2).run(
        lambda c: shardkeep.save(
            state(c.rank, salt),
            path,
            process_group=c,
            storage_writer=NativeWriter(block=BLOCK),
            **options,
        )
    )[0]


def load_all(path: Path):
    with shardkeep.open(path, memory_budget=BUDGET) as ckpt:
        return ckpt.state_dict()


def equal(a, b) -> bool:
    """Same types, same structure, same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


class Saved:
    """A checkpoint on disk, what it holds, and what lies where."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result = save(path)
        self.content = load_all(path)
        self.record = json.loads((path / "checkpoint.json").read_bytes())
        self.rows = self.record["files"]
        self.names = [row["name"] for row in self.rows]
        self.index = self.record["index"]["name"]
        with shardkeep.open(path) as ckpt:
            self.chunks = [
                (key.fqn, where.file, where.offset, where.offset + where.nbytes)
                for key, where in ckpt.metadata.storage_data.items()
                if key.fqn in ckpt.metadata.state_dict_metadata
                and isinstance(ckpt[key.fqn], shardkeep.TensorView)
            ]

    def entries(self, name: str):
        data = (self.path / name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        return read_header(data[: 8 + length], name, len(data))[0]

    def header_text(self, name: str) -> int:
        """Bytes of length and JSON, without the spaces after it."""
        data = (self.path / name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        return len(data[: 8 + length].rstrip(b" "))

    def used_blocks(self, row: dict) -> set[int]:
        """Blocks of a data file that a load of everything reads."""
        spans = [(low, high) for _, file, low, high in self.chunks if file == row["name"]]
        if row["values"] is not None:
            spans.append((row["values"], row["payload"]))
        return {block for low, high in spans for block in range(low // BLOCK, -(-high // BLOCK))}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    return Saved(tmp_path_factory.mktemp("pristine") / "ckpt")


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    shutil.copytree(saved.path, tmp_path / "ckpt")
    return tmp_path / "ckpt"


@contextlib.contextmanager
def flipped(fd: int, offset: int, bit: int):
    byte = os.pread(fd, 1, offset)
    os.pwrite(fd, bytes([byte[0] ^ (1 << bit)]), offset)
    try:
        yield
    finally:
        os.pwrite(fd, byte, offset)


@contextlib.contextmanager
def opened(path: Path):
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def problems(path: Path) -> list[shardkeep.Problem]:
    """What `verify` finds; an error counts as one problem."""
    try:
        return shardkeep.verify(path, memory_budget=BUDGET).problems
    except CheckpointError as error:
        return [shardkeep.Problem("?", str(error))]


def changed_silently(path: Path, content: object) -> bool:
    """Whether a load of everything returns anything but the original or an error of ours."""
    try:
        return not equal(load_all(path), content)
    except CheckpointError:
        return False


def must_raise(path: Path, where: str) -> CheckpointError:
    try:
        load_all(path)
    except CheckpointError as error:
        return error
    raise AssertionError(f"{where}: loaded without an error")


PARTS = 8


def some_of(offsets: range, step: int = 64) -> list[int]:
    """One in `step`, not the same one of each period, and the last."""
    rng = random.Random(7)
    picked = [at + rng.randrange(step) for at in range(offsets.start, offsets.stop - step, step)]
    return picked + [offsets.stop - 1] * bool(offsets)


def chosen(surely: list[range], rest: list[range], part: int | None) -> list[int]:
    """`surely` whole and some of `rest`; or one part of all of them, where all parts are run."""
    if part is None:
        return [*(at for r in surely for at in r), *(at for r in rest for at in some_of(r))]
    return [at for r in (*surely, *rest) for at in r if at % PARTS == part]


@pytest.fixture(
    params=[None, *(pytest.param(part, marks=pytest.mark.slow) for part in range(PARTS))],
    ids=["some", *map(str, range(PARTS))],
)
def part(request) -> int | None:
    """Which bytes to flip; see `chosen`."""
    return request.param


# --- flipped bits -------------------------------------------------------------------------------


def test_pristine_is_fine(saved):
    report = shardkeep.verify(saved.path, expect_digest=saved.result.digest)
    assert report.ok, report.problems
    total = sum(f.stat().st_size for f in (saved.path / "data").iterdir())
    assert report.nbytes == total
    assert len(saved.rows) == 2
    assert all(row["payload"] > 2 * BLOCK for row in saved.rows)
    assert equal(saved.content["model"]["plain"], state(0)["model"]["plain"])


def test_every_bit_of_the_record(saved, copy):
    size = (copy / "checkpoint.json").stat().st_size
    with opened(copy / "checkpoint.json") as fd:
        for at in range(size):
            for bit in range(8):
                with flipped(fd, at, bit):
                    found = problems(copy)
                    assert found, f"bit {bit} of byte {at} of the record: verify says all is well"
                    error = must_raise(copy, f"bit {bit} of byte {at} of the record")
                    assert isinstance(error, (CorruptionError, FormatError)), (at, bit, error)
    assert shardkeep.verify(copy).ok


def test_every_byte_of_the_index(saved, copy, part):
    row = saved.record["index"]
    text, room = (
        saved.header_text(row["name"]),
        min(e.start for e in saved.entries(row["name"]).values()),
    )
    digests = row["payload"] + 16 * (-(-row["payload"] // BLOCK) + 1)
    wanted = chosen(
        [range(text), range(room, digests)], [range(text, room), range(digests, row["size"])], part
    )
    rng = random.Random(1)
    with opened(copy / row["name"]) as fd:
        for at in wanted:
            with flipped(fd, at, rng.randrange(8)):
                assert any(p.file == row["name"] for p in problems(copy)), at
                # All of the index is read when everything is loaded.
                assert isinstance(must_raise(copy, f"index byte {at}"), CorruptionError)
    assert shardkeep.verify(copy).ok


def test_headers_and_digests_of_data_files(saved, copy, part):
    rng = random.Random(2)
    for row in saved.rows:
        text = saved.header_text(row["name"])
        room = min(e.start for e in saved.entries(row["name"]).values())
        digests = row["payload"] + 16 * (-(-row["payload"] // BLOCK) + 1)
        header = chosen([range(text)], [range(text, room)], part)
        tail = chosen([range(row["payload"], digests)], [range(digests, row["size"])], part)
        with opened(copy / row["name"]) as fd:
            for at in header:
                with flipped(fd, at, rng.randrange(8)):
                    found = problems(copy)
                    assert any(p.file == row["name"] for p in found), (row["name"], at)
                    if at % 17 == 0:  # no load reads the header, so nothing depends on it
                        assert not changed_silently(copy, saved.content), (row["name"], at)
            for at in tail:
                with flipped(fd, at, rng.randrange(8)):
                    assert any(p.file == row["name"] for p in problems(copy)), (row["name"], at)
                    must_raise(copy, f"digest byte {at} of {row['name']}")
    assert shardkeep.verify(copy).ok


def test_payload_of_data_files(saved, copy, part):
    rng = random.Random(3)
    for row in saved.rows:
        room = min(e.start for e in saved.entries(row["name"]).values())
        used = saved.used_blocks(row)
        with opened(copy / row["name"]) as fd:
            for at in chosen([], [range(room, row["payload"])], part):
                with flipped(fd, at, rng.randrange(8)):
                    found = [p for p in problems(copy) if p.block == at // BLOCK]
                    assert found, (row["name"], at)
                    if at // BLOCK in used:
                        assert isinstance(must_raise(copy, str(at)), CorruptionError)
                    else:
                        assert not changed_silently(copy, saved.content)
    assert shardkeep.verify(copy).ok


def test_damage_is_named(saved, copy):
    """A flip inside a tensor is reported under the tensor's name, by `verify` and by `load`."""
    for name, file, low, high in saved.chunks:
        if low == high:
            continue
        with opened(copy / file) as fd:
            for at in {low, (low + high) // 2, high - 1}:
                with flipped(fd, at, 0):
                    found = shardkeep.verify(copy).problems
                    assert [p.file for p in found] == [file]
                    assert name in found[0].names, (name, at, found)
                    with pytest.raises(CorruptionError) as caught:
                        shardkeep.verify(copy).raise_if_damaged()
                    assert name in caught.value.names
                    with pytest.raises(CorruptionError) as caught:
                        load_all(copy)
                    assert name in caught.value.names, (name, at, caught.value)
                    with pytest.raises(CorruptionError) as caught:
                        ThreadRanks(2).run(
                            lambda c: shardkeep.load(state(c.rank, 1), copy, process_group=c)
                        )
                    assert name in caught.value.names, (name, at, caught.value)


def test_only_what_is_damaged_is_named(saved, copy):
    """All that lies in a damaged block, and nothing else."""
    reader = shardkeep.NativeReader(copy)
    reader.read_metadata()
    values = reader.index.values
    for number, row in enumerate(saved.rows):
        mine = [(n, low, high) for n, file, low, high in saved.chunks if file == row["name"]]
        held = {n for n, at in zip(values.names, values.file, strict=True) if at == number}
        spans = [*mine, *((name, row["values"], row["payload"]) for name in held)]

        def hit(low, high, spans=spans):
            return tuple(sorted({n for n, a, b in spans if a < high and b > low}))

        edges = sorted({edge for _, low, high in spans for edge in (low, high)})
        for low, high in pairwise(edges):
            assert reader.names_in(number, low, high) == hit(low, high)
        for low in range(BLOCK, row["payload"], BLOCK):
            high = min(low + BLOCK, row["payload"])
            with opened(copy / row["name"]) as fd, flipped(fd, low + 5, 1):
                (problem,) = shardkeep.verify(copy).problems
            assert problem.names == hit(low, high)
    reader.close()


def test_damaged_values_are_named(saved, copy):
    row = saved.rows[0]
    with opened(copy / row["name"]) as fd, flipped(fd, row["payload"] - 3, 4):
        (found,) = shardkeep.verify(copy).problems
        assert "step" in found.names
        with pytest.raises(CorruptionError) as caught, shardkeep.open(copy) as ckpt:
            _ = ckpt["step"]
        assert "step" in caught.value.names


def test_unrelated_parts_still_load(saved, copy):
    """Damage costs what it hits, not the rest."""
    name, file, low, _ = next(c for c in saved.chunks if c[0] == "model.sharded")
    with opened(copy / file) as fd, flipped(fd, low, 3), shardkeep.open(copy) as ckpt:
        with pytest.raises(CorruptionError):
            ckpt[name].numpy()
        assert equal(ckpt["only.rank1"].numpy(), saved.content["only"]["rank1"])


def test_unchecked_load_still_checks_record_and_index(saved, copy):
    with opened(copy / saved.index) as fd, flipped(fd, 100, 1), pytest.raises(CorruptionError):
        shardkeep.open(copy, verify=False)


def test_two_damaged_files_are_both_reported(saved, copy):
    with (
        opened(copy / saved.names[0]) as a,
        opened(copy / saved.names[1]) as b,
        flipped(a, BLOCK + 1, 1),
        flipped(b, BLOCK + 1, 1),
        flipped(b, 2 * BLOCK + 1, 1),
    ):
        found = shardkeep.verify(copy).problems
    assert [(p.file, p.block) for p in found] == [
        (saved.names[0], 1),
        (saved.names[1], 1),
        (saved.names[1], 2),
    ]


def test_a_pinned_digest_refuses_another_checkpoint(saved, tmp_path):
    other = save(tmp_path / "other", salt=1)
    assert other.digest != saved.result.digest
    assert not shardkeep.verify(tmp_path / "other", expect_digest=saved.result.digest).ok
    with pytest.raises(CorruptionError):
        shardkeep.open(tmp_path / "other", expect_digest=saved.result.digest)
    with pytest.raises(CorruptionError):
        shardkeep.load({}, tmp_path / "other", expect_digest=saved.result.digest)


# --- whole files --------------------------------------------------------------------------------


def every_file(saved: Saved) -> list[str]:
    return ["checkpoint.json", saved.index, *saved.names]


@pytest.mark.parametrize("number", range(4), ids=["record", "index", "data0", "data1"])
@pytest.mark.parametrize("change", ["empty", "-1", "-4096", "half", "+1", "+4096", "gone"])
def test_cut_grown_or_absent(saved, copy, number, change):
    name = every_file(saved)[number]
    path = copy / name
    size = path.stat().st_size
    if change == "gone":
        path.unlink()
    else:
        length = {"empty": 0, "half": size // 2}.get(change)
        os.truncate(path, max(0, size + int(change)) if length is None else length)
    if (number, change) == (0, "gone"):
        for call in (shardkeep.verify, shardkeep.open, load_all):
            with pytest.raises(CheckpointNotFoundError):
                call(copy)
        return
    found = problems(copy)
    assert found
    error = must_raise(copy, name)
    assert isinstance(error, (CorruptionError, FormatError)), error
    if number:
        assert name in "".join(p.file + p.text for p in found)
        assert Path(name).name in str(error)
    if number >= 2:
        hit = {n for n, file, low, high in saved.chunks if file == name and low < high}
        assert hit <= set(found[0].names)
        assert isinstance(error, CorruptionError)
        assert hit <= set(error.names), error.names


def test_no_data_folder(copy):
    shutil.rmtree(copy / "data")
    assert problems(copy)
    assert isinstance(must_raise(copy, "data"), CorruptionError)


def test_swapped_data_files(saved, copy):
    a, b = copy / saved.names[0], copy / saved.names[1]
    one, two = a.read_bytes(), b.read_bytes()
    a.write_bytes(two)
    b.write_bytes(one)
    assert {p.file for p in problems(copy)} == set(saved.names)
    assert isinstance(must_raise(copy, "swapped"), CorruptionError)


def test_an_older_data_file_of_the_same_size(saved, copy, tmp_path):
    save(tmp_path / "older", salt=1)
    older = json.loads((tmp_path / "older" / "checkpoint.json").read_bytes())
    for mine, theirs in zip(saved.rows, older["files"], strict=True):
        assert mine["size"] == theirs["size"]
        shutil.copy(tmp_path / "older" / theirs["name"], copy / mine["name"])
    assert {p.file for p in problems(copy)} == set(saved.names)
    assert isinstance(must_raise(copy, "older"), CorruptionError)


@pytest.mark.parametrize("number", range(4), ids=["record", "index", "data0", "data1"])
@pytest.mark.parametrize("kind", ["link", "dangling", "directory", "pipe", "socket"])
def test_something_else_in_place_of_a_file(saved, copy, tmp_path, number, kind):
    """Links are not followed out of the checkpoint, and a pipe blocks nobody."""
    path = copy / every_file(saved)[number]
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        import socket

        here = os.getcwd()
        os.chdir(path.parent)  # socket paths are short
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
        finally:
            os.chdir(here)
    assert problems(copy)
    error = must_raise(copy, kind)
    assert isinstance(error, (CorruptionError, StorageError)), error
    if isinstance(error, StorageError):
        assert not error.transient


def test_a_record_replaced_by_an_older_valid_one(saved, copy):
    """The files an older record names are gone once it was overwritten: an error, not a mixture."""
    older = (copy / "checkpoint.json").read_bytes()
    save(copy, salt=1, overwrite=True)
    assert not equal(load_all(copy), saved.content)
    (copy / "checkpoint.json").write_bytes(older)
    assert problems(copy)
    assert isinstance(must_raise(copy, "older record"), CorruptionError)


def test_an_older_record_whose_files_are_there_is_that_checkpoint(saved, copy):
    older = (copy / "checkpoint.json").read_bytes()
    kept = {f: f.read_bytes() for f in (copy / "data").iterdir()}
    save(copy, salt=1, overwrite=True)
    for file, data in kept.items():
        file.write_bytes(data)
    (copy / "checkpoint.json").write_bytes(older)
    assert shardkeep.verify(copy).ok
    assert equal(load_all(copy), saved.content)


def test_record_of_another_checkpoint(saved, copy, tmp_path):
    save(tmp_path / "other", salt=1)
    shutil.copy(tmp_path / "other" / "checkpoint.json", copy / "checkpoint.json")
    assert problems(copy)
    assert isinstance(must_raise(copy, "foreign record"), CorruptionError)


def test_leftovers_beside_the_checkpoint_do_not_matter(saved, copy):
    (copy / "data" / f"{'0' * 32}-r00000-0.safetensors").write_bytes(b"half")
    (copy / f"checkpoint.json.{'0' * 32}.tmp").write_bytes(b"")
    (copy / "notes.txt").write_text("mine")
    assert shardkeep.verify(copy).ok
    assert equal(load_all(copy), saved.content)


def test_a_report_raises_what_it_found(tmp_path):
    shardkeep.save({"w": np.arange(9.0), "v": np.ones(3)}, tmp_path / "a", no_dist=True)
    shardkeep.verify(tmp_path / "a").raise_if_damaged()
    (data,) = (tmp_path / "a/data").glob("*r0*.safetensors")
    flipped = bytearray(data.read_bytes())
    flipped[4096] ^= 1
    data.write_bytes(flipped)
    with pytest.raises(shardkeep.CorruptionError, match="is damaged") as caught:
        shardkeep.verify(tmp_path / "a").raise_if_damaged()
    assert caught.value.names
    data.write_bytes(bytes(flipped[:4096]) + bytes([flipped[4096] ^ 1]) + bytes(flipped[4097:]))
    shardkeep.verify(tmp_path / "a").raise_if_damaged()
    (index,) = (tmp_path / "a/data").glob("*-index.safetensors")
    flipped = bytearray(index.read_bytes())
    flipped[-1] ^= 1
    index.write_bytes(flipped)
    with pytest.raises(shardkeep.CorruptionError, match=r"index.safetensors: ") as caught:
        shardkeep.verify(tmp_path / "a").raise_if_damaged()
    assert not caught.value.names
