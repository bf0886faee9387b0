# SPDX-License-Identifier: Apache-2.0
"""What `demo_training.py` starts: imports torch once, then forks the ranks of each training.

For each line on stdin, a JSON object, it runs `train_fsdp2.py` on new processes. It answers with a
list of their process ids, and when all have ended with a list of their exit codes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import train_fsdp2
from torch.distributed.tensor import DTensor

PRELOAD = (
    "torch._dynamo",
    "shardkeep.adapters.torch_dtensors",
    "shardkeep.adapters.torch_groups",
    "shardkeep.functions",
)
"""What a rank would import on first use."""

LOCALHOST = "127.0.0.1"


class Witness(train_fsdp2.Job):
    """Tells what is in memory before each save and after each load; Shardkeep has no part in it."""

    def save(self, checkpoint: Path) -> None:
        self.tell("saving")
        super().save(checkpoint)

    def load(self, checkpoint: Path) -> None:
        super().load(checkpoint)
        self.tell("loaded")

    def tell(self, event: str) -> None:
        tensors, shards = {}, {}
        for name, tensor in leaves(self.app().state_dict()):
            whole = tensor
            if isinstance(tensor, DTensor):
                whole = tensor.full_tensor()
                shards[name] = [repr(tensor.placements[0]), list(tensor.to_local().shape)]
            tensors[name] = digest(whole)
        report = {"event": event, "step": self.step, "tensors": tensors, "shards": shards}
        print(json.dumps(report | {"rng": digest(torch.get_rng_state())}))


def leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            yield prefix + key, value


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def run_rank(rank: int, world_size: int, port: int, logs: Path, arguments: list[str]) -> None:
    for fd, kind in ((1, "out"), (2, "err")):
        with (logs / f"rank-{rank}.{kind}").open("w") as log:
            os.dup2(log.fileno(), fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # As torchrun does it, which also is the host of the store for its ranks.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR=LOCALHOST,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    sys.argv[1:] = arguments
    train_fsdp2.main(Witness)


def host_store(port: int) -> None:
    """Say at which port the ranks find each other, and stay there."""
    listener: Any = dist  # it exports TCPStore, but not to type checkers
    store = listener.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    os.write(port, str(store.port).encode())
    os.close(port)
    threading.Event().wait()


def fork(work: Callable[..., None], *arguments: Any) -> int:
    """The process id of a new process that does some work."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup(1)  # stays open to the end, by which the demo knows that everybody has gone
        threading.Thread(target=end_with_the_demo, daemon=True).start()
        work(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def end_with_the_demo() -> NoReturn:
    while os.read(0, 1):
        pass
    os._exit(1)


def train(world_size: int, logs: str, arguments: list[str]) -> None:
    reading, writing = os.pipe()
    store = fork(host_store, writing)
    os.close(writing)
    with open(reading, "rb") as told:
        port = int(told.read())
    pids = [
        fork(run_rank, rank, world_size, port, Path(logs), arguments) for rank in range(world_size)
    ]
    print(json.dumps(pids), flush=True)
    codes = dict.fromkeys([*pids, store], 0)
    running = set(pids)
    while running:
        pid, status = os.wait()
        running.discard(pid)
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:  # the others would wait for it
            kill_all(running)
    kill_all({store})
    with contextlib.suppress(ChildProcessError):  # it may have ended before the others
        os.waitpid(store, 0)
    print(json.dumps([codes[pid] for pid in pids]), flush=True)


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for name in PRELOAD:
        importlib.import_module(name)
    for line in sys.stdin:
        train(**json.loads(line))
