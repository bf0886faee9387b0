# SPDX-License-Identifier: Apache-2.0
"""Random generators as a part of a state: saved by each rank, continued bit for bit.

`rng_state()` is what a training state holds. On the number of ranks that saved it, every generator
goes on where it was. On another number there is no such thing: all are seeded anew, by a rule that
gives the same streams whenever the same checkpoint is loaded on so many ranks, and never the same
stream to two of them. `shardkeep.torch` has the same with torch's generators.
"""

from __future__ import annotations

import copy
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from shardkeep import values
from shardkeep.errors import MismatchError, UnsupportedValueError
from shardkeep.per_rank import PerRank

__all__ = ["RngState", "reseed", "rng_state"]


def rng_state(
    generators: Mapping[str, object] | None = None, *, include_global: bool = True
) -> PerRank[RngState]:
    """The random generators of this process, to be put into a state.

    Those of Python's `random` and of `numpy.random`, unless `include_global` is False, and the
    given `generators` by name: `random.Random`, and numpy's `Generator` and `RandomState`.
    """
    return PerRank(RngState(generators, include_global=include_global), resize=reseed)


def reseed(saved: Sequence[Any], rank: int, world_size: int) -> dict[str, Any]:
    """The `resize` of `rng_state`: what seeds follow from.

    They follow from the state that the first rank has saved, `world_size` and `rank`; other states
    are not looked at.
    """
    told = values.encode([saved[0], world_size], where="rng")
    return {"reseed": sha256(b"shardkeep rng 1\0" + told).digest(), "rank": rank}


@dataclass(frozen=True, slots=True)
class Seed:
    """What the new seeds of one rank follow from."""

    key: bytes
    """The same on all ranks."""
    rank: int
    """The rank that is seeded."""

    def number(self, label: str, nbytes: int = 32) -> int:
        """A number that is the same on all ranks, and another for every label."""
        return int.from_bytes(sha256(self.key + label.encode()).digest()[:nbytes], "big")


