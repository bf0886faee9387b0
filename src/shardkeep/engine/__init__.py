# SPDX-License-Identifier: Apache-2.0
"""Moving bytes: buffers under a budget, digests, parallel writing and reading."""
