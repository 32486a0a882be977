# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: how many batches a scheduler decodes in turn."""

from __future__ import annotations


def micro_batches() -> int:
    """Batches that take turns in this scheduler: those of its loop for pipeline parallelism
    (``SchedulerPPMixin.init_pp_loop_state``), and 1 without, where the other loops run."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.pp_size + parallel.pp_async_batch_depth if parallel.pp_size > 1 else 1
