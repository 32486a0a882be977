# SPDX-License-Identifier: Apache-2.0
"""What pat does not serve on a GPU: layers go to fa3 and are counted, servers are refused."""

from __future__ import annotations

import pytest

from sglang_pat.demo.server import ServerError

from .agreement import LOADS, Distance, answers, forced_logprobs
from .fleet import REFUSED, Fleet
from .models import LAYERS

SERVERS = ("ratio4-pat", "gemma2-pat", "gemma2-fa3", *REFUSED)


def test_steps_are_served_in_graphs_and_counted(server: Fleet) -> None:
    one = server("ratio4-pat")
    before = one.counters()
    answers(one, LOADS["multi_level"])
    counted = one.counters() - before
    assert counted.packed_steps > 0
    assert counted.plans_made + counted.plans_reused == counted.decode_steps
    assert not counted.fallbacks
    assert "cuda graph: True" in one.text()
    assert "prefill on SGLang's own attention (FlashAttentionBackend)" in one.text()


def test_what_sglang_does_by_default_is_on(server: Fleet) -> None:
    """Prefill graphs, and the tree of nodes in Rust: neither is switched off for pat."""
    log = server("ratio4-pat").text()
    assert "Capture target prefill CUDA graph end" in log
    assert "Tree Core: RustUnifiedTreeCore" in log


def test_sliding_windows_and_capped_logits(server: Fleet) -> None:
    """Gemma 2: every other layer is fa3's, the others cap their logits; all in one graph."""
    ours, theirs = server("gemma2-pat"), server("gemma2-fa3")
    load = LOADS["multi_level"]
    texts = answers(theirs, load)
    before = ours.counters()
    forced = forced_logprobs(ours, load, texts)
    assert sum(forced) / len(forced) < -0.1  # of a model that is certain, nothing could be told
    counted = ours.counters() - before
    found = Distance.between(forced, forced_logprobs(theirs, load, texts))
    print(f"gemma2: {found}")
    assert found.mean < 0.05 and found.largest < 0.5
    assert counted.packed_steps > 0
    assert counted.base_layers == {"a sliding window": LAYERS // 2 * counted.decode_steps}
    assert not counted.fallbacks


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str, server: Fleet) -> None:
    with pytest.raises(ServerError):
        server(name)
    assert REFUSED[name] in server.starting(name).text()


def test_servers_live_on(server: Fleet) -> None:
    """After everything above, in whatever order it ran."""
    for name in ("ratio4-pat", "gemma2-pat"):
        server(name).check_alive()
        assert len(answers(server(name), LOADS["single"])[0].tokens) > 0
