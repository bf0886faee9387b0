"""States to save: what they look like, and memory that several processes fill and read.

A state is described by a list of leaves and lies in one stretch of memory, so that a copy of it
can be compared with it in one go. The memory is an anonymous file (`memfd`): every side saves from
the same bytes and loads into the same target, without a copy of its own.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

ALIGN = 64
ITEMSIZE = {"bfloat16": 2, "float32": 4}
LAYERS = 24
VECTORS = 36
"""Small tensors of a layer: norms, biases, scales."""

PLAIN = {
    "lr": 8e-5,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "step": 12000,
}
"""Plain values beside the tensors; the sides that store tensors only leave them out."""


@dataclass(frozen=True)
class Leaf:
    """A tensor of a state."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


def training_state(nbytes: int, layers: int = LAYERS) -> list[Leaf]:
    """Parameters in bfloat16 and both Adam moments in float32, of about `nbytes` together.

    The largest tensor is an eighth of it, at most 1 GiB; the smallest has 2 bytes. A layer has 7
    matrices and 36 small tensors.
    """
    largest = min(1 << 30, nbytes // 8)
    vocabulary = max(64, largest // 4 // 256)
    left = max(0.0, nbytes / 10 - vocabulary * 256)
    width = max(8, int((left / (12 * layers)) ** 0.5) // 8 * 8)
    inner = width * 8 // 3
    parameters: list[tuple[tuple[str, ...], tuple[int, ...]]] = [
        (("embed", "weight"), (vocabulary, 256)),
        (("head", "scale"), ()),
    ]
    for layer in range(layers):
        block = ("layers", str(layer))
        for name in ("q", "k", "v", "o"):
            parameters.append(((*block, "attention", name, "weight"), (width, width)))
        matrices = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        for name, matrix in matrices.items():
            parameters.append(((*block, "mlp", name, "weight"), matrix))
        for number in range(VECTORS):
            size = (width, 128, 16, 1)[number % 4]
            parameters.append(((*block, "small", f"v{number}"), (size,)))
    leaves = [Leaf(("model", *path), "bfloat16", shape) for path, shape in parameters]
    for path, shape in parameters:
        name = ".".join(path)
        for moment in ("exp_avg", "exp_avg_sq"):
            leaves.append(Leaf(("optimizer", "state", name, moment), "float32", shape))
        leaves.append(Leaf(("optimizer", "state", name, "step"), "float32", ()))
    return leaves


def many_small(count: int, nbytes: int = 1024) -> list[Leaf]:
    """`count` tensors of `nbytes` each, a hundred to a container."""
    return [
        Leaf(("model", f"layer{at // 100}", f"p{at % 100}"), "float32", (nbytes // 4,))
        for at in range(count)
    ]


def nested(leaves: list[Leaf], values: list[Any], plain: bool = True) -> dict[str, Any]:
    """The tree with a value at each leaf."""
    tree: dict[str, Any] = {}
    for leaf, value in zip(leaves, values, strict=True):
        node = tree
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = value
    if plain:
        tree.setdefault("optimizer", {})["settings"] = dict(PLAIN)
    return tree


def flat(leaves: list[Leaf], values: list[Any]) -> dict[str, Any]:
    return {".".join(leaf.path): value for leaf, value in zip(leaves, values, strict=True)}


class Memory:
    """The bytes of a state, in memory that other processes can map."""

    def __init__(self, leaves: list[Leaf], fd: int | None = None) -> None:
        self.leaves = leaves
        self.offsets: list[int] = []
        end = 0
        for leaf in leaves:
            self.offsets.append(end)
            end += -(-leaf.nbytes // ALIGN) * ALIGN
        self.length = max(end, mmap.PAGESIZE)
        if fd is None:
            fd = os.memfd_create("benchmark-state")
            os.ftruncate(fd, self.length)
        self.fd = fd
        populate = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self.bytes = np.frombuffer(mmap.mmap(fd, self.length, flags=populate), np.uint8)

    @property
    def nbytes(self) -> int:
        """Of all tensors, without what lies between them."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def parts(self) -> Iterator[tuple[Leaf, Any]]:
        """Each leaf with its bytes."""
        for leaf, at in zip(self.leaves, self.offsets, strict=True):
            yield leaf, self.bytes[at : at + leaf.nbytes]

    def fill(self, seed: int = 0) -> None:
        """Random values between 2^-15 and 2^-7 of either sign: like weights, and never zero."""
        random = np.random.Generator(np.random.SFC64(seed))
        chunk = 1 << 24
        for at in range(0, self.length, chunk):
            part = self.bytes[at : at + chunk]
            part[:] = np.frombuffer(random.bytes(len(part)), np.uint8)
        for leaf, part in self.parts():
            bits: Any = part.view(np.uint16 if leaf.dtype == "bfloat16" else np.uint32)
            shift = 0 if leaf.dtype == "bfloat16" else 16
            bits &= (0x83FF << shift) + (1 << shift) - 1
            bits |= 0x3800 << shift

    def scramble(self) -> None:
        """So that nothing right is left from before."""
        self.bytes[:] = 0xA5

    def first_difference(self, other: Memory) -> str | None:
        """The name of a leaf whose bits differ."""
        for (leaf, mine), (_, theirs) in zip(self.parts(), other.parts(), strict=True):
            if not np.array_equal(mine, theirs):
                return ".".join(leaf.path)
        return None


def torch_values(memory: Memory) -> list[Any]:
    """Torch tensors over the memory."""
    import torch

    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    return [
        torch.from_numpy(part).view(dtypes[leaf.dtype]).reshape(leaf.shape)
        for leaf, part in memory.parts()
    ]


def numpy_values(memory: Memory) -> list[Any]:
    """Numpy arrays over the memory."""
    import ml_dtypes

    dtypes: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
    return [part.view(dtypes[leaf.dtype]).reshape(leaf.shape) for leaf, part in memory.parts()]
