"""The demonstration does what it says; it checks itself and exits with 1 if not."""

import os
import subprocess
import sys
from pathlib import Path

import shardkeep

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"
SOURCE = Path(shardkeep.__file__).parent.parent


def test_the_demo_keeps_every_promise_and_cleans_up(tmp_path):
    done = subprocess.run(
        [sys.executable, DEMO, "--small", "--directory", tmp_path],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed by SIGKILL" in done.stdout
    assert "\n8. " in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("All as promised")
    assert list(tmp_path.iterdir()) == []
