"""`shardkeep convert` and `shardkeep diff`: what they print, and how they end."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import shardkeep
from shardkeep.cli.commands import cli
from shardkeep.cli.conversions import parse_size
from shardkeep.converting.target import TARGETS
from shardkeep.errors import UnsafeCheckpointError


def run(code, *args):
    done = CliRunner().invoke(cli, [str(arg) for arg in args])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def source(tmp_path):
    state = {"model": {"q": np.ones((4, 2)), "k": np.zeros((4, 2)), "n": np.ones(3, "f4")}}
    shardkeep.save({**state, "step": 5}, tmp_path / "a", no_dist=True)
    return tmp_path / "a"


def test_convert_says_what_it_did(source, tmp_path):
    done = run(0, "convert", source, tmp_path / "b", "--cast", "f32=bf16")
    assert "b: 3 tensors, 1 value, 134 B in 3 files as native" in done.stdout
    done = run(0, "convert", source, tmp_path / "c", "--json", "--select", "model")
    found = json.loads(done.stdout)
    assert [row["name"] for row in found["names"]] == ["model.q", "model.k", "model.n"]
    assert found["digest"] == shardkeep.open(tmp_path / "c").digest


def test_a_dry_run_is_a_table(source, tmp_path):
    done = run(
        0,
        *("convert", source, tmp_path / "b", "--dry-run", "--rename", r"^model\.="),
        *("--rule", "fuse q, k = qk @ 0", "--cast", "f64=f32"),
    )
    lines = [line.split() for line in done.stdout.splitlines() if line]
    assert lines[0] == ["from", "to", "shape", "dtype", "size"]
    table = [" ".join(line) for line in lines[1:]]
    assert "model.q, model.k qk 8x2 float64 -> float32 64 B" in table
    assert "step step value" in table
    assert "would be written as native" in table[-1]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_names_may_come_from_a_file(source, tmp_path, ending):
    file = tmp_path / f"names.{ending}"
    names = {"model.q": "x.y", "step": "at"}
    lines = [f'"{old}" = "{new}"' for old, new in names.items()]
    file.write_text(json.dumps(names) if ending == "json" else "\n".join(lines))
    run(0, "convert", source, tmp_path / "b", "--mapping", file)
    assert sorted(shardkeep.open(tmp_path / "b")) == ["at", "model.k", "model.n", "x.y"]
    file.write_text("{" if ending == "json" else "=")
    assert "names." in run(2, "convert", source, tmp_path / "c", "--mapping", file).stderr


def test_mistakes_are_listed(source, tmp_path):
    done = run(
        2,
        *("convert", source, tmp_path / "b", "--select", "x*", "--exclude", "y*", "--rule"),
        "stack e.# = e @ 0",
    )
    for text in ("select x*", "exclude y*", "stack e.# = e @ 0", "Nothing was written"):
        assert text in done.stderr
    assert "is not a rule" in run(2, "convert", source, tmp_path / "b", "--rule", "x").stderr
    assert "no checkpoint" in run(2, "convert", tmp_path / "no", tmp_path / "b").stderr
    done = run(2, "convert", source, tmp_path / "b", "--max-shard-size", "huge")
    assert "is not a size" in done.stderr
    assert not (tmp_path / "b").exists()


def test_diff_ends_as_diff_does(source, tmp_path):
    run(0, "convert", source, tmp_path / "b")
    assert "the same: 4 names" in run(0, "diff", source, tmp_path / "b").stdout
    state = shardkeep.open(source).state_dict()
    state["model"]["q"][0, 0] = 3
    state["step"] = 6
    shardkeep.save(state, tmp_path / "c", no_dist=True)
    done = run(1, "diff", source, tmp_path / "c")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line]
    assert lines[0] == "name differs in a b changed largest"
    assert "model.q values 4x2 float64 4x2 float64 1 of 8 (12.50%) 2" in lines
    assert "step values 5 6" in lines
    assert "2 of 4 names differ" in lines[-1]
    found = json.loads(run(1, "diff", source, tmp_path / "c", "--json").stdout)
    assert found["differences"][0]["changed"] == 1
    assert run(1, "diff", source, tmp_path / "c", "step").exit_code == 1
    assert run(0, "diff", source, tmp_path / "c", "model.n").exit_code == 0
    run(0, "diff", source, tmp_path / "c", "--atol", "2")
    assert "no checkpoint" in run(2, "diff", source, tmp_path / "no").stderr
    assert "matches" in run(2, "diff", source, tmp_path / "c", "zz").stderr
    (data,) = (tmp_path / "c/data").glob("*-r*.safetensors")
    data.write_bytes(data.read_bytes()[:-4096])
    run(2, "diff", source, tmp_path / "c")


def test_the_formats_are_those_there_are():
    (to,) = [param for param in cli.commands["convert"].params if param.name == "to"]
    assert list(to.type.choices) == list(TARGETS)


def test_sizes():
    assert parse_size("5GB") == 5 * 10**9
    assert parse_size("1.5 KiB") == 1536
    with pytest.raises(ValueError, match="not a size"):
        parse_size("5 apples")


# --- what is refused


@pytest.mark.parametrize("text", ["[1]", '{"a": 3}', "{"])
def test_a_file_of_names_that_is_none(source, tmp_path, text):
    (tmp_path / "names.json").write_text(text)
    done = run(2, "convert", source, tmp_path / "b", "--mapping", tmp_path / "names.json")
    assert "names.json" in done.stderr
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("ending", "text"), [("json", '{"a":' * 99_999), ("toml", "a = " + "[" * 99_999)]
)
def test_a_file_of_names_that_is_too_deep(source, tmp_path, ending, text):
    file = tmp_path / f"names.{ending}"
    file.write_text(text)
    done = run(2, "convert", source, tmp_path / "b", "--mapping", file)
    assert f"names.{ending} is too deeply nested" in done.stderr


def test_options_that_are_too_deep(source, tmp_path):
    args = ("--to", "hf", "--option", "values=" + "[" * 99_999)
    assert (
        "--option values is too deeply nested"
        in run(2, "convert", source, tmp_path / "b", *args).stderr
    )


@pytest.mark.parametrize("option", ["--memory-budget", "--max-shard-size"])
@pytest.mark.parametrize("size", ["9" * 400, "9" * 307 + "TB", "8388608TiB"])
def test_sizes_that_nothing_has(source, tmp_path, option, size):
    done = run(2, "convert", source, tmp_path / "b", option, size)
    assert "is more than any file can have" in done.stderr


def test_names_that_are_no_text(source, tmp_path):
    (tmp_path / "names.json").write_text('{"step": "\\ud800"}')
    args = ("convert", source, tmp_path / "b", "--mapping", tmp_path / "names.json")
    for to in TARGETS:
        for more in ((), ("--dry-run",)):
            assert "is not valid Unicode" in run(2, *args, "--to", to, *more).stderr


def test_options_of_a_format(source, tmp_path):
    """JSON where that can be read, else text; what the format refuses is said in one line."""
    names = ("--exclude", "step", "--to", "mindspore")
    args = ("convert", source, tmp_path / "b.ckpt", *names, "--option")
    done = run(2, *args, "crc")
    assert "'crc' is not NAME=VALUE" in done.stderr
    done = run(2, *args, "format=mindir")
    assert "format must be" in done.stderr
    run(0, *args, "crc=true")
    assert (tmp_path / "b.ckpt").read_bytes()[-17:-10] == b"crc_num"
    for stem in ("2024", "true", '"2025"'):
        args = ("--to", "hf", "--exclude", "step", "--option", f"stem={stem}")
        run(0, "convert", source, tmp_path / "hf", *args, "--overwrite")
        assert (tmp_path / "hf" / f"{stem.strip(chr(34))}.safetensors").is_file()


def test_what_a_format_does_not_hold_is_named(source, tmp_path):
    shardkeep.save({"x": np.zeros(2, "c8")}, tmp_path / "c", no_dist=True)
    done = run(2, "convert", tmp_path / "c", tmp_path / "b.ckpt", "--to", "mindspore")
    assert "x has elements of type complex64" in done.stderr


# --- checkpoints of others


def test_errors_advise_in_the_words_of_the_shell(source, tmp_path):
    run(0, "convert", source, tmp_path / "b")
    assert "or pass --overwrite" in run(2, "convert", source, tmp_path / "b").stderr
    told = run(2, "convert", source, tmp_path / "c", "--to", "hf").stderr
    assert "pass --option values=drop" in told
    run(0, "convert", source, tmp_path / "c", "--to", "hf", "--option", "values=drop")


def test_what_is_said_in_the_words_of_the_shell_keeps_its_notes_and_its_traceback(
    source, tmp_path, monkeypatch
):
    def fail(*args, **options):
        error = UnsafeCheckpointError("a pickle; pass allow_pickle=True")
        error.add_note("the step is 5")
        raise error

    monkeypatch.setattr("shardkeep.converting.driver.convert", fail)
    told = run(2, "convert", source, tmp_path / "b").stderr
    assert told == "error: a pickle; pass --allow-pickle\nthe step is 5\n"
    args = ["--debug", "convert", str(source), str(tmp_path / "b")]
    told = CliRunner().invoke(cli, args).stderr
    assert "in fail" in told
    assert "UnsafeCheckpointError: a pickle; pass --allow-pickle" in told


def test_show_of_another_systems_file(tmp_path):
    torch = pytest.importorskip("torch")
    tied = torch.arange(6.0).reshape(2, 3)
    torch.save({"w": tied, "v": tied, "step": 7}, tmp_path / "a.pt")
    found = json.loads(run(0, "show", tmp_path / "a.pt", "--json").stdout)
    assert found["format"] == {"name": "torch.save"}
    done = run(0, "show", tmp_path / "a.pt", "w").stdout
    assert "2x3" in done
    listed = run(0, "show", tmp_path / "a.pt").stdout
    assert "save id" not in listed
    assert "2 tensors, 1 value" in listed
    assert found["file_bytes"] == (tmp_path / "a.pt").stat().st_size
