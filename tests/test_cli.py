"""The command `shardkeep`: what it prints, what it reads, and how it ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import shardkeep
from shardkeep import MetadataIndex, ShardedArray, ThreadRanks
from shardkeep.cli.commands import cli
from shardkeep.cli.selection import parse_index
from shardkeep.cli.texts import human_size, parse_duration, printable
from shardkeep.dtypes import TABLE

SOURCE = Path(shardkeep.__file__).parent.parent
WEIGHT = np.arange(12, dtype=np.float64).reshape(3, 4)
BIG = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
DEAD_SAVE = "d" * 32


def run(*args):
    return CliRunner().invoke(cli, [str(a) for a in args])


def ok(*args):
    done = run(*args)
    assert done.exit_code == 0, done.output
    return done.stdout


def failed(code, *args):
    """The message of a run that must end with this code."""
    done = run(*args)
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    return done.stderr


def process(*args, python=(), **options):
    return subprocess.run(
        [sys.executable, *python, "-m", "shardkeep.cli", *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        text=True,
        timeout=60,
        **options,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "step-100"
    state = {
        "model": {
            "weight": WEIGHT,
            "half": np.array([0.5, -1.25, np.inf], ml_dtypes.bfloat16),
            "empty": np.zeros((0, 3), np.int32),
            "scalar": np.array(7, np.int64),
            "tied": WEIGHT,
        },
        "big": BIG,
        "complex": np.array([1 + 2j, np.nan], np.complex64),
        "step": 100,
        "seed": 2**200,
        "long": 7**6000,
        "note": "a\x1b[31mb",
        "config": {"betas": (0.9, 0.95), "raw": b"\0\1", "loss": float("nan")},
        "bad\x1b[2Jname": 1,
    }
    shardkeep.save(state, path)
    return path


@pytest.fixture
def damageable(tmp_path):
    """A checkpoint of one large tensor, and a function that flips a bit of one of its rows."""
    path = tmp_path / "damageable"
    shardkeep.save({"big": BIG, "step": 1}, path)
    with shardkeep.open(path) as opened:
        place = opened.metadata.storage_data[MetadataIndex("big")]

    def flip(row):
        flip_bit(path / place.file, place.offset + row * 4096)

    return path, flip


def flip_bit(file, at):
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


# --- show


def test_show_gives_totals_then_tensors_then_values(checkpoint):
    lines = [re.split(r"\s{2,}", line) for line in ok("show", checkpoint).splitlines()]
    assert lines[0] == ["checkpoint", str(checkpoint)]
    assert ["holds", "7 tensors, 8 values"] in lines
    assert ["model.weight", "3x4", "float64", "1", "96 B", "r00000-0"] in lines
    assert ["model.half", "3", "bfloat16", "1", "6 B", "r00000-0"] in lines
    assert ["model.empty", "0x3", "int32", "0", "0 B", "0"] in lines
    assert ["model.scalar", "scalar", "int64", "1", "8 B", "r00000-0"] in lines
    assert ["model.tied", "3x4", "float64", "= model.weight"] in lines
    assert ["step", "int", "100", "r00000-0"] in lines
    assert ["config.betas", "tuple", "(0.9, 0.95)", "r00000-0"] in lines


def test_names_and_values_cannot_steer_the_terminal(checkpoint):
    for args in (("show", checkpoint), ("cat", checkpoint, "note"), ("show", checkpoint, "\x1b")):
        done = run(*args)
        assert "\x1b" not in done.output
    assert "bad\\x1b[2Jname" in ok("show", checkpoint)


def test_show_json_has_stable_keys_and_the_same_facts(checkpoint):
    shown = json.loads(ok("show", checkpoint, "--json"))
    assert list(shown) == [
        "path", "format", "tensors", "values", "chunks", "files", "tensor_bytes", "file_bytes",
        "kept_bytes",
        "ranks", "saved_at", "library_version", "save_id", "digest", "requires", "user", "names",
        "problems",
    ]  # fmt: skip
    assert shown["format"] == {"name": "shardkeep", "major": 1, "minor": 0}
    assert (shown["tensors"], shown["values"], shown["files"]) == (7, 8, 3)
    assert shown["file_bytes"] == sum(f.stat().st_size for f in checkpoint.rglob("*.*"))
    with shardkeep.open(checkpoint) as opened:
        assert shown["tensor_bytes"] == opened.nbytes
        assert shown["digest"] == opened.digest
        assert [row["name"] for row in shown["names"]] == list(opened)
    rows = {row["name"]: row for row in shown["names"]}
    file = f"data/{shown['save_id']}-r00000-0.safetensors"
    assert rows["model.weight"] == {
        "name": "model.weight", "kind": "tensor", "shape": [3, 4], "dtype": "float64",
        "chunks": 1, "bytes": 96, "files": [file], "same_as": None,
    }  # fmt: skip
    assert rows["model.tied"]["same_as"] == "model.weight"
    assert rows["step"] == {
        "name": "step", "kind": "value", "type": "int", "text": "100", "files": [file],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("glob", "names"),
    [
        ("*weight", ["model.weight"]),
        ("model.w*", ["model.weight"]),
        ("config", ["config.betas", "config.raw", "config.loss"]),
        ("step", ["step"]),
    ],
)
def test_show_narrows_to_a_glob_or_a_container(checkpoint, glob, names):
    shown = json.loads(ok("show", checkpoint, glob, "--json"))
    assert [row["name"] for row in shown["names"]] == names
    assert shown["tensors"] == 7  # totals are the checkpoint's


def test_show_of_no_matching_name_is_an_error(checkpoint):
    assert "no name" in failed(2, "show", checkpoint, "nothing.*")


def test_a_bracketed_name_is_found_as_it_is_written(tmp_path):
    shardkeep.save({"a.b": 1, "a": {"b": 2}}, tmp_path / "c")
    shown = json.loads(ok("show", tmp_path / "c", '["a.b"]', "--json"))
    assert [row["text"] for row in shown["names"]] == ["1"]


def test_show_counts_the_files_of_a_sharded_tensor(tmp_path):
    def save(ranks):
        local = ShardedArray.from_local(np.full((2, 3), ranks.rank), (2 * ranks.rank, 0), (4, 3))
        shardkeep.save({"w": local}, tmp_path / "c", process_group=ranks)

    ThreadRanks(2).run(save)
    shown = json.loads(ok("show", tmp_path / "c", "--json"))
    assert shown["ranks"] == 2
    assert shown["names"][0]["chunks"] == 2
    assert [name[-20:] for name in shown["names"][0]["files"]] == [
        "r00000-0.safetensors",
        "r00001-0.safetensors",
    ]
    assert re.search(r"^w +4x3 +int64 +2 +96 B +2$", ok("show", tmp_path / "c"), re.M)


class Custom:
    """Can only be pickled."""


def test_pickles_are_named_and_never_run(tmp_path):
    shardkeep.save({"x": Custom()}, tmp_path / "c", allow_pickle=True)
    shown = json.loads(ok("show", tmp_path / "c", "--json"))
    assert shown["requires"] == ["pickle"]
    assert (shown["names"][0]["type"], shown["names"][0]["text"]) == ("pickle", "<pickle>")
    assert re.search(r"^requires +pickle$", ok("show", tmp_path / "c"), re.M)
    assert "pickle" in failed(2, "cat", tmp_path / "c", "x")


def test_show_of_damaged_values_shows_the_rest_and_says_so(tmp_path):
    shardkeep.save({"w": WEIGHT, "step": 1}, tmp_path / "c")
    with shardkeep.open(tmp_path / "c") as opened:
        place = opened.metadata.storage_data[MetadataIndex("step")]
    flip_bit(tmp_path / "c" / place.file, place.offset + place.nbytes - 1)
    done = run("show", tmp_path / "c")
    assert done.exit_code == 1
    assert re.search(r"^w +3x4 ", done.stdout, re.M)
    assert re.search(r"^step +\? +<damaged> ", done.stdout, re.M)
    assert done.stderr.startswith("error: ")


def test_large_values_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkeep.cli.contents.MAX_VALUES", 1000)
    shardkeep.save({"x": "a" * 2000, "y": 1}, tmp_path / "c")
    assert ok("show", tmp_path / "c").count("<not read: among 2.0 KiB of values>") == 2


# --- verify


def test_verify_says_ok_in_one_line(checkpoint):
    with shardkeep.open(checkpoint) as opened:
        digest = opened.digest
    text = ok("verify", checkpoint, "--expect", digest)
    assert re.fullmatch(rf"ok: 3 files, 4\.\d MiB, {digest}, \d+\.\d\d s\n", text)
    report = json.loads(ok("verify", checkpoint, "--json"))
    assert list(report) == ["path", "ok", "digest", "files", "bytes", "seconds", "problems"]
    assert report["ok"] is True
    assert report["digest"] == digest


def test_verify_lists_file_block_and_names(damageable):
    path, flip = damageable
    flip(512)
    done = run("verify", path)
    assert done.exit_code == 1
    assert done.stdout.startswith("DAMAGED: ")
    assert re.search(r"r00000-0\.safetensors: block 16 ", done.stdout)
    assert "holds: big" in done.stdout
    done = run("verify", path, "--json")
    assert done.exit_code == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert (problem["block"], problem["names"]) == (16, ["big"])


def test_verify_against_another_digest_fails(checkpoint):
    done = run("verify", checkpoint, "--expect", "xxh3-128:" + "0" * 32)
    assert done.exit_code == 1
    assert "pinned" in done.stdout


def test_a_damaged_record_is_damage(damageable):
    path, _ = damageable
    flip_bit(path / "checkpoint.json", 40)
    assert run("verify", path).exit_code == 1
    assert "digest" in failed(1, "show", path)


def test_where_no_checkpoint_of_ours_is_the_code_is_2(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".metadata").touch()
    for command in (["verify"], ["show"], ["cat", "name"]):
        name, *rest = command
        message = failed(2, name, tmp_path / "nothing", *rest)
        assert message.startswith("error: no checkpoint at ")
        message = failed(2, name, tmp_path / "theirs", *rest)
        assert "not of Shardkeep, and not all of it: there is .metadata" in message
    assert failed(2, "gc", tmp_path / "nothing").startswith("error: ")


# --- cat


@pytest.mark.parametrize("index", ["", "1", "-1", "0:2", "1:,::2", "...,-1", "2,3", "::-1", "[0]"])
def test_cat_selects_as_numpy_does(checkpoint, index):
    expected = eval(f"WEIGHT[{index.strip('[]') or '...'}]", {"WEIGHT": WEIGHT})
    shown = json.loads(ok("cat", checkpoint, "model.weight", *([index] if index else []), "--json"))
    assert shown == {
        "name": "model.weight", "kind": "tensor", "dtype": "float64",
        "shape": list(expected.shape), "value": expected.tolist(),
    }  # fmt: skip


@pytest.mark.parametrize("index", ["100:900:7,3:", "::-3,::500", "5:,::2", ":,0", "1000:1001"])
def test_cat_reads_steps_in_any_dimension(checkpoint, index):
    expected = eval(f"BIG[{index}]", {"BIG": BIG})
    assert json.loads(ok("cat", checkpoint, "big", index, "--json"))["value"] == expected.tolist()


@pytest.mark.parametrize("index", ["", "3:", "::-2,5:", "7", ":4", ":,::200", "500:507", "..., 0"])
def test_of_a_large_tensor_numpy_s_corners_are_printed(checkpoint, index):
    part = eval(f"BIG[{index or '...'}]", {"BIG": BIG})
    expected = np.array2string(part, separator=", ", prefix="array(", max_line_width=100)
    text = ok("cat", checkpoint, "big", *([index] if index else []))
    assert text == f"array({expected}, shape={part.shape}, dtype=float32)\n"


def test_only_what_is_shown_is_read(damageable):
    path, flip = damageable
    flip(512)
    ok("cat", path, "big")
    ok("cat", path, "big", "0:10", "--json")
    ok("cat", path, "big", "::1023", "--json")
    assert "big" in failed(1, "cat", path, "big", "500:520", "--json")
    flip(1)
    assert failed(1, "cat", path, "big").startswith("error: ")


def test_every_dtype_prints_as_numbers(tmp_path):
    state = {}
    for name, dtype in TABLE.items():
        if dtype.numpy:
            first = 2 if name == "float8_e8m0fnu" else 0  # that one has no zero
            state[name] = np.array([first, 1, 1], np.int8).astype(dtype.to_numpy())
    shardkeep.save(state, tmp_path / "c")
    for name, array in state.items():
        shown = json.loads(ok("cat", tmp_path / "c", name, "--json"))
        kind = complex if TABLE[name].kind == "complex" else float
        numbers = [complex(*x) if isinstance(x, list) else x for x in shown["value"]]
        assert numbers == [kind(x) for x in array], name
        assert f"dtype={name})" in ok("cat", tmp_path / "c", name)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_half_complex_prints_as_numbers(tmp_path):
    torch = pytest.importorskip("torch")
    shardkeep.save({"x": torch.tensor([[1 + 2j, 0.5j]], dtype=torch.complex32)}, tmp_path / "c")
    shown = json.loads(ok("cat", tmp_path / "c", "x", "--json"))
    assert shown["value"] == [[[1.0, 2.0], [0.0, 0.5]]]
    assert "1.+2.j" in ok("cat", tmp_path / "c", "x")


def test_cat_prints_values(checkpoint):
    assert ok("cat", checkpoint, "seed") == f"{2**200}\n"
    assert len(ok("cat", checkpoint, "long")) > 5000
    assert ok("cat", checkpoint, "config.betas") == "(0.9, 0.95)\n"
    assert json.loads(ok("cat", checkpoint, "config.raw", "--json"))["value"] == "AAE="
    assert json.loads(ok("cat", checkpoint, "seed", "--json"))["value"] == 2**200


def test_json_has_no_nan_of_its_own(checkpoint):
    shown = json.loads(ok("cat", checkpoint, "model.half", "--json"))
    assert shown["value"] == [0.5, -1.25, "Infinity"]
    shown = json.loads(ok("cat", checkpoint, "complex", "--json"))
    assert shown["value"] == [[1.0, 2.0], ["NaN", 0.0]]
    assert json.loads(ok("cat", checkpoint, "config.loss", "--json"))["value"] == "NaN"


def test_numpy_values_are_numbers_in_json(tmp_path):
    state = {
        "half": ml_dtypes.bfloat16(1.5),
        "single": np.float32(0.25),
        "nested": [np.int8(3), {np.float64("nan")}],
        "when": np.datetime64("2026-01-02"),
    }
    shardkeep.save(state, tmp_path / "c")
    found = [json.loads(ok("cat", tmp_path / "c", name, "--json"))["value"] for name in state]
    assert found == [1.5, 0.25, [3, ["NaN"]], "2026-01-02"]


def test_cat_of_what_is_not_there_says_what_to_do(checkpoint):
    assert "'model' selects 5 names" in failed(2, "cat", checkpoint, "model")
    assert "shardkeep show lists" in failed(2, "cat", checkpoint, "modle")
    assert "plain value" in failed(2, "cat", checkpoint, "step", "0")
    assert "out of range" in failed(2, "cat", checkpoint, "model.weight", "3")
    assert "3 indices" in failed(2, "cat", checkpoint, "model.weight", "0,0,0")
    assert "one ..." in failed(2, "cat", checkpoint, "model.weight", "...,...")


@pytest.mark.parametrize(
    "text",
    ["x", "1.5", "0:1:0", "1:2:3:4", "1,,2", "(1)", "__import__('os')", "0x10", "1e3", "9" * 30],
)
def test_a_slice_is_parsed_and_never_evaluated(checkpoint, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        parse_index(text)
    assert failed(2, "cat", checkpoint, "model.weight", text).startswith("error: ")


# --- gc


@pytest.fixture
def littered(tmp_path):
    path = tmp_path / "littered"
    shardkeep.save({"w": WEIGHT}, path)
    (path / "data" / f"{DEAD_SAVE}-r00000-0.safetensors").write_bytes(bytes(2048))
    return path


def test_gc_removes_what_a_dead_save_left(littered):
    name = f"data/{DEAD_SAVE}-r00000-0.safetensors"
    assert f"would remove {name}\n" in ok("gc", littered, "--dry-run")
    assert (littered / name).exists()
    assert json.loads(ok("gc", littered, "--json")) == {
        "path": str(littered), "dry_run": False, "removed": [name], "bytes": 2048, "live": [],
    }  # fmt: skip
    assert not (littered / name).exists()
    assert ok("gc", littered) == f"{littered}: 0 files removed, 0 B\n"
    ok("verify", littered)


def test_gc_leaves_a_live_save_alone_until_told_otherwise(littered):
    lease = littered / f"checkpoint.json.{DEAD_SAVE}.tmp"
    lease.touch()
    assert f"left alone: save {DEAD_SAVE}" in ok("gc", littered, "--older-than", "30m")
    assert lease.exists()
    assert len(json.loads(ok("gc", littered, "--older-than", "0", "--json"))["removed"]) == 2
    assert not lease.exists()


def test_a_time_that_is_none_is_wrong_usage(littered):
    for text in ("3x", "-1", "h", "nan", ""):
        assert "is not a time" in failed(2, "gc", littered, f"--older-than={text}")


def test_texts():
    assert [parse_duration(t) for t in ("0", "1h", "30m", "45 s", "2d")] == [
        0, 3600, 1800, 45, 172800,
    ]  # fmt: skip
    assert [human_size(n) for n in (0, 1023, 1024, 5 << 50)] == [
        "0 B", "1023 B", "1.0 KiB", "5120.0 TiB",
    ]  # fmt: skip
    assert printable("a\nb\u202e") == "a\\nb\\u202e"


# --- the command itself


def test_help_and_version():
    assert ok("--version") == f"shardkeep {shardkeep.__version__}\n"
    text = ok("--help")
    for word in ("show", "verify", "cat", "gc", "Examples:", "Exit codes:"):
        assert word in text
    for command in ("show", "verify", "cat", "gc"):
        assert "Usage:" in ok(command, "--help")
    assert failed(2, "shw").startswith("Usage:")


def test_a_traceback_only_when_asked_for(tmp_path, monkeypatch):
    assert "Traceback" in run("--debug", "show", tmp_path / "nothing").stderr
    monkeypatch.setenv("SHARDKEEP_DEBUG", "1")
    done = run("show", tmp_path / "nothing")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr


def test_control_c_ends_quietly(checkpoint, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("shardkeep.inspecting.verify", interrupted)
    done = run("verify", checkpoint)
    assert (done.exit_code, done.output.strip()) == (130, "")


def test_a_closed_pipe_ends_quietly(tmp_path):
    shardkeep.save({f"{'n' * 100}{i}": 0 for i in range(2000)}, tmp_path / "c")
    read, write = os.pipe()
    os.close(read)
    done = process("show", tmp_path / "c", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def imported(*args):
    done = process(*args, python=("-X", "importtime"), capture_output=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


def test_no_framework_is_imported(tmp_path):
    torch = pytest.importorskip("torch")
    state = {"w": torch.ones(3).bfloat16(), "size": torch.Size([1, 2]), "dtype": torch.float16}
    shardkeep.save(state, tmp_path / "c")
    assert not {"torch", "jax", "rich", "numpy"} & imported("--help")
    for args in (["show"], ["verify"], ["cat", "w"], ["cat", "size"], ["gc"]):
        command, *rest = args
        found = imported(command, tmp_path / "c", *rest)
        assert "click" in found
        assert not {"torch", "jax", "rich"} & found
    assert ok("cat", tmp_path / "c", "dtype") == "'float16'\n"


def test_on_a_terminal_rich_draws_the_table(checkpoint):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "shardkeep.cli", "show", checkpoint, "model"],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm", "COLUMNS": "120"},
        stdout=theirs,
    ) as shown:
        os.close(theirs)
        text = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            text += piece
    os.close(ours)
    assert shown.returncode == 0
    assert b"\x1b[" in text
    assert re.search(rb"model\.weight +3x4 +float64", text)
