"""The demonstrations do what they say; they check themselves and exit with 1 if not."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardkeep

EXAMPLES = Path(__file__).parent.parent / "examples"
SOURCE = Path(shardkeep.__file__).parent.parent
MARK = "SHARDKEEP_TEST_DEMO"


def started(folder, *command, path=()):
    """A Python process that puts all its temporary files into `folder`, like all it starts."""
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, [*path, SOURCE])),
        "TMPDIR": str(folder),
        MARK: str(folder),
    }
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may have had it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finished(process, timeout=240):
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    print(out, err, sep="\n")
    return process.returncode, out, err


def nothing_is_left(folder):
    """No file in the folder, and no process of those that were told to use it."""
    mark = f"{MARK}={folder}".encode()

    def is_marked(path):
        try:
            return mark in path.read_bytes().split(b"\0")
        except OSError:
            return False

    left = [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if is_marked(path)]
    return not left and not list(folder.iterdir())


def test_the_demo_without_torch_keeps_every_promise_and_cleans_up(tmp_path):
    code, out, _ = finished(started(tmp_path, EXAMPLES / "demo.py", "--small"))
    assert code == 0
    assert "killed by SIGKILL" in out
    assert "\n8. " in out
    assert out.rstrip().splitlines()[-1].startswith("All as promised")
    assert nothing_is_left(tmp_path)


def test_the_demo_trains_is_killed_and_goes_on(tmp_path):
    pytest.importorskip("torch")
    code, out, err = finished(started(tmp_path, EXAMPLES / "demo_training.py"))
    assert (code, err) == (0, "")
    assert "all 4 killed by SIGKILL in the middle of saving step-000006" in out
    assert "opening it: CheckpointNotFoundError" in out
    assert "every loss is bit-equal" in out
    assert float(re.search(r"no loss differs by more than (\S+)", out)[1]) <= 1e-5
    assert "model.blocks.0.down.weight[60:70] is bit-equal" in out
    assert "\n7. " in out
    assert out.rstrip().splitlines()[-1].startswith("All as promised")
    assert nothing_is_left(tmp_path)


def interrupted(process, number):
    process.send_signal(number)
    code, out, err = finished(process)
    assert code == 128 + number
    assert "Traceback" not in err
    assert "All as promised" not in out


def test_the_demo_cleans_up_when_it_is_interrupted_at_work(tmp_path):
    pytest.importorskip("torch")
    process = started(tmp_path, EXAMPLES / "demo_training.py")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/run/step-*")):  # the ranks are there, and save
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    interrupted(process, signal.SIGINT)
    assert nothing_is_left(tmp_path)


def test_the_demo_cleans_up_when_it_is_ended_at_the_start(tmp_path):
    process = started(tmp_path, EXAMPLES / "demo_training.py")
    assert any(line.startswith("1. ") for line in process.stdout)
    interrupted(process, signal.SIGTERM)
    assert nothing_is_left(tmp_path)


BROKEN_LOAD = """
from shardkeep.checkpointer import Checkpointer

right = Checkpointer.load

def load(self, state, *args, **options):
    result = right(self, state, *args, **options)
    state.state_dict()["model"]["head.weight"].detach().mul_(1 + 1e-6)
    return result

Checkpointer.load = load
"""

BROKEN_SAVE = """
from shardkeep.checkpointer import Checkpointer

right = Checkpointer.save

def save(self, state, *args, **options):
    state.extra["step"] += 1
    return right(self, state, *args, **options)

Checkpointer.save = save
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "complaint"),
    [
        (BROKEN_LOAD, "rank 0 has another state than was saved: ['model.head.weight']"),
        (BROKEN_SAVE, "step-000003 is of step 4"),
    ],
)
def test_the_demo_fails_if_a_promise_is_broken(sabotage, complaint, tmp_path):
    pytest.importorskip("torch")
    work, path = tmp_path / "work", tmp_path / "path"
    work.mkdir()
    path.mkdir()
    (path / "sitecustomize.py").write_text(sabotage)  # every Python process runs it first
    demo = started(work, EXAMPLES / "demo_training.py", path=[path])
    code, out, err = finished(demo)
    assert code == 1
    assert f"NOT AS PROMISED: {complaint}" in err
    assert "All as promised" not in out
    assert nothing_is_left(work)


@pytest.mark.slow
def test_the_training_runs_under_torchrun(tmp_path):
    pytest.importorskip("torch")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += [EXAMPLES / "train_fsdp2.py", tmp_path / "run", "--save-every", 2, "--steps"]
    code, out, _ = finished(started(tmp_path, *command, 3))
    assert code == 0
    assert "step 3 loss" in out
    code, out, _ = finished(started(tmp_path, *command, 4))
    assert code == 0
    assert f"resumed {tmp_path / 'run' / 'step-000002'}\nstep 3 loss" in out
    assert (tmp_path / "run" / "step-000004" / "checkpoint.json").exists()
