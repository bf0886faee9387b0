# SPDX-License-Identifier: Apache-2.0
"""What bytes mean: one folder per checkpoint format."""
