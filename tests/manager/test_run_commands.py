"""`shardkeep ls`, `rm`, `pin` and `gc` in the folder of a run."""

from __future__ import annotations

import json
import os
import time

import pytest
from click.testing import CliRunner
from runs import damage, damage_record, fill, killed_save

import shardkeep
from shardkeep import CheckpointManager
from shardkeep.cli.commands import cli
from shardkeep.stores.local import LocalStore


def run(code, *args):
    done = CliRunner().invoke(cli, [str(a) for a in args])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


@pytest.fixture
def root(tmp_path):
    fill(tmp_path, [9, 10, 100], {10: {"loss": 0.25, "bad": float("nan")}})
    return tmp_path


def listed(root, code=0):
    done = CliRunner().invoke(cli, ["ls", str(root), "--json"])
    assert done.exit_code == code, done.output
    return {step["step"]: step for step in json.loads(done.stdout)["steps"]}


def test_ls(root):
    text = run(0, "ls", root)
    lines = [line.split() for line in text.splitlines() if "whole" in line]
    assert [line[:2] for line in lines] == [["9", "whole"], ["10", "whole"], ["100", "whole"]]
    assert "loss=0.25  bad=nan" in text
    assert "3 steps" in text
    found = listed(root)
    assert list(found) == [9, 10, 100]
    assert found[10]["metrics"] == {"loss": 0.25, "bad": "NaN"}
    assert found[10]["state"] == "whole"
    assert found[10]["bytes"] == CheckpointManager(root).steps()[1].nbytes
    assert found[10]["shared_bytes"] == 0
    assert found[10]["saved_at"] == 1010.0
    assert found[10]["pinned"] is None
    empty = root / "empty"
    empty.mkdir()
    assert run(0, "ls", empty) == f"{empty}: 0 steps, 0 B\n"
    assert "no directory at" in run(2, "ls", root / "nothing")
    assert "not the folder of a run" in run(2, "ls", root / "step-10")
    assert "needs the field" in run(2, "ls", root, "--step-name", "x")


def test_ls_tells_what_is_wrong_and_what_is_shared(root):
    damage_record(root, 9)
    data = next((root / "step-10/data").glob("*r0*"))
    os.link(data, root / "elsewhere")
    data = next((root / "step-100/data").glob("*r0*"))
    os.truncate(data, 100)
    killed_save(root / "step-200")
    text = run(1, "ls", root)
    assert "100 bytes, expected" in text
    found = listed(root, 1)
    assert [found[step]["state"] for step in found] == ["damaged", "whole", "damaged", "unfinished"]
    assert "differs from its own digest" in found[9]["problem"]
    assert found[10]["shared_bytes"] == os.stat(root / "elsewhere").st_size
    assert found[200]["bytes"] == 200


def test_rm(root):
    assert run(0, "rm", root, 9, "--dry-run").startswith("would remove step-9\n")
    assert list(listed(root)) == [9, 10, 100]
    assert run(0, "rm", root, 9).startswith("removed step-9\n")
    assert "no step 9" in run(2, "rm", root, 9)
    assert "no whole step would be left" in run(2, "rm", root, 10, 100)
    assert list(listed(root)) == [10, 100]
    with CheckpointManager(root).wait_for(10, 0):
        assert "step-10 is pinned by process" in run(2, "rm", root, 10)
        done = json.loads(run(0, "rm", root, 10, 100, "--force", "--json"))
    assert done["removed"] == ["step-10", "step-100"]
    assert done["bytes"] > 0
    assert listed(root) == {}
    killed_save(root / "step-200")
    assert "was not committed" in run(2, "rm", root, 200)
    run(0, "rm", root, 200, "--force")
    assert not (root / "step-200").exists()


def test_pin(root):
    assert run(0, "pin", root, 9, "--why", "for the\x1b paper") == f"{root}: step 9 is pinned\n"
    assert "for the" in listed(root)[9]["pinned"]
    assert "\x1b" not in run(0, "ls", root)
    assert "is pinned" in run(2, "rm", root, 9)
    with CheckpointManager(root, keep=1) as manager:
        manager.save(200, {"step": 200})
    assert list(listed(root)) == [9, 200]
    assert json.loads(run(0, "pin", root, 9, "--remove", "--json"))["pinned"] is False
    assert "has no pin" in run(2, "pin", root, 9, "--remove")
    assert "no step 7" in run(2, "pin", root, 7)
    run(0, "rm", root, 9)


