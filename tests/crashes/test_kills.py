"""Real kills and a soak: a few here, many with `--all` or `python -m tests.crashes`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from machine import scratch_folder
from soak import soak

ROOT = Path(__file__).parents[2]


def killed(count, seed):
    """In a process of its own: one that forks has no threads."""
    command = [sys.executable, "-m", "tests.crashes", "kill", f"--count={count}", f"--seed={seed}"]
    paths = [str(ROOT / "src"), *sys.path]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) kills  (\d+) in_the_middle", done.stdout)
    assert int(found[1]) == count
    return int(found[2])


def test_killed(tmp_path):
    assert killed(16, seed=os.getpid()) > 0


@pytest.mark.slow
def test_killed_a_thousand_times():
    assert killed(1000, seed=1) > 300


def test_soak():
    with scratch_folder() as folder:
        assert soak(folder, os.getpid(), crashes=6)["crash"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_soak_for_long(seed):
    with scratch_folder() as folder:
        soak(folder, seed, seconds=30)
