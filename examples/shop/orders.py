# SPDX-License-Identifier: Apache-2.0
"""Orders: lines of articles and pieces, which are taken from the stock together or not at all."""

from dataclasses import dataclass, field

from prices import line_price
from stock import Stock


@dataclass
class Order:
    """What one customer asked for."""

    customer: str
    lines: dict[str, int] = field(default_factory=dict)

    def add(self, article: str, pieces: int) -> None:
        """Add a line, or more pieces to the line that is there."""
        self.lines[article] = pieces

    def total(self) -> int:
        """Cents for all lines."""
        return sum(line_price(article, pieces) for article, pieces in self.lines.items())


def fulfil(order: Order, stock: Stock) -> bool:
    """Take all lines from the stock; whether that could be done."""
    return all(stock.take(article, pieces) for article, pieces in order.lines.items())
