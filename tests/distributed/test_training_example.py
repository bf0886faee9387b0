"""`examples/train_managed.py` as a user runs it: killed, told to stop, started again."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardkeep
from shardkeep import CheckpointManager

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_managed.py"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT / "src"),
    "OMP_NUM_THREADS": "1",
    "RES_OPTIONS": "timeout:1 attempts:1",
}


def start(folder, *args, ranks=1):
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = [*launch, EXAMPLE, folder, *args]
    return subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


# --- in processes that are forked, which is quick


def train(rank, world, folder, steps, told_at, told=0, fast=None):
    """The example's loop, where a rank gets the scheduler's signal in the middle of a step."""
    sys.path.insert(0, str(EXAMPLE.parent))
    import train_managed

    class Job(train_managed.Job):
        def train_step(self):
            loss = super().train_step()
            if self.step == told_at and rank == told:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss

    shardkeep.catch_preemption()
    job = Job(world)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train_managed.train(job, Path(folder), steps, 10, rank == 0, fast)
    return job.step, out.getvalue()


def test_told_to_stop_and_started_again_it_learns_the_same(training, tmp_path):
    whole = losses(training.run(1, train, 1, str(tmp_path / "whole"), 30, None)[0][1])
    ((step, out),) = training.run(1, train, 1, str(tmp_path / "run"), 30, 17)
    assert step == 17
    assert out.endswith("stopped at step 17\n")
    assert numbers(tmp_path / "run")[-1] == 17
    ((step, out),) = training.run(1, train, 1, str(tmp_path / "run"), 30, None)
    assert out.startswith("resumed step 17\n")
    assert losses(out) == {step: whole[step] for step in range(18, 31)}


def test_one_rank_of_two_is_told_to_stop_and_three_go_on(training, tmp_path):
    root, fast = str(tmp_path / "run"), tmp_path / "fast"
    outcomes = training.run(2, train, 2, root, 30, 13, 1, fast)
    assert [step for step, _ in outcomes] == [13, 13]
    assert numbers(root)[-1] == numbers(fast)[-1] == 13
    outcomes = training.run(3, train, 3, root, 15, None, 0, fast)
    assert [step for step, _ in outcomes] == [15] * 3
    assert outcomes[0][1].startswith("resumed step 13\n")


# --- as a user starts it


def losses(text):
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


def ended(process, code=0):
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, out + err
    return out


def until(process, step):
    """What it prints up to a step."""
    seen = ""
    for line in process.stdout:
        seen += line
        if line.startswith(f"step {step} "):
            return seen
    raise AssertionError(seen + process.stderr.read())


def numbers(folder):
    return [step.step for step in CheckpointManager(folder, no_dist=True).steps()]


def interrupted_run(folder, first, second):
    """One that is told to stop, and one that goes on on another number of processes."""
    process = start(folder, "--steps", 5000, "--save-every", 10, ranks=first)
    until(process, 25)
    process.send_signal(signal.SIGTERM)
    # The launcher tells its processes, and says with its exit code that it was told.
    out = ended(process, 0 if first == 1 else 1)
    if first == 1:
        stopped = int(re.search(r"stopped at step (\d+)", out)[1])
        assert numbers(folder)[-1] == stopped
    stopped = numbers(folder)[-1]
    assert stopped >= 25
    out = ended(start(folder, "--steps", stopped + 12, "--save-every", 10, ranks=second))
    assert f"resumed step {stopped}\n" in out
    assert min(losses(out)) == stopped + 1
    return stopped, losses(out)


@pytest.mark.slow
def test_started_from_the_command_line_stopped_and_started_again_it_learns_the_same(tmp_path):
    stopped, after = interrupted_run(tmp_path / "run", 1, 1)
    whole = losses(ended(start(tmp_path / "whole", "--steps", stopped + 12, "--save-every", 1000)))
    assert after == {step: whole[step] for step in after}
    assert len(numbers(tmp_path / "run")) <= 4


@pytest.mark.slow
def test_the_same_over_torchrun(tmp_path):
    stopped, after = interrupted_run(tmp_path / "run", 2, 1)
    whole = losses(ended(start(tmp_path / "whole", "--steps", stopped + 12, "--save-every", 1000)))
    for step, loss in after.items():
        assert float(loss) == pytest.approx(float(whole[step]), rel=1e-4)
    _, after = interrupted_run(tmp_path / "back", 1, 3)
    assert after


@pytest.mark.slow
def test_killed_it_goes_on_from_its_last_save(tmp_path):
    process = start(tmp_path / "run", "--steps", 5000, "--save-every", 5)
    until(process, 23)
    process.kill()
    process.communicate()
    last = numbers(tmp_path / "run")[-1]
    assert last >= 15
    out = ended(start(tmp_path / "run", "--steps", last + 3))
    assert f"resumed step {last}\n" in out
