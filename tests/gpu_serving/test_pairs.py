# SPDX-License-Identifier: Apache-2.0
"""A server of pat beside the stock servers of the same model: log-probabilities of fa3's tokens as
near to both peers' as these are to each other, steps that are packed and counted, and what the log
says. ``-k fp8``, ``-k falcon_h1`` or ``-k qwen3-pat`` starts the servers of some rows only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from kit.hybrid_models import FAMILIES
from serving.workloads import random_prompt

from sglang_pat.demo.counters import Counters
from sglang_pat.demo.server import ServerError

from .agreement import (
    LOADS,
    NEW_TOKENS,
    PEERS,
    SYSTEM,
    Load,
    answers,
    check_forced,
    forced_logprobs,
)
from .fleet import Fleet
from .models import LAYERS

FA3_PREFILL = "prefill on SGLang's own attention (fa3)"
ALL_LOADS = ("shared", "multi_level", "disjoint", "long", "samples", "single")
THREE_LOADS = ("some", "multi_level", "disjoint")


@dataclass(frozen=True)
class Row:
    """``packs``: the load whose steps are packed, in which at most ``read`` of the K/V tokens are
    read; ``windows``: layers that are the base's; ``fallbacks``: those that may be; ``says``: what
    the log has."""

    ours: str
    peers: tuple[str, ...] = ("ratio4-fa3", "ratio4-flashinfer")
    loads: tuple[str, ...] = ALL_LOADS
    packs: str = "multi_level"
    read: float = 1.0
    windows: int = 0
    fallbacks: frozenset[str] = frozenset()
    says: tuple[str, ...] = (FA3_PREFILL,)

    @property
    def servers(self) -> tuple[str, ...]:
        return (self.ours, *self.peers)

    def __str__(self) -> str:
        return self.ours


def row_of(kind: str, peers: tuple[str, ...] = PEERS, **values: object) -> Row:
    """``kind``: the servers' names, with {} for the backend."""
    row = Row(kind.format("pat"), tuple(kind.format(peer) for peer in peers))
    return replace(row, **values)