class Source(ABC):
    """One generator."""

    may_be_new = False
    """Whether it need not have been saved to be here."""

    @abstractmethod
    def get(self) -> dict[str, Any] | None:
        """Its state in plain values; None where there is none yet."""

    @abstractmethod
    def check(self, state: Mapping[str, Any], name: str) -> None:
        """Raise if this state cannot be set."""

    @abstractmethod
    def set(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""

    @abstractmethod
    def reseed(self, seed: Seed, label: str, number: int) -> None:
        """Begin another stream; `number` counts the generators of a kind."""


class RngState:
    """The random generators of this process; gives and takes their states as plain values."""

    def __init__(
        self, generators: Mapping[str, object] | None = None, *, include_global: bool = True
    ) -> None:
        """See `rng_state`."""
        given = {name: self._source(one, name) for name, one in (generators or {}).items()}
        self._given = dict(sorted(given.items()))
        self._global = self._global_sources() if include_global else {}

    def _global_sources(self) -> dict[str, Source]:
        return {"python": PythonSource(random), "numpy": NumpySource(_Legacy())}

    def _source(self, generator: Any, name: str) -> Source:
        if isinstance(generator, random.Random):
            return PythonSource(generator)
        if isinstance(generator, np.random.Generator):
            return NumpySource(generator.bit_generator)
        if isinstance(generator, np.random.BitGenerator):
            return NumpySource(generator)
        if isinstance(generator, np.random.RandomState):
            return NumpySource(_Legacy(generator))
        raise UnsupportedValueError(
            f"generators: {name} is a {type(generator).__qualname__}, which is not a random "
            f"generator that {type(self).__module__}.{type(self).__qualname__} knows"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of every generator."""
        state: dict[str, Any] = {}
        for name, source in self._global.items():
            if (one := source.get()) is not None:
                state[name] = one
        if self._given:
            state["generators"] = {name: source.get() for name, source in self._given.items()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on from what `state_dict` gave, or begin the streams that `reseed` tells of."""
        if "reseed" in state_dict:
            self._reseed(Seed(state_dict["reseed"], state_dict["rank"]))
            return
        stored = {name: one for name, one in state_dict.items() if name != "generators"}
        given = state_dict.get("generators", {})
        _check_names(stored, self._global)
        _check_names(given, self._given)
        pairs = [(name, self._global[name], stored[name]) for name in stored]
        pairs += [(name, self._given[name], given[name]) for name in given]
        for name, source, one in pairs:
            source.check(one, name)
        for _, source, one in pairs:
            source.set(one)

    def _reseed(self, seed: Seed) -> None:
        for name, source in self._global.items():
            source.reseed(seed, name, 0)
        for number, (name, source) in enumerate(self._given.items(), 1):
            source.reseed(seed, f"generators.{name}", number)


def _check_names(stored: Mapping[str, Any], sources: Mapping[str, Source]) -> None:
    """What was saved must be here, and what is here must have been saved."""
    lost = stored.keys() - sources.keys()
    new = {name for name in sources.keys() - stored.keys() if not sources[name].may_be_new}
    if lost or new:
        raise MismatchError(
            "random generators: "
            + "; ".join(
                f"{', '.join(sorted(names))} {how}"
                for names, how in ((lost, "was saved but is not here"), (new, "was not saved"))
                if names
            )
            + ". Make the RngState with the generators it was saved with.",
            missing=sorted(new),
            unexpected=sorted(lost),
        )


class PythonSource(Source):
    """Python's generator: the module `random`, or a `random.Random`."""

    def __init__(self, generator: Any) -> None:
        """`SystemRandom` has no state."""
        if isinstance(generator, random.SystemRandom):
            raise UnsupportedValueError("a SystemRandom has no state that could be saved")
        self._generator = generator

    def get(self) -> dict[str, Any]:
        """Its words as bytes: they are many."""
        version, words, gauss = self._generator.getstate()
        packed = b"".join(word.to_bytes(4, "little") for word in words)
        return {"version": version, "words": packed, "gauss": gauss}

    def check(self, state: Mapping[str, Any], name: str) -> None:
        """Whether this Python has such a state: a generator aside is asked."""
        try:
            random.Random().setstate(_python_state(state))
        except Exception as error:
            raise MismatchError(f"{name}: Python's random refuses the state: {error}") from error

    def set(self, state: Mapping[str, Any]) -> None:
        """All of it."""
        self._generator.setstate(_python_state(state))

    def reseed(self, seed: Seed, label: str, number: int) -> None:
        """From 256 bits that ranks share and the rank in the lowest ones."""
        self._generator.seed(seed.number(label) << 32 | seed.rank)


def _python_state(state: Mapping[str, Any]) -> tuple[Any, ...]:
    words = state["words"]
    numbers = [int.from_bytes(words[at : at + 4], "little") for at in range(0, len(words), 4)]
    return (state["version"], tuple(numbers), state["gauss"])


class _Legacy:
    """numpy's old interface, with the state as a dict: the global one, or a `RandomState`."""

    def __init__(self, random_state: Any = np.random.mtrand._rand) -> None:
        self._random = random_state

    @property
    def state(self) -> Any:
        return self._random.get_state(legacy=False)

    @state.setter
    def state(self, state: Any) -> None:
        self._random.set_state(state)


class NumpySource(Source):
    """A bit generator of numpy."""

    def __init__(self, generator: Any) -> None:
        """Anything with a `state` such as bit generators have."""
        self._generator = generator

    def get(self) -> dict[str, Any]:
        """Its state; arrays in it as their type and bytes."""
        plain: dict[str, Any] = _plain(self._generator.state)
        return plain

    def check(self, state: Mapping[str, Any], name: str) -> None:
        """The same kind of bit generator, and a copy takes the state."""
        stored, here = state.get("bit_generator"), self._generator.state["bit_generator"]
        if stored != here:
            raise MismatchError(f"{name}: the state of a {stored} was saved, here is a {here}")
        aside = copy.deepcopy(self._generator)
        try:
            aside.state = _arrays(state)
        except Exception as error:
            raise MismatchError(f"{name}: numpy refuses the state: {error}") from error

    def set(self, state: Mapping[str, Any]) -> None:
        """All of it."""
        self._generator.state = _arrays(state)

    def reseed(self, seed: Seed, label: str, number: int) -> None:
        """As numpy spawns generators: one sequence of seeds, the rank is the spawn key."""
        state = self._generator.state
        sequence = np.random.SeedSequence(seed.number(label), spawn_key=(seed.rank,))
        fresh = getattr(np.random, state["bit_generator"])(sequence).state
        gauss = {"has_gauss": 0, "gauss": 0.0} if "has_gauss" in state else {}
        self._generator.state = {**fresh, **gauss}


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        little = state.dtype.newbyteorder("<")
        return [little.str, state.astype(little).tobytes()]
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _arrays(value) for key, value in state.items()}
    if isinstance(state, list):
        dtype = np.dtype(state[0])
        return np.frombuffer(state[1], dtype).astype(dtype.newbyteorder("="))
    return state
