# SPDX-License-Identifier: Apache-2.0
"""Makes the attention backend of a model runner: ours over the right base with an executor as large
as the runner's pools and decode graphs need, or SGLang's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sglang_pat.capacity import MB, Capacity, fit_workspace
from sglang_pat.config import PatConfig
from sglang_pat.ops import Executor
from sglang_pat.srt import hook, launch, stock, support
from sglang_pat.srt.backend import PatDecodeMixin, PatVerifyMixin, extend
from sglang_pat.srt.layers import Heads, describe, heads_of, survey_layers
from sglang_pat.srt.metrics import start_reporter
from sglang_pat.stats import Stats
from sglang_pat.target import WITHOUT_BRANCHES, Target
from sglang_pat.workspace import Workspace

logger = logging.getLogger("sglang_pat")


def make_pat_backend(runner: Any, name: str, of_sglang: Callable[[Any], Any]) -> Any:
    """Make the backend of a model runner over SGLang's of that name, or that one, which
    ``of_sglang`` makes, where there is nothing to gain; or refuse.

    Raises RuntimeError with all reasons against serving this model in this configuration, each with
    the way out, and ValueError for an ``SGLANG_PAT_*`` variable that is not known.
    """
    config = PatConfig.from_env()
    launch.refuse_unsafe(runner)
    server = support.by_runner(runner)
    for known in support.reasons_of(support.KNOWN, server):
        logger.warning("sglang_pat: %s", known)
    idle = support.idle_reasons(server, config.min_batch)
    survey: dict[int, str] = {}
    if all(reason.serves for reason in idle):
        survey = survey_layers(runner)
        if survey and all(survey.values()):
            could = f"of the model it could serve {describe(survey)}"
            idle = [support.Reason(could, support.CHOOSE_ANOTHER)]
    if idle:
        logger.warning("sglang_pat: %s", support.idle_message(idle))
    if not all(reason.serves for reason in idle):
        start_reporter(Stats(), serving=False)
        logger.info("sglang_pat: attention is SGLang's own, %s", name)
        return of_sglang(runner)
    base, arguments = stock.base_of(name, runner)
    # Without a reason against it, a server that speculates has its verify steps served.
    speculates = runner.server_args.speculative_algorithm is not None
    mixin = PatVerifyMixin if speculates else PatDecodeMixin
    backend = extend(base, mixin)(
        runner, config, make_executor(runner, config), survey, packs=not idle, **arguments
    )
    dtype = str(runner.kv_cache_dtype).removeprefix("torch.")
    logger.info("sglang_pat: serves %s, K/V in %s", describe(survey), dtype)
    return backend


def make_executor(runner: Any, config: PatConfig) -> Executor:
    """The executor of a model runner. Its target is sized by the runner's pools and graphs and, on
    a GPU, by the budget of its workspace. After a sleep of the server it is as new."""
    from sglang.srt.arg_groups.overrides import resolving_view

    if config.policy != "default":
        logger.info("sglang_pat: %s", config)
    table, requests = runner.req_to_token_pool.req_to_token, runner.req_to_token_pool.size
    heads = heads_of(runner)
    # Whether the steps that pat serves verify draft tokens that may be a tree.
    masks = heads.draft_tokens > 1 and support.may_be_trees(resolving_view(runner.server_args))
    options = {
        **heads._asdict(),
        "kv_bytes": runner.kv_cache_dtype.itemsize,
        "policy": config.policy,
    }
    if table.device.type == "cpu":
        most = max(requests, _largest_graph(requests))
        target = Target.cpu(threads=torch.get_num_threads(), max_queries=most, **options)
        workspace = None
    else:
        capacity = _capacity(runner, heads, config)
        if masks:
            options["cuts"] = WITHOUT_BRANCHES  # they have no masks of drafted trees on a GPU
        target = Target.gpu(
            torch.cuda.get_device_properties(table.device),
            max_queries=capacity.max_queries,
            max_partials=capacity.max_partials,
            **options,
        )
        workspace = Workspace(
            target,
            table.shape[1],
            table.device,
            list_tokens=capacity.list_tokens,
            # Of latents there is one kernel, whatever the policy.
            launch=config.launch if target.v_head_dim == target.head_dim else "queue",
            draft_masks=masks,
            check=config.check,
            region=partial(hook.kv_cache_region, runner),
        )
    executor = Executor(target, table, workspace, draft_masks=masks)
    hook.sleepers.add(executor)  # which holds no reference
    return executor


def _capacity(runner: Any, heads: Heads, config: PatConfig) -> Capacity:
    """What the workspace is made for: every batch of the server's pools. It is logged.

    SGLang may shrink the K/V pool after the graphs are captured (S model_executor/
    model_runner_components/kv_pool_runtime.py:149): the list of slots is then longer than needed.
    """
    requests = runner.req_to_token_pool.size
    capacity = fit_workspace(
        num_q_heads=heads.num_q_heads,
        head_dim=heads.v_head_dim or heads.head_dim,
        draft_tokens=heads.draft_tokens,
        pool_requests=requests,
        pool_tokens=runner.max_total_num_tokens,
        largest_graph=_largest_graph(requests),
        budget=config.workspace_mb * MB,
    )
    if capacity.over_budget:
        logger.warning("sglang_pat: %s", capacity.warning())
    logger.info("sglang_pat: %s", capacity)
    return capacity


def _largest_graph(pool_requests: int) -> int:
    """Queries of the largest decode graph that SGLang may capture, padding included, as it clamps
    them (S model_executor/runner/base_cuda_graph_runner.py:65); 0 without graphs."""
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.utils import get_cuda_graph_max_batch_size

    asked = get_exec().graph.cuda_graph_config.decode
    if asked.backend == Backend.DISABLED:
        return 0
    sizes: list[int] = [*(asked.bs or ()), asked.max_bs or 0]
    captured: int = get_cuda_graph_max_batch_size(pool_requests)
    return min(max(sizes), captured)
