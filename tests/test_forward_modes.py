# SPDX-License-Identifier: Apache-2.0
"""What data parallel attention makes prefills counts as what the scheduler meant: SGLang's own
batches, without a server, as that takes GPUs. tests/serving/test_modes.py has mixed steps."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.backend import BackendBed
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context

from sglang_pat.srt.hook import after_init_new


def scheduled(bed: BackendBed, requests: int) -> ScheduleBatch:
    """A decode step of the first requests of the bed; without any, that of an idle rank."""
    batch = ScheduleBatch(bed.reqs[:requests], bed.cache.table, tree_cache=bed.cache.tree)
    batch.forward_mode = ForwardMode.DECODE if requests else ForwardMode.IDLE
    batch.seq_lens = batch.seq_lens_cpu = bed.lens[:requests]
    batch.req_pool_indices = batch.req_pool_indices_cpu = bed.live.rows[:requests]
    batch.input_ids = batch.out_cache_loc = torch.zeros(requests, dtype=torch.int64)
    return batch


def prepare(bed: BackendBed, batch: ScheduleBatch, *, graph: bool) -> None:
    """Hand it to the backend as a prefill that another rank's made it: a decode step before
    ``init_new`` if all ranks replay a prefill graph, and if one is idle, by padding, after it."""
    runner = MagicMock(device="cpu", lora_manager=None)
    runner.model_config.model_is_mrope = runner.ngram_embedding_manager.enabled = False
    with get_context().override_server_args(device="cpu"):
        forward = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    after_init_new(forward, ForwardBatch, batch, bed.runner)
    forward.forward_mode = ForwardMode.EXTEND  # as prepare_mlp_sync_batch, which takes a GPU
    if graph:
        bed.backend.init_forward_metadata_out_graph(forward)
    else:
        bed.backend.init_forward_metadata(forward)


@pytest.mark.parametrize("graph", [False, True])
def test_prefills_made_of_decode_steps(bed: BackendBed, graph: bool) -> None:
    converted = scheduled(bed, requests=4)
    converted.convert_decode_to_extend()
    for batch in (converted, scheduled(bed, requests=4)):
        prepare(bed, batch, graph=graph)
    assert bed.fallbacks == {"decode": 2} and not bed.base_forwards
    prepare(bed, scheduled(bed, requests=0), graph=graph)
    assert bed.base_forwards == {"idle": 1}
    # Nor does a forward without a batch count as the one before it.
    bed.step(graph=graph, mode=ForwardMode.EXTEND, announced=False)
    assert bed.fallbacks == {"decode": 2} and bed.base_forwards == {"idle": 1, "extend": 1}


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> BackendBed:
    return BackendBed(monkeypatch)
