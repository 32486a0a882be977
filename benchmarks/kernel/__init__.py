# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one step and layer: see ``__main__`` for a GPU, ``attention`` for a CPU."""
