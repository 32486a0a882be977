# SPDX-License-Identifier: Apache-2.0
"""pat agrees with fa3 as far as flashinfer does, over all workloads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from serving.server import Answer

from .agreement import (
    LOADS,
    PEERS,
    Distance,
    Load,
    answers,
    check_forced,
    equal_share,
    forced_logprobs,
)
from .fleet import Fleet

OURS = (
    "ratio4-pat",
    "ratio4-pat-flashinfer-prefill",
    "ratio4-pat-no-graphs",
    "ratio4-pat-pages-branches",
)
SERVERS = (
    *("ratio4-fa3", "ratio4-flashinfer", *OURS),
    *("ratio5-fa3", "ratio5-pat", "ratio7-fa3", "ratio7-pat"),
)
# Sampling error of the rates: some 50 texts a workload, of which a near-tie halves a few.
MARGIN = 0.05


def check_beside_peers(kind: str, what: str, load: Load, server: Fleet) -> None:
    """Compare pat's log-probabilities of fa3's tokens with those of both peers (``check_forced``).
    ``kind`` names the servers, with ``{}`` for the backend."""
    texts = answers(server(kind.format("fa3")), load)
    found = {
        name: forced_logprobs(server(kind.format(name)), load, texts) for name in (*PEERS, "pat")
    }
    check_forced(f"{kind} {what}", found)


@dataclass(frozen=True)
class Reference:
    """What fa3 says to all workloads, and how far flashinfer is from that."""

    texts: dict[str, list[Answer]]
    logprobs: dict[str, list[float]]
    equal: float
    distance: Distance


def _mean_share(name: str, server: Fleet, texts: dict[str, list[Answer]]) -> float:
    """Share of equal tokens; of the second time, when all prompts are cached."""
    pairs: list[tuple[Answer, Answer]] = []
    for load_name, load in LOADS.items():
        answers(server(name), load)
        pairs += zip(answers(server(name), load), texts[load_name], strict=True)
    return equal_share([ours for ours, _ in pairs], [theirs for _, theirs in pairs])


@pytest.fixture(scope="session")
def reference(server: Fleet) -> Reference:
    fa3, flashinfer = server("ratio4-fa3"), server("ratio4-flashinfer")
    texts, logprobs = {}, {}
    for name, load in LOADS.items():
        answers(fa3, load)
        texts[name] = answers(fa3, load)
        logprobs[name] = forced_logprobs(fa3, load, texts[name])
    gaps = [
        Distance.between(forced_logprobs(flashinfer, load, texts[name]), logprobs[name])
        for name, load in LOADS.items()
    ]
    distance = Distance(sum(gap.mean for gap in gaps) / len(gaps), max(gap.largest for gap in gaps))
    return Reference(texts, logprobs, _mean_share("ratio4-flashinfer", server, texts), distance)


@pytest.mark.parametrize("name", OURS)
def test_greedy_answers(name: str, server: Fleet, reference: Reference) -> None:
    ours = _mean_share(name, server, reference.texts)
    print(f"{name}: {ours:.4f} of tokens as fa3's; flashinfer {reference.equal:.4f}")
    assert ours >= reference.equal - MARGIN


@pytest.mark.parametrize("load_name", sorted(LOADS))
@pytest.mark.parametrize("name", OURS)
def test_logprobs_of_a_continuation(
    name: str, load_name: str, server: Fleet, reference: Reference
) -> None:
    forced = forced_logprobs(server(name), LOADS[load_name], reference.texts[load_name])
    assert not any(math.isnan(value) for value in forced)
    found = Distance.between(forced, reference.logprobs[load_name])
    print(f"{name} {load_name}: {found}; flashinfer over all workloads {reference.distance}")
    assert found.about_as_small_as(reference.distance)


@pytest.mark.parametrize("model", ["ratio5", "ratio7"])
def test_other_heads(model: str, server: Fleet, reference: Reference) -> None:
    load = LOADS["multi_level"]
    texts = answers(server(f"{model}-fa3"), load)
    found = Distance.between(
        forced_logprobs(server(f"{model}-pat"), load, texts),
        forced_logprobs(server(f"{model}-fa3"), load, texts),
    )
    print(f"{model}: {found}")
    assert found.about_as_small_as(reference.distance)
    counted = server(f"{model}-pat").counters()
    assert counted.packed_steps > 0
    assert not [reason for reason in counted.fallbacks if reason.startswith("layer")]


def test_prefill_is_the_named_backends(server: Fleet) -> None:
    for name, backend in (
        ("ratio4-pat", "FlashAttentionBackend"),
        ("ratio4-pat-flashinfer-prefill", "flashinfer"),
    ):
        assert f"prefill on SGLang's own attention ({backend})" in server(name).text()


def test_branches_are_taken_where_always(server: Fleet) -> None:
    one = server("ratio4-pat-pages-branches")
    before = one.counters()
    answers(one, LOADS["multi_level"])
    assert (one.counters() - before).branched_steps > 0


def test_the_same_from_run_to_run(server: Fleet) -> None:
    """Bitwise where the batch is the same; else as often as fa3, whose products round by batch."""
    single, shared = LOADS["single"], LOADS["shared"]
    ours, theirs = server("ratio4-pat"), server("ratio4-fa3")
    serves_one = server("ratio4-pat-pages-branches")
    before = serves_one.counters()
    answers(serves_one, single)
    first = answers(serves_one, single)
    assert all(answers(serves_one, single) == first for _ in range(3))
    assert (serves_one.counters() - before).decode_steps > 0
    shares = {}
    for name, one in (("pat", ours), ("fa3", theirs)):
        answers(one, shared)
        runs = [answers(one, shared) for _ in range(3)]
        shares[name] = equal_share(runs[0] * 2, runs[1] + runs[2])
    print(f"equal from run to run: {shares}")
    assert shares["pat"] >= shares["fa3"] - MARGIN