SERVED = {
    "qwen3_next": "serves all 1 attention layers",
    "qwen3_5": "serves all 1 attention layers",
    "falcon_h1": "serves all 3 attention layers",
    "nemotron_h": "serves all 3 attention layers",
    "granite_hybrid": "serves all 3 attention layers",
    "gemma3": "serves 2 of 4 attention layers (2 with a sliding window)",
    "gpt_oss": "serves 2 of 4 attention layers (2 with a sliding window)",
    "deepseek_v2": "serves all 4 attention layers",
}
OF_FAMILIES = [
    row_of(
        f"{family}-{{}}",
        PEERS if family != "gpt_oss" else ("fa3", "triton"),  # FlashInfer takes no sinks
        loads=(*THREE_LOADS, "turn"),
        packs="turn",
        read=0.6,
        windows=2 * ("window" in SERVED[family]),
        says=(
            *(SERVED[family], "cuda graph: True"),
            "looks for shared prefixes in SGLang's radix cache (rust tree core)",
            *["Chunked prefix cache is turned on"] * (family == "deepseek_v2"),
        ),
    )
    for family in FAMILIES
]
TWO_GPUS = [
    Row(
        f"qwen3-pat-{ranks}",
        ("qwen3-fa3-tp2",),
        ("multi_level", "disjoint", "single"),  # the last leaves a rank without a request
        fallbacks=frozenset({"no batch from the scheduler", "decode"}),
        says=(),
    )
    for ranks in ("tp2", "dp2")
]
# Half of the heads on each: of sinks, of latents. Of GPT-OSS both peers, which are so far from each
# other that fixed limits say nothing.
TWO_GPUS += [
    replace(row, ours=f"{row.ours}-tp2", peers=tuple(f"{peer}-tp2" for peer in peers))
    for row in OF_FAMILIES
    for peers in [row.peers if row.ours.startswith("gpt_oss") else row.peers[:1]]
    if row.ours.startswith(("gpt_oss", "deepseek"))
]
ROWS = [
    Row(  # with prefill graphs and the tree of nodes in Rust, which pat does not switch off
        "ratio4-pat",
        says=(
            *("Capture target prefill CUDA graph end", "Tree Core: RustUnifiedTreeCore"),
            *("cuda graph: True", FA3_PREFILL),
        ),
    ),
    Row("ratio4-pat-no_graphs"),
    Row("ratio4-pat-pages"),
    Row(
        "ratio4-pat-flashinfer_prefill",
        says=("prefill on SGLang's own attention (flashinfer)",),
    ),
    row_of("ratio5-{}", PEERS[:1], loads=("multi_level",)),
    row_of("ratio7-{}", PEERS[:1], loads=("multi_level",)),
    *(  # by the option alone, and by the checkpoint's own scales
        row_of(kind, loads=THREE_LOADS, says=("layers, K/V in float8_e4m3fn", FA3_PREFILL))
        for kind in ("ratio4-{}-fp8_e4m3", "scaled4-{}")
    ),
    # Half of the layers are fa3's, the others cap their logits; all in one graph.
    row_of("gemma2-{}", PEERS[:1], loads=("multi_level",), windows=LAYERS // 2, says=()),
    *OF_FAMILIES,
    row_of("deepseek_v2-{}-pages64", PEERS[:1], loads=THREE_LOADS),
    row_of("deepseek_v2-{}-no_graphs", PEERS[:1], loads=("multi_level",)),
    *(TWO_GPUS if torch.cuda.device_count() > 1 else []),
]
REFUSED = [
    Row("ratio4-pat-fp8_e5m2", (), says=("on cuda pat reads bfloat16, float16",)),
    Row("ratio4-pat-compiled", (), says=("it would freeze a plan",)),
    Row("ratio4-pat-deterministic", (), says=("deterministic",)),
]


def check_counted(row: Row, load: str, counted: Counters) -> None:
    """What pat counted while it decoded a load."""
    if load == "single" and row.ours != "ratio4-pat-pages":
        assert counted.decode_steps == 0 < counted.base_forwards["small_batch"]
        return
    windows = {"a sliding window": row.windows * counted.decode_steps} if row.windows else {}
    assert counted.base_layers == windows
    assert counted.fallbacks.keys() <= row.fallbacks
    if not row.fallbacks:
        assert counted.plans_made + counted.plans_reused == counted.decode_steps > 0
    if load == row.packs:
        assert counted.packed_steps >= NEW_TOKENS // 2  # requests do not all begin at once
        assert counted.kv_tokens_read < row.read * counted.kv_tokens_unpacked
    if load == "disjoint":
        assert counted.packed_steps == 0


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_beside_peers(row: Row, server: Fleet) -> None:
    ours = server(row.ours)
    found: dict[str, list[float]] = {}
    for name in row.loads:
        load = LOADS[name]
        texts = answers(server(row.peers[0]), load)
        for peer in row.peers:
            of_peer = forced_logprobs(server(peer), load, texts)
            found.setdefault(peer.split("-")[1], []).extend(of_peer)
        logprobs, counted = ours.counted(forced_logprobs, ours, load, texts)
        found.setdefault("pat", []).extend(logprobs)
        check_counted(row, name, counted)
    values = found["pat"]
    assert sum(values) / len(values) < -0.1  # of a model that is certain, nothing could be told
    check_forced(row.ours, found)
    for said in row.says:
        assert said in ours.text()
    ours.check_alive()


@pytest.mark.parametrize("row", [row for row in OF_FAMILIES if not row.windows], ids=str)
def test_a_second_turn_starts_from_the_state_of_the_first(row: Row, server: Fleet) -> None:
    """The system prompt and its state stay in the tree, and are where fa3's server has them."""
    first = LOADS["turn"]
    texts = {}
    for name in row.servers[:2]:
        server(name).post("/flush_cache")
        texts[name] = answers(server(name), first)
    turn = Load(
        tuple(
            prompt + text.tokens + random_prompt(seed=95 + i, length=12)
            for i, (prompt, text) in enumerate(zip(first.prompts, texts[row.peers[0]], strict=True))
        )
    )
    wanted = answers(server(row.peers[0]), turn)
    found, counted = server(row.ours).counted(answers, server(row.ours), turn)
    check_counted(replace(row, packs="second"), "second", counted)
    for given in (found, wanted):
        assert min(answer.cached_tokens for answer in given) >= len(SYSTEM) // 256 * 256
    forced = {name: forced_logprobs(server(name), turn, wanted) for name in row.servers}
    check_forced(str(row), {name.split("-")[1]: values for name, values in forced.items()})


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_refused_with_a_reason(row: Row, server: Fleet) -> None:
    with pytest.raises(ServerError):
        server(row.ours)
    assert row.says[0] in server.starting(row.ours).text()
