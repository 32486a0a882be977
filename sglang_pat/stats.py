# SPDX-License-Identifier: Apache-2.0
"""What the backend counts, and what a server's log says of its sharing: its first packed step, or
why there is none. Plain integers: the hot path only adds, others read."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from sglang_pat.plan_text import Plan, ranges

logger = logging.getLogger("sglang_pat")

NAMESPACE = "sglang_pat"  # of the exported counters
# Counters without a label, in the order they are shown, and what they mean.
COUNTERS = {
    "decode_steps": "Decode steps that ran through a pack-forward-merge plan.",
    "verify_steps": "Of those, steps that verified draft tokens of speculative decoding.",
    "packed_steps": "Decode steps whose plan had an item that several requests share.",
    "branched_steps": "Decode steps whose plan ran parts of the tree as one item each.",
    "kv_tokens_read": "K/V tokens the items read, of one layer and KV head; re-reads count.",
    "kv_tokens_unpacked": "K/V tokens without packing: the sum of sequence lengths.",
    "plans_made": "Plans made.",
    "degraded_plans": "Plans with fewer splits or packs than pay, as their buffers were too small.",
    "hidden_plans": "Of the plans made, those that the GPU never waited for.",
    "plans_reused": "Decode steps that reused the last plan of their batch.",
    "plan_seconds": "Host time of the decode steps that made a plan.",
    "exposed_seconds": "Host time of the steps that made a plan that was not hidden.",
    "host_seconds": "Host time of pat in all decode steps, with a new plan or the last one.",
}
# Counters with a label: its name, and what they mean.
LABELLED = {
    "base_forwards": ("kind", "Forward passes that SGLang's own attention runs as intended."),
    "base_layers": ("reason", "Layers of decode steps that are SGLang's by their kind."),
    "fallbacks": ("reason", "What pat should have served but did not: passes, plans."),
    "private_requests": ("reason", "Requests whose shared prefix was not known to the plan."),
}
# Kinds of ``base_forwards``: SGLang's names of the forward modes, in lower case, and these.
WARM_UP = "warm_up"
SMALL_BATCH = "small_batch"  # decode steps of fewer requests than ``PatConfig.min_batch``
INTENDED_MODES = frozenset({"extend", "split_prefill", "draft_extend_v2", "idle", "prebuilt"})
# Why other modes come about.
_UNINTENDED_MODES = {
    "mixed": "--enable-mixed-chunk puts decodes into prefill batches; drop it to have them packed",
    "decode": "data parallel attention makes it a prefill while another rank prefills by a graph",
    "target_verify": "speculative decoding verifies several tokens of a request at once",
}

# Decode steps without any sharing after which the likely reason is logged. At 10 to 30 ms a step,
# a quarter to half a minute of work.
STEPS_WITHOUT_SHARING = 1000

# Why requests share nothing: reasons of ``Stats.private_requests``, and of some what users can do.
RADIX_CACHE_DISABLED = "radix cache disabled"
NOT_CACHED = "nothing cached yet"
NO_LOCK = "no tree lock"  # as of requests that were just released
NO_REQUEST = "row without a request"
NOT_READ = "path not read yet"
TOO_LONG = "path of too many nodes"
_REMEDIES = {
    RADIX_CACHE_DISABLED: (
        "SGLang's radix cache, which knows what requests share, is disabled: start the server "
        "without --disable-radix-cache"
    ),
    NOT_CACHED: (
        "the radix cache held nothing of most requests: their prompts are shorter than a page "
        "(--page-size), or the cache is too small to keep them"
    ),
}
_DIFFERENT_PROMPTS = (
    "the prompts differ in their first tokens (a date, an id, another order of parts), or share "
    "too few tokens to gain from: put what they share first (sglang-pat estimate names "
    "such prompts)"
)
# Reasons of fallbacks: the requests, or what they share, could not be read.
NOT_USABLE, NOT_READABLE = "sharing not usable", "requests not readable"


class Stats:
    """Counters of one scheduler process: see ``COUNTERS`` and ``LABELLED``."""

    def __init__(self) -> None:
        self.decode_steps = self.verify_steps = self.packed_steps = self.branched_steps = 0
        self.kv_tokens_read = self.kv_tokens_unpacked = 0
        self.plans_made = self.degraded_plans = self.hidden_plans = self.plans_reused = 0
        self.plan_seconds = self.exposed_seconds = self.host_seconds = 0.0
        self.base_forwards: Counter[str] = Counter()
        self.base_layers: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.private_requests: Counter[str] = Counter()
        self._watch = SharingWatch(self)

    def step(self, plan: Plan, total: int, *, made: bool) -> None:
        """Count a decode step that runs ``plan``; ``total``: the sum of its sequence lengths;
        ``made``: whether the plan was made for it. Logs the first plan simpler than the rules ask
        for."""
        self.plans_made += made
        self.plans_reused += not made
        if made and plan.degraded:
            self.degraded_plans += 1
            if self.degraded_plans == 1:
                logger.warning(
                    "sglang_pat: a plan for %d requests was made %s: they run slower than they "
                    "could; raise SGLANG_PAT_WORKSPACE_MB, or decode fewer requests at once "
                    "(--max-running-requests)",
                    plan.num_queries,
                    plan.degraded,
                )
        self.decode_steps += 1
        self.verify_steps += plan.draft_tokens > 1
        self.packed_steps += plan.num_shared_items > 0
        self.branched_steps += plan.branch_tokens > 0
        self.kv_tokens_unpacked += total
        self.kv_tokens_read += plan.kv_tokens_read(total)
        if self._watch.on:
            self._watch.step(plan.num_queries, plan, total, made=made)

    def host_time(self, elapsed_ns: int, *, made: bool, hidden: bool) -> None:
        """Count what a step took the host; ``made``: whether a plan was made for it; ``hidden``:
        whether the GPU was busy all that time."""
        seconds = elapsed_ns / 1e9
        self.host_seconds += seconds
        if made:
            self.plan_seconds += seconds
            self.hidden_plans += hidden
            # At most so long did the GPU wait: a part of a plan that is not hidden may have been.
            self.exposed_seconds += 0.0 if hidden else seconds

    @property
    def steps_asked_for(self) -> int:
        """Decode steps that the scheduler asked for: those on pat and those of few requests."""
        return self.decode_steps + self.base_forwards[SMALL_BATCH]

    def other_forward(self, mode: str) -> None:
        """Count a forward pass that the base runs, as intended or not, by SGLang's name of the mode
        that its scheduler meant."""
        kind = mode.lower()
        if kind in INTENDED_MODES:
            self.base_forwards[kind] += 1
        else:
            self.fall_back(kind, _UNINTENDED_MODES.get(kind))

    def small_batch(self, requests: int) -> None:
        """Count a decode step that the base runs because it has too few requests. ``requests``: 0
        if the scheduler did not ask for it, as in a warm-up or on an idle rank."""
        if requests:
            self.base_forwards[SMALL_BATCH] += 1
            if self._watch.on:
                self._watch.step(requests)
        else:
            self.base_forwards["idle" if self.steps_asked_for else WARM_UP] += 1

    def warm_up(self) -> None:
        """Count a decode that the scheduler did not ask for: as intended before it asks for any."""
        if self.steps_asked_for:
            self.fall_back("no batch from the scheduler")
        else:
            self.base_forwards[WARM_UP] += 1

    def base_layer(self, *reasons: str) -> None:
        """Count layers of a decode step that the base runs because of their kind; tell of the first
        one of each reason."""
        for reason in reasons:
            if reason not in self.base_layers:
                logger.info("sglang_pat: layers with %s run on SGLang's attention", reason)
            self.base_layers[reason] += 1

    def fall_back(self, reason: str, detail: object = None) -> None:
        """Count a fallback; warn of the first one of each reason, with ``detail``."""
        if reason not in self.fallbacks:
            text = "" if detail is None else f": {detail}"
            logger.warning("sglang_pat: not served by pat (%s)%s", reason, text)
        self.fallbacks[reason] += 1

    def snapshot(self) -> dict[str, Any]:
        """All counters by name; those with a label are dicts by its value."""
        values: dict[str, Any] = {name: getattr(self, name) for name in COUNTERS}
        return values | {name: dict(getattr(self, name)) for name in LABELLED}

    def summary(self) -> str:
        """One line for the log, of all since the start."""
        steps, unpacked = max(self.decode_steps, 1), self.kv_tokens_unpacked
        saved = 1 - self.kv_tokens_read / unpacked if unpacked else 0
        line = (
            f"{self.decode_steps} decode steps on pat, in {self.packed_steps} of which requests "
            f"shared K/V reads; {self.kv_tokens_read} K/V tokens read instead of {unpacked} "
            f"({saved:.1%} saved); {1e6 * self.host_seconds / steps:.1f} us of host time a step, a "
            f"new plan in {self.plans_made / steps:.1%}, {self.hidden_plans} of {self.plans_made} "
            "plans hidden behind the GPU"
        )
        for words, counts in (
            ("on SGLang's attention as intended", self.base_forwards),
            ("layers that are SGLang's by their kind", self.base_layers),
            ("not served by pat as it should have been", self.fallbacks),
        ):
            if counts:
                listed = ", ".join(f"{count} x {name}" for name, count in dict(counts).items())
                line += f"; {words}: {listed}"
        return line


class SharingWatch:
    """Watches decode steps until one is packed, and says so once, or why none is. ``on``: whether
    it still watches."""

    def __init__(self, stats: Stats) -> None:
        self.on = True
        self._stats = stats
        self._several = 0  # steps with a plan for several requests
        self._few = 0  # steps of one request, or of fewer than pat serves
        self._most_of_few = 1  # requests
        self._planned = 0  # requests, in all plans made

    def step(
        self, requests: int, plan: Plan | None = None, total: int = 0, *, made: bool = False
    ) -> None:
        """Watch a decode step, to which the other arguments are as to ``Stats.step``; without a
        plan it is the base's for its few requests. What goes wrong costs the message only."""
        try:
            self._planned += requests if made else 0
            if plan is None or requests == 1:
                self._few += 1
                self._most_of_few = max(self._most_of_few, requests)
                if self._few == STEPS_WITHOUT_SHARING and not self._several:
                    self._say_few()
            elif plan.num_shared_items and (saving := describe_packed_step(plan, total)):
                self.on = False
                logger.info("sglang_pat: %s", saving)
            else:
                self._several += 1
                if self._several == STEPS_WITHOUT_SHARING:
                    logger.warning(
                        "sglang_pat: %d decode steps had several requests, and none of them could "
                        "share K/V reads. The likely reason: %s. `sglang-pat doctor` lists what "
                        "keeps pat from sharing.",
                        *(self._several, self._likely_reason()),
                    )
        except Exception as error:  # it must not cost the server
            self.on = False
            logger.warning("sglang_pat: cannot tell what is shared: %r", error)

    def _say_few(self) -> None:
        if self._most_of_few > 1:
            logger.warning(
                "sglang_pat: none of %d decode steps had more than %d requests, so few that "
                "SGLang's attention ran them, unpacked: lower SGLANG_PAT_MIN_BATCH",
                *(self._few, self._most_of_few),
            )
        else:
            logger.info(
                "sglang_pat: each of %d decode steps had one request, so there was nothing to "
                "share: pat saves K/V reads when several requests with a common beginning run at "
                "the same time",
                self._few,
            )

    def _likely_reason(self) -> str:
        for failure in (NOT_USABLE, NOT_READABLE):
            if self._stats.fallbacks[failure]:
                return f"pat could not read SGLang's radix cache ({failure}; see the warning above)"
        for reason, count in self._stats.private_requests.most_common(1):
            # Under overlap scheduling the first step after a prefill finds nothing cached yet.
            if 2 * count > self._planned:
                return _REMEDIES.get(reason, reason)
        return _DIFFERENT_PROMPTS


def describe_packed_step(plan: Plan, total: int) -> str:
    """What a step of ``total`` K/V tokens saves, in a line: how many requests share tokens, how
    many each, and the K/V reads of the whole step. Empty where no token is read for several."""
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
