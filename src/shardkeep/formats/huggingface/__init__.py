# SPDX-License-Identifier: Apache-2.0
"""The layout of Hugging Face: tensors by name in one safetensors file, or in several and an index.

Read are also the files that torch's `HuggingFaceStorageWriter` leaves for each rank.
"""

from __future__ import annotations

from shardkeep.formats.huggingface.finding import SYSTEM, find, recognises
from shardkeep.formats.huggingface.laying_out import lay_out

__all__ = ["SYSTEM", "find", "lay_out", "recognises"]
