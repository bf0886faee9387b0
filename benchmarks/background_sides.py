"""Ways to save in the background: ours, and torch's in several settings, over one state.

A way is opened as at the start of a program, with nothing kept from earlier saves, and closed
again. What it begins returns when the program may go on; for some ways the state must not change
yet then.
"""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.accelerator import device_tensors, same_bits
from benchmarks.states import Leaf, nested


class State:
    """What is saved, what it is loaded into to be compared, and the optimizer that owns it."""

    def __init__(self, leaves: list[Leaf], device: torch.device) -> None:
        self.device = device
        self.tensors = device_tensors(leaves, device, seed=1)
        self.target = device_tensors(leaves, device, seed=None)
        self.have, self.want = nested(leaves, self.tensors), nested(leaves, self.target)
        found = dict(zip((leaf.path for leaf in leaves), self.tensors, strict=True))
        parameters = {".".join(path[1:]): t for path, t in found.items() if path[0] == "model"}
        self.optimizer = torch.optim.AdamW(list(parameters.values()))
        for path, tensor in found.items():
            if path[0] == "optimizer":
                self.optimizer.state[parameters[path[2]]][path[3]] = tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def negate(self) -> None:
        """Change every element; twice is as before, bit for bit."""
        for tensor in self.tensors:
            tensor.neg_()

    def check(self) -> None:
        """What was loaded must be what is there."""
        for tensor, right in zip(self.target, self.tensors, strict=True):
            assert same_bits(tensor, right), "loaded other bits than were there when it was saved"


class Begun(NamedTuple):
    """A save that goes on."""

    staged: Future[Any] | None
    """Of ways that tell it: a copy of all is somewhere else."""
    done: Future[Any]
    """Committed."""


class Way:
    """One library, used in one way."""

    note = ""
    """How it is called."""
    is_ours = False
    prewarms = False
    """Whether memory can be taken before the first save."""
    may_change = True
    """Whether the state may change when `begin` returns; else only once it is staged."""

    def __init__(self, state: State) -> None:
        self.state = state

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Why it cannot run here."""
        return None

    def open(self) -> None:
        """As at the start of a program."""

    def prewarm(self) -> None:
        """Take memory."""
        raise NotImplementedError

    def begin(self, path: Path) -> Begun:
        """Returns when the program goes on."""
        raise NotImplementedError

    def load(self, path: Path) -> None:
        """Into the target."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of everything."""


class Ours(Way):
    note = 'async_save(snapshot="eager", writer="thread")'
    is_ours = True
    prewarms = True
    writer = "thread"
    snapshot = "eager"

    def open(self) -> None:
        library: Any = import_module("shardkeep")
        self.keeper = library.Checkpointer(no_dist=True, writer=self.writer)

    def prewarm(self) -> None:
        self.keeper.prewarm(self.state.have)

    def begin(self, path: Path) -> Begun:
        handle = self.keeper.async_save(self.state.have, path, snapshot=self.snapshot)
        return Begun(handle.staged, handle)

    def load(self, path: Path) -> None:
        self.keeper.load(self.state.want, path)

    def close(self) -> None:
        self.keeper.close()


class OursProcess(Ours):
    note = 'async_save(snapshot="eager", writer="process")'
    writer = "process"


class OursLazy(Ours):
    note = 'async_save(snapshot="lazy", writer="thread"); an optimizer owns all tensors'
    snapshot = "lazy"
    may_change = False


class OursSync(Ours):
    note = "save, for comparison: the program waits for all of it"
    prewarms = False

    def begin(self, path: Path) -> Begun:
        done: Future[Any] = Future()
        done.set_result(self.keeper.save(self.state.have, path))
        return Begun(None, done)


class Torch(Way):
    note = "async_save as it comes"

    def open(self) -> None:
        # A shared tensor is an open file to torch.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self.stager = self.make_stager(self.state.device.type == "cuda")

    def make_stager(self, on_device: bool) -> Any:
        """What is kept from save to save."""
        return None

    def options(self) -> dict[str, Any]:
        return {} if self.stager is None else {"async_stager": self.stager}

    def begin(self, path: Path) -> Begun:
        from torch.distributed.checkpoint.state_dict_saver import async_save

        answer: Any = async_save(self.state.have, checkpoint_id=str(path), **self.options())
        if hasattr(answer, "upload_completion"):
            return Begun(answer.staging_completion, answer.upload_completion)
        return Begun(None, answer)

    def load(self, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self.state.want, checkpoint_id=str(path))

    def close(self) -> None:
        if self.stager is not None:
            self.stager.let_go()
            self.stager = None


def _stager(pinned: bool, shared: bool, behind: bool, non_blocking: bool) -> Any:
    staging: Any = import_module("torch.distributed.checkpoint.staging")

    class Kept(staging.DefaultStager):  # type: ignore[misc]
        """Some releases of torch close a stager they are given with the first save."""

        def close(self) -> None:
            pass

        def let_go(self) -> None:
            super().close()

    return Kept(staging.StagingOptions(pinned, shared, behind, non_blocking))


def _lacks_stager() -> str | None:
    staging = import_module("torch.distributed.checkpoint.staging")
    return None if hasattr(staging, "DefaultStager") else "this torch has no DefaultStager"


class TorchKept(Torch):
    note = "one DefaultStager for all saves: its memory is kept, pinned where there is a device"

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return _lacks_stager()

    def make_stager(self, on_device: bool) -> Any:
        # Shared on a device: small tensors of one page cannot be pinned one by one.
        return _stager(on_device, on_device, False, on_device)


class TorchCached(Torch):
    note = "one FileSystemWriter(cache_staged_state_dict=True) for all saves"

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None if device.type == "cuda" else "it needs a device"

    def make_stager(self, on_device: bool) -> Any:
        system: Any = import_module("torch.distributed.checkpoint.filesystem")
        return system.FileSystemWriter(".", cache_staged_state_dict=True)

    def options(self) -> dict[str, Any]:
        return {"storage_writer": self.stager}

    def close(self) -> None:
        self.stager = None


class TorchBehind(Torch):
    note = "one DefaultStager with all its options on: staged by a thread, pinned, shared"
    may_change = False

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return _lacks_stager() if device.type == "cuda" else "it needs a device"

    def make_stager(self, on_device: bool) -> Any:
        return _stager(True, True, True, True)


class TorchProcess(Torch):
    note = "AsyncCheckpointerType.PROCESS, one DefaultStager with shared memory"

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        saver = import_module("torch.distributed.checkpoint.state_dict_saver")
        if not hasattr(saver, "AsyncCheckpointerType"):
            return "this torch writes in threads only"
        return _lacks_stager()

    def make_stager(self, on_device: bool) -> Any:
        return _stager(on_device, True, False, on_device)

    def options(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return {**super().options(), "async_checkpointer_type": AsyncCheckpointerType.PROCESS}


WAYS: dict[str, type[Way]] = {
    "shardkeep, save": OursSync,
    "shardkeep, thread": Ours,
    "shardkeep, process": OursProcess,
    "shardkeep, lazy": OursLazy,
    "torch": Torch,
    "torch, kept": TorchKept,
    "torch, cached": TorchCached,
    "torch, behind": TorchBehind,
    "torch, process": TorchProcess,
}
"""In the order of the tables."""


@contextlib.contextmanager
def torch_group() -> Iterator[None]:
    """One rank over gloo: torch saves in the background only with a group."""
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    with tempfile.TemporaryDirectory() as directory:
        place = f"file://{directory}/store"
        dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
