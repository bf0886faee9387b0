# SPDX-License-Identifier: Apache-2.0
"""Other libraries' names for what this one does; each is a module of its own."""
