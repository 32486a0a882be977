# SPDX-License-Identifier: Apache-2.0
"""Which speculative decoding of SGLang pat can verify: draft tokens in chains and in trees.

In a verify step each request brings the same number of draft tokens, of which the first is known to
be right. In a chain, each follows the one before it; in a tree, one may have several successors
(top k above 1), which do not attend to each other. ``S``: SGLang 0.5.23's ``srt/``.
"""

from __future__ import annotations

from typing import Any

from sglang_pat.draft_masks import MOST_MASKED_DRAFTS
from sglang_pat.srt import BACKEND

# Their workers verify as S speculative/eagle_worker_common.py:547 and ngram_worker.py:372 do.
ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")
DROP_ONE = "drop that option, or pat"


def reason_against(args: Any) -> str:
    """Why SGLang's own attention verifies on a server that speculates, or "". ``args``: resolved
    server arguments with a ``speculative_algorithm``."""
    return obstacle(args)[0]


def obstacle(args: Any) -> tuple[str, str]:
    """``reason_against`` and its way out, which means nothing where the reason is ""."""
    algorithm = args.speculative_algorithm
    name = f"--speculative-algorithm {algorithm}"
    if algorithm not in ALGORITHMS:
        return (
            f"under {name} the model verifies drafts instead of decoding, and that is SGLang's "
            f"attention: pat verifies those of {', '.join(ALGORITHMS)}"
        ), DROP_ONE
    tokens = args.speculative_num_draft_tokens
    if may_be_trees(args) and tokens > MOST_MASKED_DRAFTS:
        return (
            f"{name} drafts trees of {tokens} tokens, and pat verifies trees of up to "
            f"{MOST_MASKED_DRAFTS}"
        ), f"set --speculative-num-draft-tokens to at most {MOST_MASKED_DRAFTS}"
    if args.speculative_adaptive:
        return (
            "under --speculative-adaptive the number of draft tokens changes, and pat verifies a "
            "fixed one"
        ), DROP_ONE
    prefill = args.prefill_attention_backend
    if prefill not in (None, BACKEND) and args.speculative_attention_mode != "decode":
        return (
            f"drafts are verified on --prefill-attention-backend {prefill}, as "
            f"--speculative-attention-mode is {args.speculative_attention_mode}"
        ), "set --speculative-attention-mode decode"
    return _reason_against_stream(), DROP_ONE


def may_be_trees(args: Any) -> bool:
    """Whether a server that speculates may draft trees. NGRAM does even with a breadth of 1: it
    puts what followed matches of several lengths side by side (ngram_corpus/trie.cpp in SGLang).
    """
    ngram: bool = args.speculative_algorithm == "NGRAM"
    return ngram or args.speculative_eagle_topk != 1


def _reason_against_stream() -> str:
    """On its plan stream SGLang has the base fill in what it prepared (S
    layers/attention/base_attn_backend.py:309), which pat has nothing of."""
    from sglang.srt.environ import envs

    if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        return "under SGLANG_ENABLE_OVERLAP_PLAN_STREAM drafts are verified on SGLang's attention"
    return ""


def draft_tokens_of(args: Any) -> int:
    """Draft tokens of a request in the verify steps that pat serves; 1 on a server whose decode
    steps it serves."""
    if args.speculative_algorithm is None or reason_against(args):
        return 1
    tokens: int = args.speculative_num_draft_tokens
    return tokens
