# SPDX-License-Identifier: Apache-2.0
"""The planner packs the loads of which tests of GPU servers assert that steps are packed. No
server, no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from gpu_serving import test_adapters as adapters
from gpu_serving.agreement import LOADS, NEW_TOKENS
from serving.server import Prompt

from sglang_pat import Target
from sglang_pat.planner import Node, Planner

PROMPTS = LOADS["multi_level"].prompts
GENERATED = (1, NEW_TOKENS // 2, NEW_TOKENS)


def radix_paths(prompts: Sequence[Prompt]) -> list[list[Node]]:
    """The nodes on the path of each prompt in a radix tree that holds all of them."""
    paths: list[list[Node]] = [[] for _ in prompts]
    num_nodes = 0

    def descend(queries: list[int], depth: int) -> None:
        """``queries`` have their first ``depth`` tokens in common."""
        nonlocal num_nodes
        children: dict[int, list[int]] = {}
        for query in queries:
            if len(prompts[query]) > depth:
                children.setdefault(prompts[query][depth], []).append(query)
        for child in children.values():
            end = depth + 1
            shortest = min(len(prompts[query]) for query in child)
            while end < shortest and len({prompts[query][end] for query in child}) == 1:
                end += 1
            num_nodes += 1
            for query in child:
                paths[query].append(Node(num_nodes, depth, end))
            descend(child, end)

    descend(list(range(len(prompts))), 0)
    return paths


def shared_items(
    prompts: Sequence[Prompt],
    generated: int,
    heads: tuple[int, int],
    head_dim: int = 128,
    kv_bytes: int = 2,
) -> int:
    """Of the plan when each request has ``generated`` tokens of its own."""
    q_heads, kv_heads = heads
    target = Target.h200(
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_queries=len(prompts),
        kv_bytes=kv_bytes,
    )
    lengths = [len(prompt) + generated for prompt in prompts]
    return Planner(target).plan(radix_paths(prompts), lengths).num_shared_items


def test_radix_paths() -> None:
    paths = radix_paths([(1, 2, 3), (1, 2, 4, 5), (1, 2), (7,), (7,)])
    assert paths == [
        [(1, 0, 2), (2, 2, 3)],
        [(1, 0, 2), (3, 2, 4)],
        [(1, 0, 2)],
        [(4, 0, 1)],
        [(4, 0, 1)],
    ]


@pytest.mark.parametrize("generated", GENERATED)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(8, 2), (10, 2), (14, 2), (4, 1), (4, 2), (16, 4), (28, 4)])
def test_plans_share_items(heads: tuple[int, int], head_dim: int, generated: int) -> None:
    for kv_bytes in (1, 2):
        assert shared_items(PROMPTS, generated, heads, head_dim, kv_bytes) > 0


@pytest.mark.parametrize("generated", GENERATED[:2])
@pytest.mark.parametrize("rank", [0, 1])
def test_plans_of_a_data_parallel_rank_share_items(rank: int, generated: int) -> None:
    """SGLang deals the requests to the ranks in turn; each rank has all heads. Towards the end of
    the answers a rank's requests are read by themselves."""
    assert shared_items(PROMPTS[rank::2], generated, (8, 2)) > 0


@pytest.mark.parametrize("generated", GENERATED)
def test_plans_of_adapters_share_items(generated: int) -> None:
    """SGLang keeps the K/V of each adapter under a root of its own, as a first token would."""
    colours = [adapters.COLOURS.index(colour) for colour in adapters.LOAD.adapters or ()]
    loads = {
        "several": [(-1 - i, *p) for i, p in zip(colours, adapters.LOAD.prompts, strict=True)],
        "one": [adapters.ALONE] * adapters.TWINS,
    }
    for name, prompts in loads.items():
        assert shared_items(prompts, generated, (8, 2)) > 0, name
    assert shared_items([(-1 - i, *adapters.ALONE) for i in range(3)], generated, (8, 2)) == 0
