# SPDX-License-Identifier: Apache-2.0
"""What reading and writing other systems' checkpoints have in common, whatever the system."""
