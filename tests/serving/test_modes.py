# SPDX-License-Identifier: Apache-2.0
"""Forwards whose mode SGLang rewrites before the backend sees it are counted as what they are."""

from __future__ import annotations

from .conftest import Serve
from .server import Config
from .workloads import random_prompt

CHUNK = 64
MIXED = Config("mixed-chunk", args=("--enable-mixed-chunk", "--chunked-prefill-size", str(CHUNK)))


def test_mixed_steps_are_counted(serve: Serve) -> None:
    """A prompt of 16 chunks comes in one message with a short one, whose request decodes meanwhile.
    Requests that ask for log-probabilities are not mixed."""
    server = serve(MIXED)
    before = server.counters()
    prompts = [random_prompt(110, 10), random_prompt(111, 16 * CHUNK)]
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 40}
    body = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling}
    server.post("/generate", body)
    counted = server.counters() - before
    # The first chunk has the short prompt, in each of the others one token is of its answer.
    assert counted.base_forwards["extend"] == 1
    assert counted.fallbacks == {"mixed": 16}
