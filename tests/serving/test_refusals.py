# SPDX-License-Identifier: Apache-2.0
"""A server that pat cannot serve right does not start, and says why and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_pat.demo.server import ServerError

from .server import Config, ServingServer

REFUSED = {
    "unknown value": (
        Config("value", env=(("SGLANG_PAT_POLICY", "fast"),)),
        "SGLANG_PAT_POLICY=fast is not a known value; use one of bytes, paper, naive",
    ),
    "unknown name": (
        Config("name", env=(("SGLANG_PAT_POLCY", "paper"),)),
        "SGLANG_PAT_POLCY=paper is not an option of sglang_pat",
    ),
    "hook missing": (
        Config("hook", env=(("PAT_TEETH_UNHOOK", "1"),), plugins=True),
        "forward_batch_info.ForwardBatch.init_new is not installed",
    ),
    "plugin filtered out": (
        Config("filter", env=(("SGLANG_PLUGINS", "others"),)),
        "invalid choice: 'pat'",
    ),
    "other K/V dtype": (
        Config("dtype", args=("--kv-cache-dtype", "bfloat16")),
        "set --kv-cache-dtype auto",
    ),
    "glue graph": (
        Config("glue", env=(("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1"),)),
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
    ),
}


def _refusal(model: Path, config: Config, folder: Path) -> str:
    """The log of a server that must not start."""
    server = ServingServer(model, config, folder)
    with pytest.raises(ServerError), server:
        pass
    return server.text()


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused(case: str, model: Path, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    assert message in _refusal(model, config, tmp_path)


def test_mla_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "mla"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_DEEPSEEK))
    config = Config("mla", args=("--load-format", "dummy"))
    assert "the model uses MLA" in _refusal(model, config, tmp_path)


TINY_DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "torch_dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {  # the only kind that SGLang's DeepSeek has on a CPU
        "type": "yarn",
        "factor": 2,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
