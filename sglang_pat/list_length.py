# SPDX-License-Identifier: Apache-2.0
"""How long a workspace's list of slots is to be."""

from __future__ import annotations

PATIENCE = 1000  # plans that a list is twice too long for before it becomes shorter


class ListLength:
    """Follows what plans need, with a quarter more for those to come; never below ``least`` tokens.

    A plan that needs more gets a longer list at once. A list becomes shorter when it has been twice
    too long for ``PATIENCE`` plans in a row: a single batch that shares nothing makes it many times
    as long as it is needed again.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._begin()

    def _begin(self) -> None:
        self._plans = self._most = 0  # those that it was twice too long for, and what they needed

    def after(self, held: int, needed: int) -> int:
        """Tokens that the list is to have for a plan that needs ``needed``; it has ``held``."""
        most = max(self._most, needed)
        enough = max(self._least, most + most // 4)
        if needed <= held < 2 * enough:
            self._begin()
            return held
        self._plans, self._most = self._plans + 1, most
        if needed <= held and self._plans < PATIENCE:
            return held
        self._begin()
        return enough
