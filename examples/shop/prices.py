# SPDX-License-Identifier: Apache-2.0
"""Prices in cents, with discounts by quantity."""

PRICES = {"pen": 150, "notebook": 420, "folder": 290, "lamp": 3900}
DISCOUNTS = [(10, 5), (50, 10), (100, 20)]  # pieces from which on so many percent are taken off


def discount(pieces: int) -> int:
    """Percent taken off the price of an order line."""
    for least, percent in DISCOUNTS:
        if pieces >= least:
            return percent
    return 0


def line_price(article: str, pieces: int) -> int:
    """Cents for so many pieces of one article."""
    full = PRICES[article] * pieces
    return round(full - full * discount(pieces) / 100)
