# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat doctor --model``: what ``pat`` would do on a server, told without its weights.

Server flags are parsed and resolved by SGLang itself (``flags``), and config.json is read by its
``ModelConfig``. The reasons are those that the launcher and the backend give.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

from sglang_pat.capacity import MB, Capacity, fit_workspace
from sglang_pat.config import PatConfig
from sglang_pat.gpus import untried
from sglang_pat.srt import BACKEND, checkpoint, launch, layers
from sglang_pat.srt.flags import SGLangRefused, asked_gpu, model_of, resolve
from sglang_pat.srt.idle import CHOOSE_ANOTHER
from sglang_pat.srt.machines import Gpu, as_if_here, gpu_here
from sglang_pat.srt.speculation import draft_tokens_of

# SGLang's bounds on the requests that a server runs at once, unless --max-running-requests is set
# (S mem_cache/kv_cache_configurator.py:3124); between them it depends on the free memory.
_MOST_REQUESTS = 4096
_BY_SGLANG = "SGLang itself refuses: "

Status = Literal["served", "served in part", "nothing to gain", "refused"]


@dataclass(frozen=True)
class Advice:
    """A reason and what to do about it."""

    reason: str
    way_out: str


@dataclass(frozen=True)
class Verdict:
    """What ``pat`` would do.

    ``layers``: layer ids by the reason why SGLang's own code runs them, "" for those of ``pat``.
    ``kv_dtype``: of K and V, where SGLang takes the flags. ``workspace``: on a GPU, where a layer
    is served. ``notes``: what else to know of the GPU.
    """

    device: str
    model: str
    kv_dtype: str = ""
    refusals: list[str] = field(default_factory=list)
    idle: list[Advice] = field(default_factory=list)
    layers: dict[str, list[int]] = field(default_factory=dict)
    workspace: Capacity | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> Status:
        if self.refusals:
            return "refused"
        if self.idle or not self.layers.get(""):
            return "nothing to gain"
        of_attention = set(self.layers) - {layers.NO_ATTENTION}
        return "served" if of_attention == {""} else "served in part"

    @property
    def ok(self) -> bool:
        """Whether ``pat`` serves at least a part."""
        return self.status in ("served", "served in part")

    def as_json(self) -> dict[str, Any]:
        """For ``--json``: bytes, layer ids, and words for people."""
        workspace = None
        if self.workspace is not None:
            workspace = {
                "bytes": self.workspace.total,
                "max_requests": self.workspace.max_queries,
                "over_budget": self.workspace.over_budget,
            }
        return {
            "verdict": self.status,
            "device": self.device,
            "model": self.model,
            "kv_dtype": self.kv_dtype,
            "refused": self.refusals,
            "nothing_to_gain": [vars(advice) for advice in self.idle],
            "layers_served": self.layers.get("", []),
            "layers_of_sglang": {why: ids for why, ids in self.layers.items() if why},
            "workspace": workspace,
            "notes": self.notes,
        }

    def lines(self) -> list[tuple[str, str, str]]:
        """Topic, what was found and the way out, for people."""
        stored = f", K/V in {self.kv_dtype}" if self.kv_dtype else ""
        found = [("server", f"{self.model} on {self.device}{stored}", "")]
        found += [("refused", *_split(reason)) for reason in self.refusals]
        found += [("nothing to gain", advice.reason, advice.way_out) for advice in self.idle]
        for reason, ids in sorted(self.layers.items()):
            words = f"{len(ids)} ({layers.ranges(ids)})"
            if reason:
                topic = "other layers" if reason == layers.NO_ATTENTION else "layers of SGLang"
                found.append((topic, f"{words}: {reason}", ""))
            else:
                found.append(("layers of pat", words, ""))
        if self.workspace is not None:
            found.append(("workspace", str(self.workspace).removeprefix("workspace: "), ""))
            if self.workspace.over_budget:
                found.append(("workspace", self.workspace.warning(), ""))
        elif self.layers and self.device == "cpu":
            found.append(("workspace", "none: on a CPU nothing is allocated", ""))
        elif not self.refusals:
            found.append(("workspace", "none, as pat serves nothing", ""))
        return found + [("note", *_split(note)) for note in self.notes]


def judge(arguments: Sequence[str], *, gpu: str = "") -> Verdict:
    """The verdict on a server with these flags, ``--model-path`` among them.

    ``gpu``: the name of a GPU to ask about instead of this machine. Without ``pat`` among the
    flags, ``--attention-backend pat`` is added.

    Raises QuestionError, also for flags that SGLang does not know.
    """
    asked = asked_gpu(arguments, gpu)
    try:
        server_args, model_config = resolve(arguments, asked)
    except SGLangRefused as refused:
        return Verdict(
            device=asked.name if asked is not None else "this machine",
            model=model_of(arguments),
            refusals=[f"{_BY_SGLANG}{refused}"],
        )
    with as_if_here(asked) if asked is not None else nullcontext():
        return weigh(server_args, model_config, asked)


