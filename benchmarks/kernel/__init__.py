# SPDX-License-Identifier: Apache-2.0
"""Decode attention of one step and layer on a GPU: see ``__main__``."""