def test_a_note_of_any_bytes(root):
    run(0, "pin", root, 9, "--why", os.fsdecode(b"caf\xe9"))
    assert r"(caf\udce9)" in listed(root)[9]["pinned"]


def test_a_number_that_no_step_has(root):
    for args in (["rm", root, 10**18], ["pin", root, 10**18], ["pin", root, 10**18, "--remove"]):
        assert "no step 1000000000000000000" in run(2, *args)
    name = "a" * 190 + "{step}"
    assert "longer than" in run(2, "rm", root, 10**17, "--step-name", name)


def test_gc_of_a_run(root):
    killed_save(root / "step-100", age_s=7200)
    killed_save(root / "step-200", age_s=7200)
    killed_save(root / "step-300", age_s=60)
    os.rename(root / "step-9", root / ".deleted-0123456789abcdef-step-9")
    dry = json.loads(run(0, "gc", root, "--dry-run", "--json"))
    assert ".deleted-0123456789abcdef-step-9" in dry["removed"]
    assert dry["live"] == ["step-300"]
    text = run(0, "gc", root)
    assert "removed step-9\n" in text
    assert "left alone: step-300" in text
    assert sorted(n for n in os.listdir(root) if n != ".shardkeep") == [
        "step-10",
        "step-100",
        "step-300",
    ]
    assert shardkeep.verify(root / "step-100").ok
    assert json.loads(run(0, "gc", root, "--older-than", "30", "--json"))["live"] == []
    assert not (root / "step-300").exists()
    assert run(0, "gc", root / "step-100") == f"{root / 'step-100'}: 0 files removed, 0 B\n"


def test_gc_says_what_it_could_not_remove(root, monkeypatch):
    os.rename(root / "step-9", root / ".deleted-0123456789abcdef-step-9")

    def refuse(store, name):
        raise PermissionError(13, "no", name)

    monkeypatch.setattr(LocalStore, "remove_directory", refuse)
    assert "error: not cleaned: step-9 could not be removed" in run(2, "gc", root)


def test_other_names(tmp_path):
    with CheckpointManager(tmp_path, step_name="{step:05}.ckpt") as manager:
        manager.save(7, {"a": 1}, {"x": 1}, metadata={"by": "hand"})
    assert listed(tmp_path) == {}
    done = run(0, "ls", tmp_path, "--step-name", "{step:05}.ckpt", "--json")
    (found,) = json.loads(done)["steps"]
    assert (found["name"], found["metadata"]) == ("00007.ckpt", {"by": "hand"})
    assert time.time() - found["saved_at"] < 600


def test_show_tells_what_a_step_was_saved_with(root):
    text = run(0, "show", root / "step-10")
    assert "user metrics" in text
    assert "'loss': 0.25" in text
    assert json.loads(run(0, "show", root / "step-10", "--json"))["user"]["step"] == 10


def test_damage_that_only_verify_finds_does_not_show(root):
    damage(root, 10)
    assert listed(root)[10]["state"] == "whole"


def test_ls_of_two_tiers(tmp_path):
    root, fast = tmp_path / "run", tmp_path / "fast"
    with CheckpointManager(root, fast=fast) as manager:
        manager.save(1, {"w": 1})
        manager.save(2, {"w": 2})
    fill(fast, [3])
    text = run(0, "ls", root, "--fast", fast)
    lines = [line.split()[:3] for line in text.splitlines() if "whole" in line]
    assert lines == [
        ["1", "whole,", "durable"],
        ["2", "whole,", "durable"],
        ["2", "whole,", "fast"],
        ["3", "whole,", "fast"],
    ]
    assert text.count("not copied") == 1
    found = json.loads(run(0, "ls", root, "--fast", fast, "--json"))["steps"]
    assert [(step["step"], step["tier"]) for step in found] == [
        (1, "durable"),
        (2, "durable"),
        (2, "fast"),
        (3, "fast"),
    ]
    assert found[1]["save_id"] == found[2]["save_id"]
    assert listed(root)[2]["tier"] is None
