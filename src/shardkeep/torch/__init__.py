# SPDX-License-Identifier: Apache-2.0
"""For programs that train with PyTorch."""

from shardkeep.torch.guarding import guard
from shardkeep.torch.rng import RngState, rng_state

__all__ = ["RngState", "guard", "rng_state"]
