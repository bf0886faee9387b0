# SPDX-License-Identifier: Apache-2.0
"""One module per array library; each has an `ADAPTER`. Found through `shardkeep.arrays`."""
