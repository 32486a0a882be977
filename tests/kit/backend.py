# SPDX-License-Identifier: Apache-2.0
"""The backend over a base and an executor that record what is asked of them, step by step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpecInputType

from benchmarks.host.live import LiveCache
from kit.drafts import chains, custom_mask
from sglang_pat.config import DEFAULT_MIN_BATCH, PatConfig
from sglang_pat.draft_masks import masks_of
from sglang_pat.planner import Plan
from sglang_pat.srt import backend
from sglang_pat.srt.backend import PatDecodeMixin, PatVerifyMixin
from sglang_pat.srt.hook import after_init_new
from sglang_pat.stats import Stats
from sglang_pat.target import Target

QUERIES, HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 3
SYSTEM = 200  # tokens that the requests share
TARGET = Target.cpu(
    threads=2, num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM, max_queries=16
)
# What the base is asked for a forward that it prepares, by how that is prepared.
ASKED = {
    "capture": ["capture", "in graph"],
    "replay": ["out graph"],
    "eager": ["eager", "out graph", "in graph"],
}


class RecordingBase:
    """In place of SGLang's own backend: notes in ``calls`` what is asked of it."""

    verify_mask: Any = None
    read_ends = SharedReadEnds.UNKNOWN

    def __init__(self, runner: Any) -> None:
        self.calls: list[str] = []
        k_caches, v_caches = torch.zeros(2, LAYERS, 8, HEADS, HEAD_DIM)
        self.token_to_kv_pool = SimpleNamespace(
            device="cpu",
            get_key_buffer=k_caches.__getitem__,
            get_value_buffer=v_caches.__getitem__,
        )
        self.req_to_token_pool = runner.req_to_token_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.calls.append("eager")
        # As the base class of SGLang does it.
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, _batch: Any, in_capture: bool = False) -> None:
        self.calls.append("capture" if in_capture else "out graph")

    def init_forward_metadata_in_graph(self, _batch: Any) -> None:
        self.calls.append("in graph")

    def shared_read_ends(self, _mode: ForwardMode) -> SharedReadEnds:
        return self.read_ends

    def forward_decode(self, q: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        self.calls.append("layer")
        return q

    forward_extend = forward_decode


class RecordingExecutor:
    """In place of an executor: notes the plans that it is given and the lengths of each snapshot,
    and gives queries back as a layer's output. ``room``: tokens that the device can list."""

    has_draft_masks = True
    room = 1 << 31

    def __init__(self, target: Target = TARGET) -> None:
        self.target = target
        self.plans: list[Plan] = []
        self.snapshots: list[list[int]] = []
        self.masks: list[torch.Tensor] = []
        self.on_host = 0  # plans whose list is in the host's memory

    def load(self, plan: Plan, num_rows: int, *, list_on_host: bool = False) -> None:
        assert plan.num_queries <= num_rows
        if not list_on_host and plan.list_tokens > self.room:
            raise torch.cuda.OutOfMemoryError("of 2 MB 1 MB is free")
        self.on_host += list_on_host
        self.plans.append(plan)

    def snapshot(self, rows: torch.Tensor, seq_lens: torch.Tensor) -> None:
        assert self.plans[-1].num_queries <= len(rows) == len(seq_lens)
        self.snapshots.append(seq_lens.tolist())

    def read_draft_masks(self, mask: Any, seq_lens: Any, *, with_prefix: bool) -> None:
        tokens = self.target.draft_tokens
        self.masks.append(masks_of(mask, seq_lens, tokens, with_prefix=with_prefix))

    def decode(self, q: torch.Tensor, k: Any, v: Any, out: torch.Tensor, **_: Any) -> None:
        out.copy_(q)


class BackendBed:
    """A test bed: the backend over a ``RecordingBase``, a ``RecordingExecutor``, and a batch of
    four requests of one system prompt in a real cache.

    ``survey``: what is known of the model's layers before the first forward. ``check``: whether
    each step compares slots. ``target``: of a server that speculates, if it has several draft
    tokens. ``serving``: what the reporter is told later.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        survey: dict[int, str] | None = None,
        *,
        check: bool = True,
        target: Target = TARGET,
        min_batch: int = DEFAULT_MIN_BATCH,
    ) -> None:
        self.cache = LiveCache("python", slots=4000, rows=QUERIES, context=512)
        self.runner = SimpleNamespace(
            device="cpu",
            req_to_token_pool=self.cache.table,
            prefill_attention_backend_str="recording",
        )
        self.executor = RecordingExecutor(target)
        self.serving: list[bool] = []
        reporter = SimpleNamespace(set_serving=self.serving.append)
        monkeypatch.setattr(backend, "start_reporter", lambda *_, **__: reporter)
        monkeypatch.setattr(backend, "micro_batches", lambda: 1)
        config = PatConfig(check=check, min_batch=min_batch)
        mixin = PatDecodeMixin if target.draft_tokens == 1 else PatVerifyMixin
        made = backend.extend(RecordingBase, mixin)(
            self.runner, config, self.executor, survey or {}
        )
        self.backend = made
        self.stats: Stats = made._stats
        rng = random.Random(0)
        system = [rng.randrange(1000) for _ in range(SYSTEM)]
        self.all = [self.cache.admit([*system, 1000 + i]) for i in range(QUERIES)]
        self.use(self.all)

    def use(self, reqs: list[Any]) -> None:
        """Make these the batch, with a new tensor of rows, as SGLang has of one that changes."""
        self.reqs = reqs
        self.live, self.lens = self.cache.batch(reqs)

    @property
    def plan(self) -> Plan:
        """The plan loaded last."""
        return self.executor.plans[-1]

    def announce(self, mode: ForwardMode, decoding_reqs: Any = None) -> None:
        """Put the batch into the backend's mailbox, as the scheduler does through the hook."""
        scheduled = SimpleNamespace(
            reqs=self.reqs,
            tree_cache=self.cache.tree,
            req_pool_indices_cpu=self.live.rows,
            forward_mode=mode,
            decoding_reqs=decoding_reqs,
        )
        after_init_new(None, object, scheduled, self.runner)

    def step(
        self,
        how: str = "replay",
        *,
        padding: int = 0,
        mode: ForwardMode = ForwardMode.DECODE,
        idle: bool = False,
        announced: bool = True,
        on_host: bool = True,
        **fields: Any,
    ) -> list[str]:
        """Announce a batch and prepare its forward; what the base was asked.

        ``how``: one of ``ASKED``. ``padding``: rows that are not requests. ``idle``: the batch is
        that of a rank without requests. ``announced``: False for a forward that does not come from
        the scheduler. ``on_host``: False for lengths on the device only. ``fields``: of the batch.
        """
        if announced and how != "capture":
            self.announce(ForwardMode.IDLE if idle else mode)
        lens = self.lens[:0] if idle else self.lens
        rows = torch.cat([self.live.rows[: len(lens)], torch.zeros(padding, dtype=torch.int64)])
        lens = torch.cat([lens, torch.ones(padding, dtype=torch.int64)])
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(lens),
            num_padding=padding,
            seq_lens=lens,
            seq_lens_cpu=lens if on_host else None,
            req_pool_indices=rows,
            **({"spec_info": None, "encoder_lens": None} | fields),
        )
        self.backend.calls.clear()
        if how == "eager":
            self.backend.init_forward_metadata(batch)
        else:
            self.backend.init_forward_metadata_out_graph(batch, in_capture=how == "capture")
        if how == "capture":  # a replay runs what this launched
            self.backend.init_forward_metadata_in_graph(batch)
        return list(self.backend.calls)

    def verify(
        self,
        how: str = "eager",
        masks: torch.Tensor | None = None,
        kind: SpecInputType = SpecInputType.NGRAM_VERIFY,
        **options: Any,
    ) -> list[str]:
        """Prepare a verify step; what the base was asked. ``masks`` [B, T]: by default chains."""
        if masks is None:
            masks = chains(len(self.lens), self.executor.target.draft_tokens)
        spec_info = SimpleNamespace(
            draft_token_num=masks.shape[1],
            custom_mask=custom_mask(masks, self.lens),
            spec_input_type=kind,
        )
        return self.step(how, mode=ForwardMode.TARGET_VERIFY, spec_info=spec_info, **options)

    def capture(self, *paddings: int, **options: Any) -> None:
        """Capture a graph of the batch with so many rows of padding each, and a layer of ours."""
        for padding in paddings or (0,):
            self.step("capture", padding=padding, **options)
            self.layer(0)

    def layer(self, layer_id: int = 0, window: int = -1, **kwargs: Any) -> list[str]:
        """Run a layer of the forward that was prepared; what the base was asked. ``kwargs``:
        further arguments of ``forward_decode``."""
        self.backend.calls.clear()
        q = torch.zeros(QUERIES, HEADS * HEAD_DIM)
        self.backend.forward_decode(q, None, None, make_layer(layer_id, window), None, **kwargs)
        return list(self.backend.calls)


def make_layer(layer_id: int, window: int = -1) -> RadixAttention:
    """An attention layer of the model; ``window``: of its last tokens, or -1 for full attention."""
    of = {"layer_id": layer_id, "sliding_window_size": window}
    return RadixAttention(HEADS, HEAD_DIM, 0.25, HEADS, **of)
