# SPDX-License-Identifier: Apache-2.0
"""The order desk: takes orders, fulfils them in turn, reports at the end of the day."""

from orders import Order, fulfil
from report import report
from stock import Stock


class Desk:
    """One day at the desk; the rules of the queue are in queue.txt."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._queue: list[Order] = []
        self._done: list[Order] = []

    def accept(self, order: Order) -> None:
        """Put an order at the end of the queue and see what can be fulfilled now."""
        self._queue.append(order)
        self.work()

    def work(self) -> None:
        """Fulfil orders from the head of the queue."""
        for order in self._queue:
            if fulfil(order, self._stock):
                self._queue.remove(order)
                self._done.append(order)

    def close(self) -> str:
        """The report of the day; the queue is kept for the next one."""
        return report(self._done)
