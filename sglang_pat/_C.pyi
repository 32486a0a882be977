# SPDX-License-Identifier: Apache-2.0
# Signatures of the extension; tests/core/test_exported_limits.py keeps them and the calls true.
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

BRANCH: int
WIDE_ROWS: int
LEAST_HEADROOM: int
HEAVY_ROWS: int
BRANCH_ROWS: int
CUDA_MAX_GROUP: int
CUDA_TILE_TOKENS: int
CUDA_QUEUE_INTS: int
CUDA_FIRST_UNIT_BYTES: int
CUTS: tuple[str, ...]
COST_NAMES: tuple[str, ...]
CUDA_HEAD_DIMS: tuple[int, ...]
CUDA_CODE: tuple[str, ...]
CPU_HEAD_DIM_STEP: int
CPU_MAX_HEAD_DIM: int
LAUNCHES: dict[str, int]
DTYPES: dict[str, int]
KV_DTYPES: dict[str, int]

class Target:  # the fields of sglang_pat.target.Target, which sets them by name
    token_values: int
    def __init__(self) -> None: ...

class Plan:
    num_queries: int
    num_items: int
    num_shared_items: int
    num_wide_items: int
    num_heavy_items: int
    num_paired_items: int
    joint: int
    num_segments: int
    branch_tokens: int
    list_tokens: int
    num_members: int
    num_partials: int
    num_q_heads: int
    num_kv_heads: int
    draft_tokens: int
    nbytes: int
    data_ptr: int
    last_token: int
    most_rows: int
    degraded: str
    seconds: float
    items: npt.NDArray[Any]
    item_segments: npt.NDArray[Any]
    members: npt.NDArray[Any]
    queries: npt.NDArray[Any]
    segments: npt.NDArray[Any]
    min_seq_lens: npt.NDArray[np.int64]
    max_seq_lens: npt.NDArray[np.int64]
    def fits(self, seq_lens_ptr: int, count: int) -> bool: ...
    def total_tokens(self, seq_lens_ptr: int, count: int) -> int: ...
    def kv_tokens_read(self, total_tokens: int) -> int: ...

class RadixPaths:
    @staticmethod
    def of_tree_core(core: Any, most_read: int) -> RadixPaths: ...
    @staticmethod
    def of_nodes(id: str, parent: str, key: str, most_read: int) -> RadixPaths: ...
    num_missing: int
    num_uncached: int
    num_unread: int
    num_too_long: int

class HandleReader:
    def __init__(self, paths: tuple[str, str, str], settle: int, recheck: int) -> None: ...
    def read(
        self,
        requests: Sequence[Any],
        rows_ptr: int,
        generations_ptr: int,
        num_generations: int,
        step: int,
        anew: bool,
    ) -> bytes: ...

class Planner:
    def __init__(self, target: Target) -> None: ...
    def plan(
        self,
        infos: Sequence[Any],
        seq_lens: npt.NDArray[np.int64],
    ) -> Plan: ...
    def plan_from_handles(
        self,
        handles: bytes,
        seq_lens: npt.NDArray[np.int64],
        paths: RadixPaths,
        leaf: Callable[[int, int], Any] | None,
    ) -> Plan: ...
    def last_paths(self) -> list[list[tuple[int, int, int]]]: ...
    costs: list[float]
    def last_tree(self) -> tuple[list[tuple[int, int, int, int]], list[int]]: ...
    def plan_packs(
        self,
        seq_lens: npt.ArrayLike,
        takes_over: Sequence[bool],
        piece_tokens: Sequence[int],
    ) -> Plan: ...
    def plan_again(self, seq_lens: npt.ArrayLike) -> Plan: ...

# Long lists of arguments stand in csrc/bindings alone; the test compares every call with them.
def decode_cpu(**arguments: Any) -> None: ...
def plan_bytes(items: int, members: int, queries: int, segments: int) -> int: ...

# Of a build with CUDA only.
def cuda_min_shared_bytes(head_dim: int) -> int: ...
def cuda_probe(device: int) -> str: ...

class PlanStaging:
    def __init__(self, bytes: int, count: int) -> None: ...
    def copy(self, plan: int, bytes: int, device: int, list: int, stream: int) -> None: ...

class CudaBuffers:
    def __init__(self, **arguments: Any) -> None: ...

def check_plan_cuda(**arguments: Any) -> None: ...
def check_decode_cuda(**arguments: Any) -> None: ...
def snapshot_cuda(buffers: CudaBuffers, **arguments: Any) -> None: ...
def read_draft_masks_cuda(**arguments: Any) -> None: ...
def decode_cuda(buffers: CudaBuffers, **arguments: Any) -> None: ...
