# SPDX-License-Identifier: Apache-2.0
"""What is on the shelves."""


class Stock:
    """Pieces of each article; an article that was never delivered is not in the table."""

    def __init__(self) -> None:
        self._pieces: dict[str, int] = {}

    def deliver(self, article: str, pieces: int) -> None:
        """Add pieces to the shelf."""
        self._pieces[article] = self._pieces.get(article, 0) + pieces

    def take(self, article: str, pieces: int) -> bool:
        """Take pieces from the shelf, all of them or none; whether there were enough."""
        if self._pieces[article] < pieces:
            return False
        self._pieces[article] -= pieces
        return True

    def low(self, limit: int) -> list[str]:
        """Articles of which fewer than ``limit`` pieces are left."""
        return [article for article, pieces in self._pieces.items() if pieces <= limit]
