# SPDX-License-Identifier: Apache-2.0
"""Serving, backend beside backend: see ``__main__``."""
