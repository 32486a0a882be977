# SPDX-License-Identifier: Apache-2.0
"""Tells a server's users, once, that its requests share K/V reads, or why they do not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_pat.planner import Plan

logger = logging.getLogger("sglang_pat")

# Decode steps without any sharing after which the likely reason is logged. At 10 to 30 ms a step,
# a quarter to half a minute of work.
STEPS_WITHOUT_SHARING = 1000

# Why requests share nothing: reasons of ``Stats.private_requests``, and what users can do.
RADIX_CACHE_DISABLED = "radix cache disabled"
NOT_CACHED = "nothing cached yet"
NO_LOCK = "no tree lock"
NO_REQUEST = "row without a request"
NOT_READ = "path not read yet"
_REMEDIES = {
    RADIX_CACHE_DISABLED: (
        "SGLang's radix cache, which knows what requests share, is disabled: start the server "
        "without --disable-radix-cache"
    ),
    NOT_CACHED: (
        "the radix cache held nothing of most requests: their prompts are shorter than a page "
        "(--page-size), or the cache is too small to keep them"
    ),
    NO_LOCK: "most requests held no prefix in the radix cache, as those just released",
    NOT_READ: (
        "most requests stand so deep in the radix cache that their paths are read over several "
        "steps"
    ),
    NO_REQUEST: "most queries of the batches belonged to no request of the scheduler",
}
# Reasons of fallbacks: the requests, or what they share, could not be read.
NOT_USABLE, NOT_READABLE = "sharing not usable", "requests not readable"
_DIFFERENT_PROMPTS = (
    "the prompts differ in their first tokens (a date, an id, another order of parts), or share "
    "too few tokens to gain from: put what they share first (sglang-pat estimate names "
    "such prompts)"
)


class SharingWatch:
    """Watches a server's decode steps until one is packed.

    ``on``: whether it still watches; after the announcement of the first packed step it need not be
    called any more.
    """

    def __init__(self) -> None:
        self.on = True
        self._small_steps = 0  # decode steps of one request, or of fewer than pat serves
        self._most_in_small_steps = 1  # requests
        self._steps_of_several = 0
        self._planned = 0  # requests, in all plans made

    def step(self, plan: Plan, total: int, *, made: bool) -> bool:
        """Watch a decode step that runs ``plan``, for ``total`` K/V tokens, ``made`` for it or
        reused. Announces the first packed step. Returns whether it is time to call ``explain``."""
        self._planned += plan.num_queries if made else 0
        if plan.num_shared_items > 0 and (saving := describe_packed_step(plan, total)):
            self.on = False
            logger.info("sglang_pat: %s", saving)
            return False
        if plan.num_queries > 1:
            self._steps_of_several += 1
            return self._steps_of_several == STEPS_WITHOUT_SHARING
        return self.small_step(plan.num_queries)

    def small_step(self, requests: int) -> bool:
        """Watch a decode step of one request, or of so few that the base runs it. Returns
        whether it is time to call ``explain``."""
        self._small_steps += 1
        self._most_in_small_steps = max(self._most_in_small_steps, requests)
        return self._small_steps == STEPS_WITHOUT_SHARING and not self._steps_of_several

    def explain(self, private: Mapping[str, int], fallbacks: Mapping[str, int]) -> None:
        """Log that nothing was shared, with the likely reason; the counts are those of ``Stats``.
        A WARNING, unless there were no two requests at a time."""
        if not self._steps_of_several and self._most_in_small_steps > 1:
            logger.warning(
                "sglang_pat: each of %d decode steps had at most %d requests, so few that SGLang's "
                "attention ran them, unpacked: lower SGLANG_PAT_MIN_BATCH to have them packed",
                self._small_steps,
                self._most_in_small_steps,
            )
            return
        if not self._steps_of_several:
            logger.info(
                "sglang_pat: each of %d decode steps had a single request, so there was nothing to "
                "share; pat saves K/V reads when several requests with a common beginning run at "
                "the same time",
                self._small_steps,
            )
            return
        logger.warning(
            "sglang_pat: %d decode steps had several requests, and none of them could share K/V "
            "reads. The likely reason: %s. `sglang-pat doctor` lists what keeps pat from sharing.",
            self._steps_of_several,
            self._likely_reason(private, fallbacks),
        )

    def _likely_reason(self, private: Mapping[str, int], fallbacks: Mapping[str, int]) -> str:
        for reason in (NOT_USABLE, NOT_READABLE):
            if fallbacks.get(reason):
                return f"pat could not read SGLang's radix cache ({reason}; see the warning above)"
        reason, count = Counter(private).most_common(1)[0] if private else ("", 0)
        # Under overlap scheduling the first step after a prefill finds nothing cached yet.
        if 2 * count > self._planned:
            return _REMEDIES.get(reason, reason)
        return _DIFFERENT_PROMPTS


def describe_packed_step(plan: Plan, total: int) -> str:
    """What a packed step of ``total`` K/V tokens saves, in a line: how many requests share tokens,
    how many each, and the K/V reads of the whole step. Empty for a plan whose items of several
    requests read no token for more than one of them.

    Requests with one prefix may be in several items, so these are not told apart.
    """
    # Imported here: a client that only reads counters needs no torch.
    from sglang_pat.slots import ranges

    tokens: Counter[int] = Counter()  # shared ones of each query
    for shared in ranges(plan, shared=True):
        tokens.update(dict.fromkeys(shared.queries, shared.tokens))
    if not tokens:
        return ""
    least, most = min(tokens.values()), max(tokens.values())
    each = f"{most} tokens" if least == most else f"{least} to {most} tokens each"
    ratio = total / plan.kv_tokens_read(total)
    return (
        f"{len(tokens)} requests share {each}: {ratio:.1f} x fewer K/V reads "
        f"(the first decode step that shares, of {plan.num_queries} requests)"
    )
