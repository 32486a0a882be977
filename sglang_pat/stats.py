# SPDX-License-Identifier: Apache-2.0
"""What the backend counts. Plain integers: the hot path only adds, others read."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

logger = logging.getLogger("sglang_pat")

NAMESPACE = "sglang_pat"  # of the exported counters
# Counters without a label, in the order they are shown, and what they mean.
COUNTERS = {
    "decode_steps": "Decode steps that ran through a pack-forward-merge plan.",
    "packed_steps": "Decode steps whose plan had an item that several requests share.",
    "branched_steps": "Decode steps whose plan ran parts of the tree as one item each.",
    "kv_tokens_read": "K/V tokens the items read, of one layer and KV head; re-reads count.",
    "kv_tokens_unpacked": "K/V tokens without packing: the sum of sequence lengths.",
    "plans_made": "Plans made.",
    "plans_reused": "Decode steps that reused the plan of the step before.",
    "plan_seconds": "Host time of the decode steps that made a plan.",
    "host_seconds": "Host time of pat in all decode steps, with a new plan or the last one.",
}


class Stats:
    """Counters of one scheduler process.

    ``fallbacks`` counts, by reason, what the base backend served instead: forward passes and,
    within a decode step, layers; and plans that had to be made without any sharing.
    ``private_requests`` counts, by reason, requests that were planned without a path.
    """

    def __init__(self) -> None:
        self.decode_steps = 0
        self.packed_steps = 0
        self.branched_steps = 0
        self.kv_tokens_read = 0
        self.kv_tokens_unpacked = 0
        self.plans_made = 0
        self.plans_reused = 0
        self.plan_ns = 0
        self.host_ns = 0
        self.fallbacks: Counter[str] = Counter()
        self.private_requests: Counter[str] = Counter()

    @property
    def plan_seconds(self) -> float:
        return self.plan_ns / 1e9

    @property
    def host_seconds(self) -> float:
        return self.host_ns / 1e9

    def fall_back(self, reason: str, detail: object = None, level: int = logging.WARNING) -> None:
        """Count a fallback; log the first one of each reason, with ``detail``."""
        if reason not in self.fallbacks:
            text = "" if detail is None else f": {detail}"
            logger.log(level, "sglang_pat: not served by pat (%s)%s", reason, text)
        self.fallbacks[reason] += 1

    def private(self, reasons: dict[str, int]) -> None:
        """Count requests planned without a path; log the first of each reason."""
        for reason, count in reasons.items():
            if reason not in self.private_requests:
                logger.info("sglang_pat: requests without a radix path are private (%s)", reason)
            self.private_requests[reason] += count

    def snapshot(self) -> dict[str, Any]:
        """All counters by name; ``fallbacks`` and ``private_requests`` are dicts by reason."""
        values: dict[str, Any] = {name: getattr(self, name) for name in COUNTERS}
        values["fallbacks"] = dict(self.fallbacks)
        values["private_requests"] = dict(self.private_requests)
        return values

    def summary(self) -> str:
        """One line for the log."""
        saved = 1 - self.kv_tokens_read / self.kv_tokens_unpacked if self.kv_tokens_unpacked else 0
        plans, reused = max(self.plans_made, 1), max(self.plans_reused, 1)
        return (
            f"decode steps {self.decode_steps}, packed {self.packed_steps}, "
            f"in branches {self.branched_steps}, "
            f"K/V tokens read {self.kv_tokens_read} of {self.kv_tokens_unpacked} "
            f"({saved:.1%} saved), plans made {self.plans_made}, reused {self.plans_reused}, "
            f"{self.plan_ns / plans / 1e3:.1f} us a step that made one, "
            f"{(self.host_ns - self.plan_ns) / reused / 1e3:.1f} us one that reused one, "
            f"fallbacks {dict(self.fallbacks)}, private requests {dict(self.private_requests)}"
        )
