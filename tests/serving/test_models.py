# SPDX-License-Identifier: Apache-2.0
"""What doctor says of layers is what SGLang builds, for one architecture of each kind; ``make
test-models`` builds all of them."""

from __future__ import annotations

import os
from pathlib import Path

from kit import forks

from sglang_pat.config import CPU_PLATFORM

KINDS = (
    *("LlamaForCausalLM", "TransformersForCausalLM", "Gemma3ForCausalLM", "Llama4ForCausalLM"),
    *("IQuestLoopCoderForCausalLM", "GptOssForCausalLM", "MiMoV2ForCausalLM", "SDARForCausalLM"),
    *("IQuestQ1ForCausalLM", "Grok1ModelForCausalLM", "Qwen3NextForCausalLM"),
    *("MiniMaxM3SparseForCausalLM", "InklingForConditionalGeneration"),
    *("DeepseekV2ForCausalLM", "KimiLinearForCausalLM"),
)


def test_layers_are_those_that_doctor_names(tmp_path: Path) -> None:
    env = {**os.environ, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # a server's
    env |= forks.cpu_server() | {"SGLANG_PLATFORM": CPU_PLATFORM}
    run = forks.run(["models", *KINDS], env=env, cwd=tmp_path, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith(f"\n{len(KINDS)} built, 0 disagree\n"), run.stdout
