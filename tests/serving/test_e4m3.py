# SPDX-License-Identifier: Apache-2.0
"""K/V in fp8_e4m3 on a CPU server, without scales: packed, the tokens of SGLang's own attention,
which runs a request that is alone."""

from __future__ import annotations

from .compare import disagreements
from .conftest import Serve
from .server import Config
from .workloads import WORKLOADS


def test_requests_together_answer_as_each_alone(serve: Serve) -> None:
    server = serve(Config("e4m3", args=("--kv-cache-dtype", "fp8_e4m3")))
    assert "all 2 attention layers, K/V in float8_e4m3fn" in server.text()
    work = WORKLOADS["multi_level"]
    start = server.counters()
    alone = [
        server.generate([prompt], length)[0]
        for prompt, length in zip(work.prompts, work.new_tokens, strict=True)
    ]
    middle = server.counters()
    assert (middle - start).decode_steps == 0
    together = server.generate(work.prompts, work.new_tokens)
    counted = server.counters() - middle
    assert disagreements(together, alone) == []
    assert counted.packed_steps > 0 and not counted.fallbacks and not counted.base_layers
