# SPDX-License-Identifier: Apache-2.0
"""Where bytes lie. A store knows names and bytes, nothing of checkpoints."""
