# SPDX-License-Identifier: Apache-2.0
"""The counters of a real server add up."""

from __future__ import annotations

from .conftest import Serve
from .server import Config
from .workloads import WORKLOADS, random_prompt

# Without overlap every decode step is one that a request needs, and sees its prefill in the tree.
EXACT = Config("page1-no_overlap", args=("--disable-overlap-schedule",))


def test_one_request_is_counted_exactly(serve: Serve) -> None:
    server = serve(EXACT)
    before = server.counters()
    server.generate([random_prompt(seed=100, length=50)], 20)
    counted = server.counters() - before
    assert counted.decode_steps == 19  # the first token comes from the prefill
    assert counted.packed_steps == 0
    assert counted.kv_tokens_unpacked == sum(50 + i for i in range(1, 20))
    assert counted.kv_tokens_read == counted.kv_tokens_unpacked
    assert counted.plans_made + counted.plans_reused == 19
    assert counted.fallbacks == {"extend": 1}


def test_identical_requests_read_their_prompt_once(serve: Serve) -> None:
    server = serve(EXACT)
    prompt = random_prompt(seed=101, length=200)
    server.generate([prompt], 1)
    before = server.counters()
    server.generate([prompt] * 4, 30)
    counted = server.counters() - before
    assert counted.packed_steps >= 28
    assert counted.decode_steps == counted.plans_made + counted.plans_reused
    # Four requests of 200 + i tokens; packed, 200 shared tokens and four tails of i.
    assert counted.kv_tokens_read < 0.4 * counted.kv_tokens_unpacked


def test_steady_steps_reuse_plans(serve: Serve) -> None:
    server = serve(EXACT)
    prompts = WORKLOADS["crowd"].prompts
    server.generate(prompts, 1)
    before = server.counters()
    server.generate(prompts, 257)
    counted = server.counters() - before
    assert counted.decode_steps >= 256
    # At most eight plans for 256 steps of 64 requests, and a few while the batch fills.
    assert counted.plans_made <= 8 + (counted.decode_steps - 256) + counted.fallbacks["extend"]


def test_the_log_tells_what_serves(serve: Serve) -> None:
    log = serve(EXACT).text()
    assert log.count("sglang_pat serves decode on cpu over TorchNativeAttnBackend") == 1
    assert log.count("not served by pat (extend)") == 1
