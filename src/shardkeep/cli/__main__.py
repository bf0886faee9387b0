# SPDX-License-Identifier: Apache-2.0
"""`python -m shardkeep.cli`, for where the command itself is not installed."""

from shardkeep.cli import main

main()