def weigh(server_args: Any, model_config: Any, gpu: Gpu | None = None) -> Verdict:
    """The verdict on resolved arguments. ``gpu``: where not this machine's, ``as_if_here``."""
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_pat.srt.support import config_refusals, idle_reasons

    args = resolving_view(server_args)
    refusals = list(config_refusals(server_args, model_config))
    gpu = (gpu or gpu_here(args.base_gpu_id)) if args.device == "cuda" else None
    if args.device == "cuda":
        refusals += _gpu_refusals(gpu, model_config)
    config = PatConfig.from_env()
    idle = idle_reasons(server_args, model_config, min_batch=config.min_batch)
    found: dict[str, list[int]] = {}
    workspace = None
    if not refusals and all(reason.serves for reason in idle):
        found = _layers(args, model_config, gpu)
        if "" in found and args.device == "cuda":
            workspace = _workspace(args, model_config, config)
    return Verdict(
        device=args.device if gpu is None else gpu.name,
        model=_describe(model_config),
        kv_dtype=_kv_dtype(args.kv_cache_dtype, model_config),
        refusals=refusals,
        idle=[Advice(reason.reason, reason.way_out) for reason in idle],
        layers=found,
        workspace=workspace,
        notes=[] if gpu is None or refusals else list(_notes(gpu, server_args, model_config)),
    )


def _gpu_refusals(gpu: Gpu | None, model_config: Any) -> Iterator[str]:
    if gpu is None:
        yield f"no GPU was found for --device cuda: {launch.ON_CPU}, or ask --gpu"
        return
    if reason := launch.reason_against_capability(gpu.capability, gpu.name):
        yield reason
    yield from launch.blackwell_refusals(model_config)


def _notes(gpu: Gpu, server_args: Any, model_config: Any) -> Iterator[str]:
    from sglang_pat.srt.stock import fit_pages, lost_states, stock_backend

    if words := untried(gpu.capability):
        yield words
    name = stock_backend(server_args, model_config)
    if why := fit_pages(name, server_args, model_config)[1]:
        yield why
    if why := lost_states(server_args, model_config):
        yield why


def _describe(model_config: Any) -> str:
    names = ", ".join(model_config.hf_config.architectures or ("an unnamed architecture",))
    return (
        f"{names}, {model_config.num_hidden_layers} layers, {model_config.num_attention_heads} "
        f"query and {model_config.get_total_num_kv_heads()} KV heads of dim {model_config.head_dim}"
    )


def _kv_dtype(choice: str, model_config: Any) -> str:
    if choice in checkpoint.SCALED_KV:
        return choice
    return str(checkpoint.kv_cache_dtype(choice, model_config)).removeprefix("torch.")


def _layers(args: Any, model_config: Any, gpu: Gpu | None) -> dict[str, list[int]]:
    from sglang.srt.runtime_context import attn_tp_size_of

    from sglang_pat.srt.refusals import reason_against_heads

    ranks = attn_tp_size_of(args)
    reasons = layers.reasons_by_layer(model_config)
    heads = SimpleNamespace(
        qk_head_dim=model_config.head_dim,
        v_head_dim=model_config.v_head_dim,
        tp_q_head_num=model_config.get_num_attention_heads(ranks),
        tp_k_head_num=model_config.get_num_kv_heads(ranks),
    )
    against_heads = reason_against_heads(
        heads,
        args.device,
        None if gpu is None else gpu.shared_per_block,
        draft_tokens=draft_tokens_of(args),
    )
    if args.device != "cpu" and draft_tokens_of(args) > 1 and layers.caps_logits(model_config):
        against_heads = layers.CAPPED
    return layers.grouped([reason or against_heads for reason in reasons])


def _workspace(args: Any, model_config: Any, config: PatConfig) -> Capacity:
    """What the backend will allocate on each GPU, for as many requests as the server may run."""
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import attn_tp_size_of

    requests = (args.max_running_requests or _MOST_REQUESTS) // max(1, int(args.attn_dp_size))
    requests = max(1, requests)
    decode = args.cuda_graph_config.decode
    sizes = [0] if decode.backend == Backend.DISABLED else [*(decode.bs or ()), decode.max_bs or 0]
    return fit_workspace(
        num_q_heads=model_config.get_num_attention_heads(attn_tp_size_of(args)),
        head_dim=model_config.head_dim,
        pool_requests=requests,
        pool_tokens=requests * model_config.context_len,  # the pool's size is not known yet
        largest_graph=min(max(sizes), requests),
        partial_dtype=config.partial_dtype,
        budget=config.workspace_mb * MB,
        draft_tokens=draft_tokens_of(args),
    )


def _split(reason: str) -> tuple[str, str]:
    """A reason and its way out, which stands behind the last semicolon or colon; in SGLang's own
    words it may stand anywhere."""
    if reason.startswith(_BY_SGLANG):
        # Trees of draft tokens on larger pages (S arg_groups/speculative_hook.py:1279 and 1362).
        if "speculative_eagle_topk" in reason and "page_size" in reason:
            return reason, "set --page-size 1"
        names_pat = re.search(rf"\b{BACKEND}\b", reason)
        return reason, CHOOSE_ANOTHER if names_pat else ""
    for mark in ("; ", ": "):
        head, found, tail = reason.rpartition(mark)
        if found:
            return head, tail
    return reason, ""
