# SPDX-License-Identifier: Apache-2.0
"""Converting checkpoints: from any format we read to any we write, in bounded memory.

driver      the order of steps
contents    what is converted: the source after surgery, still without its elements
straight    what of it is stored as it is wanted, and so is copied as bytes
target      the formats there are to convert to
native      into our own format, by the writer of ordinary saves
windows     a file that is to be, read ahead window by window
laid_out    into other formats, whose files are laid out first
own_files   what of a directory is the checkpoint's, where it is to be replaced
workplace   where the result is built, beside its destination, and moved from when it is whole
"""

from __future__ import annotations

from shardkeep.converting.driver import ConvertResult, convert

__all__ = ["ConvertResult", "convert"]
