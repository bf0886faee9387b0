# SPDX-License-Identifier: Apache-2.0
"""For programs that train with PyTorch."""

from shardkeep.torch.guarding import guard

__all__ = ["guard"]
