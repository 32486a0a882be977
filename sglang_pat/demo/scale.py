# SPDX-License-Identifier: Apache-2.0
"""How large the demo's model and workload are, by device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_pat.demo.compare import MAX_LOGPROB_DIFF_BF16, MEAN_LOGPROB_DIFF_BF16

VOCAB = 1024


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a demo.

    ``parts``: conversations for each of the 24 tasks. ``handbook``: puts the text of ``corpus.txt``
    into the common system prompt. ``compared_tokens``: None if the answers of the timed pass are
    compared, by their log-probabilities; otherwise that pass asks for none, as their host time is
    paid by no user without them, and a pass of one part with answers of so many tokens is compared.
    ``warm_up``: first run the whole workload once and flush the cache, on both servers.
    ``mean_diff_bf16`` and ``max_diff_bf16``: differences of log-probabilities (natural logarithm)
    that rounding to bf16 explains on this model.
    """

    model: dict[str, Any]  # arguments of make_model
    kv_tokens: int  # K/V pool of either server
    parts: int
    max_tokens: int  # of an answer
    compared_tokens: int | None
    handbook: bool
    warm_up: bool
    mean_diff_bf16: float
    max_diff_bf16: float

    @property
    def kv_bytes(self) -> int:
        """Of one server's K/V pool, in bf16."""
        model = self.model
        return self.kv_tokens * 4 * int(model["layers"] * model["kv_heads"] * model["head_dim"])

    def __str__(self) -> str:
        return "llama {layers} x {hidden}, {q_heads}/{kv_heads} heads of {head_dim}".format(
            **self.model
        )


SCALES = {
    # Two cores: a decode step of 24 requests takes a tenth of a second without packing. The pool
    # holds 24 contexts of 1,900 tokens with room to spare, so that no request is retracted. With
    # this seed the token chosen leads the next best by 5e-4 at least (with seed 0 by 4e-5), which
    # fp32 rounding, 2e-5 at most, does not turn round.
    "cpu": Scale(
        model={
            "hidden": 256,
            "layers": 4,
            "q_heads": 4,
            "kv_heads": 1,
            "head_dim": 128,
            "vocab": VOCAB,
            "seed": 1,
        },
        kv_tokens=65_536,
        parts=1,
        max_tokens=32,
        compared_tokens=None,
        handbook=False,
        warm_up=False,
        mean_diff_bf16=MEAN_LOGPROB_DIFF_BF16,
        max_diff_bf16=MAX_LOGPROB_DIFF_BF16,
    ),
    # A decode step must be made of attention's K/V reads, or it shows SGLang's host time alone.
    #   K/V of a token   8 layers x 16 heads x 128 x 2 (K and V) x 2 bytes = 64 KiB
    #   conversations    6 agents x 4 tasks x 6 parts = 144, each of 4,400 common tokens, 120 of its
    #                    agent and on average 490 of its own (task, follow-up, two answers of 384)
    #   stock reads      144 x 5,010 x 64 KiB = 47 GB a step: 14 ms at an H100's 3.35 TB/s and 10 ms
    #                    at an H200's 4.8 TB/s; what the L2 serves twice may halve that
    #   pat reads        (4,400 + 6 x 120 + 144 x 490) x 64 KiB = 5 GB: 1.5 and 1.0 ms
    #   weights          8 x 27 million + 2 million parameters = 0.44 GB, 0.1 ms a step; made in 6 s
    #   pool             196,608 tokens = 12.9 GB. 4,400 + 144 x 1,160 = 171,000 are needed at most,
    #                    if no agent's prompt is cached when its 24 conversations arrive.
    # 16 heads in 8 layers rather than 8 in 16 read as much, and rounding grows with the layers.
    # With answers of 128 tokens, half of the time was prefill, which is SGLang's on both servers.
    #
    # Bounds: pat differed from FA3 by 0.025 on average and 0.16 at most (H100, 6,144 forced tokens,
    # 2026-11-22), FA3 from itself in other batches by 0.004 and 0.12. bf16 itself differs from fp32
    # on this model by 0.136 and 0.67 (transformers, 2,048 random tokens, on a CPU).
    "cuda": Scale(
        model={
            "hidden": 1024,
            "layers": 8,
            "q_heads": 64,
            "kv_heads": 16,
            "head_dim": 128,
            "vocab": VOCAB,
        },
        kv_tokens=196_608,
        parts=6,
        max_tokens=384,
        compared_tokens=128,
        handbook=True,
        warm_up=True,
        mean_diff_bf16=0.06,
        max_diff_bf16=0.5,
    ),
}
MODEL = SCALES["cpu"].model  # which the examples serve, too
