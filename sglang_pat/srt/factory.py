# SPDX-License-Identifier: Apache-2.0
"""Makes the attention backend of a model runner: ours over the right base, or SGLang's own."""

from __future__ import annotations

import logging
from typing import Any

from sglang_pat.config import PatConfig
from sglang_pat.srt import refusals, upstream
from sglang_pat.srt.backend import PatDecodeMixin, extend
from sglang_pat.srt.base import base_of, build_stock
from sglang_pat.srt.reporting import start_reporter
from sglang_pat.srt.stock import lost_states
from sglang_pat.srt.support import CHOOSE_ANOTHER, IdleReason, idle_message, idle_reasons
from sglang_pat.srt.survey import Survey, survey_layers
from sglang_pat.srt.verify import PatVerifyMixin
from sglang_pat.stats import Stats

logger = logging.getLogger("sglang_pat")


def make_pat_backend(runner: Any) -> Any:
    """Make the backend of a model runner, or refuse.

    Raises RuntimeError with all reasons against serving this model in this configuration, each with
    the way out, and ValueError for an ``SGLANG_PAT_*`` variable that is not known.
    """
    config = PatConfig.from_env()
    refusals.refuse_unsafe(runner)
    if runner.is_draft_worker:  # drafts do not go through the scheduler's batches
        name, stock = build_stock(runner)
        if runner.draft_attention_backend is None and not upstream.draft_with(name):
            # By this name, else by the server's, "pat", SGLang makes the draft's other backends
            # (speculative/draft_utils.py), and knows only its own there.
            runner.draft_attention_backend = name
        logger.info("sglang_pat: the draft worker's attention is SGLang's own, %s", name)
        return stock
    idle = idle_reasons(runner.server_args, runner.model_config, min_batch=config.min_batch)
    survey = Survey({})
    if all(reason.serves for reason in idle):
        survey = survey_layers(runner)
        if survey.serves_none:
            idle = [IdleReason(f"of the model it could serve {survey}", CHOOSE_ANOTHER)]
    if idle:
        logger.warning("sglang_pat: %s", idle_message(idle))
    if not all(reason.serves for reason in idle):
        start_reporter(Stats(), serving=False)
        name, stock = build_stock(runner)
        logger.info("sglang_pat: attention is SGLang's own, %s", name)
        return stock
    if why := lost_states(runner.server_args, runner.model_config):
        logger.warning("sglang_pat: %s", why)
    base = base_of(runner)
    # Without a reason against it, a server that speculates has its verify steps served.
    speculates = runner.server_args.speculative_algorithm is not None
    mixin = PatVerifyMixin if speculates else PatDecodeMixin
    backend = extend(base.cls, mixin)(runner, config, survey, packs=not idle, **base.arguments)
    dtype = str(runner.kv_cache_dtype).removeprefix("torch.")
    logger.info("sglang_pat: serves %s, K/V in %s", survey, dtype)
    return backend
