"""The examples run, and one training goes through all of them."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples/torch"
CHAIN = [
    ("ddp", 2),
    ("fsdp2", 4),
    ("hsdp", 4),
    ("tensor_parallel", 2),
    ("fsdp2_tensor_parallel", 4),
    ("fsdp1", 2),
    ("pipeline", 2),
]
FEW = [("ddp", 2), ("tensor_parallel", 2), ("pipeline", 2)]
APART = ["experts", "training_loop"]


def run_example(rank, name, world, port, arguments):
    """As torchrun would; without its seconds."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def go(processes, name, world, *arguments):
    """The loss of each step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outcomes = processes.outcomes(world, run_example, name, world, port, arguments, init=False)
    assert all(one.ok for one in outcomes), "\n".join(f"{one.error}\n{one.log}" for one in outcomes)
    return losses_of(outcomes[0].log)


def losses_of(text):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


def test_every_example_is_run():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*APART, *(name for name, _ in CHAIN)}


@pytest.mark.parametrize("chain", [FEW, pytest.param(CHAIN, marks=pytest.mark.slow)])
def test_one_training_through_several(processes, tmp_path, chain):
    """Each goes on where the one before it ended; the losses are those of one that did it all."""
    found = {}
    for number, (name, world) in enumerate(chain):
        steps = str(2 * number + 2)
        found |= go(processes, name, world, str(tmp_path / "run"), "--steps", steps)
    last = str(2 * len(chain))
    expected = go(processes, "ddp", 2, str(tmp_path / "alone"), "--steps", last)
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_experts(processes, tmp_path):
    found = go(processes, "experts", 4, str(tmp_path / "run"), "--steps", "2")
    found |= go(processes, "experts", 2, str(tmp_path / "run"), "--steps", "4")
    expected = go(processes, "experts", 1, str(tmp_path / "alone"), "--steps", "4")
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [*CHAIN, ("experts", 4)])
def test_as_documented(name, world, tmp_path):
    """By torchrun, with the line that each example shows."""
    text = (EXAMPLES / f"{name}.py").read_text()
    assert f"torchrun --nproc-per-node {world} examples/torch/{name}.py run" in text
    command = ["torch.distributed.run", "--nproc-per-node", str(world), "--standalone"]
    done = subprocess.run(
        [sys.executable, "-m", *command, EXAMPLES / f"{name}.py", tmp_path / "run"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert len(losses_of(done.stdout)) == 4, done.stdout + done.stderr
