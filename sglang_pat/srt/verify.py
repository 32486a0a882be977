# SPDX-License-Identifier: Apache-2.0
"""The backend of a server that speculates: its verify steps are what decode steps are elsewhere.
``S``: SGLang 0.5.23's ``srt/``."""

from __future__ import annotations

from typing import Any

import torch

from sglang_pat.planner import Plan
from sglang_pat.srt.backend import PatDecodeMixin
from sglang_pat.srt.hook import LiveBatch
from sglang_pat.srt.lengths import Lengths, bounds_of, lengths_of


class PatVerifyMixin(PatDecodeMixin):
    """Verification of draft tokens by pack, forward and merge, in front of a base.

    A request is one query with ``Target.draft_tokens`` tokens: its own K/V are read once for all of
    them, shared K/V once for all requests. SGLang sends the layers of a verify step to
    ``forward_extend``, with the draft tokens of a request as neighbouring rows of q.
    """

    verify_mask: Any  # of the base

    def _admit(self, forward_batch: Any, batch: LiveBatch | None) -> bool:
        mode = forward_batch.forward_mode
        if not mode.is_target_verify():
            if mode.is_decode():
                self._stats.fall_back("decode step on a server that speculates")
            else:
                self._count_other(forward_batch)
            return False
        given, planned = forward_batch.spec_info.draft_token_num, self._target.draft_tokens
        if given != planned:
            self._stats.fall_back("other draft tokens", f"{given} a request instead of {planned}")
            return False
        if self._on_cpu:
            return True  # SGLang's attention on a CPU cannot verify
        return self._admit_rows(forward_batch, batch)

    @property
    def _on_cpu(self) -> bool:
        device: str = self.token_to_kv_pool.device
        return device == "cpu"

    def _lengths(self, forward_batch: Any, batch: LiveBatch | None) -> Lengths:
        """SGLang's lengths of a verify step do not count the draft tokens, a plan's do."""
        draft_tokens = self._target.draft_tokens
        if forward_batch.seq_lens_cpu is None and batch is not None:
            why = "the host's bounds are far apart"
            try:
                bounds = bounds_of(batch.reqs, draft_tokens)
            except (AttributeError, TypeError) as error:  # not requests as SGLang has them
                bounds, why = None, repr(error)
            if bounds is not None:
                return bounds
            self._stats.fall_back("lengths read from the GPU", why)
        return lengths_of(forward_batch, draft_tokens)

    def _snapshot(self, forward_batch: Any) -> None:
        with_drafts = forward_batch.seq_lens + self._target.draft_tokens
        self._executor.snapshot(forward_batch.req_pool_indices, with_drafts)

    def _load(self, plan: Plan, batch: LiveBatch | None, forward_batch: Any) -> None:
        """Where drafts may be a tree, their masks first: without memory for these the step is not
        served, and the time that they take is the step's."""
        if self._executor.has_draft_masks:
            spec_info = forward_batch.spec_info
            self._executor.read_draft_masks(
                spec_info.custom_mask,
                forward_batch.seq_lens,
                with_prefix=have_prefix(spec_info, self.verify_mask),
            )
        super()._load(plan, batch, forward_batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One layer of a verify step, q [B * T, Hq * D] -> [B * T, Hq * Dv]; or of another forward,
        which is the base's."""
        out = self._attend(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        if out is not None:
            return out
        if self._on_cpu and forward_batch.forward_mode.is_target_verify():
            raise RuntimeError(
                "sglang_pat: could not serve a verify step, for the reason in the last warning, "
                "and SGLang's attention on a CPU has none: restart without --speculative-algorithm"
            )
        return super().forward_extend(  # type: ignore[misc, no-any-return]
            q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs
        )


def have_prefix(spec_info: Any, verify_mask: Any) -> bool:
    """Whether the masks of a verify step are ``with_prefix``.

    ``verify_mask``: the buffer of SGLang's backend, into which EAGLE's workers write their masks (S
    speculative/eagle_worker_common.py:411); None without one. NGRAM's have a tensor of their own,
    by the rule of EAGLE's without a buffer (S speculative/ngram_worker.py:350).
    """
    from sglang.srt.speculative.eagle_utils import TreeMaskMode, default_tree_mask_mode
    from sglang.srt.speculative.spec_info import SpecInputType

    own = verify_mask is None or spec_info.spec_input_type == SpecInputType.NGRAM_VERIFY
    mode = default_tree_mask_mode() if own else verify_mask.mode
    full: bool = mode == TreeMaskMode.FULL_MASK
    return full
