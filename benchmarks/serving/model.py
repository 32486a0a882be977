# SPDX-License-Identifier: Apache-2.0
"""Models without weights: speed needs a ``config.json``, and the client a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_pat.demo.model import save_tokenizer

# The public numbers on which speed depends, but for Llama's 8,192 positions: its shape serves
# longer prompts here. Those that transformers has for a model type by itself are left out.
SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
        "rope_theta": 500000.0,
        "eos_token_id": 128001,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "eos_token_id": 151645,
    },
    # Attention sinks, and windows of 128 tokens in every second layer.
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "vocab_size": 201088,
        "initial_context_length": 4096,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "eos_token_id": 200002,
    },
    # Latents (MLA): 31 GB of weights in bf16, the next 60 GB, of which two servers fit an H200.
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "num_experts_per_tok": 6,
        "scoring_func": "softmax",
        "topk_group": 1,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "eos_token_id": 100001,
    },
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "vocab_size": 154880,
        "rope_theta": 1000000.0,
        "eos_token_id": 154820,
    },
}
_END, _UNKNOWN = "<|end|>", "[UNK]"
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def open_model(name: str, scratch: Path) -> Path:
    """The folder ``name``, or one in ``scratch`` with the built-in shape of that name.

    Raises:
        ValueError: neither a shape nor a folder with a ``config.json``.
    """
    if name in SHAPES:
        folder = scratch / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SHAPES[name]) + "\n")
        write_tokenizer(folder, SHAPES[name]["vocab_size"], SHAPES[name]["eos_token_id"])
        return folder
    if not (Path(name) / "config.json").is_file():
        raise ValueError(
            f"{name!r} is neither a folder with a config.json nor one of {', '.join(SHAPES)}"
        )
    return Path(name).resolve()


def write_tokenizer(folder: Path, vocab: int, end: int) -> None:
    """A tokenizer of ``vocab`` ids to ``folder``, ``end`` being that of the end of a text.

    Nearly every id is a word, ``t123``. The text of random ids has these ids again, so a turn of a
    conversation finds the tokens of the last one in the cache; other text is cut into characters.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = [chr(code) for code in range(33, 127)]
    pieces = [_UNKNOWN, *characters, *(f"##{each}" for each in characters)]
    words = dict(enumerate(pieces)) | {end: _END}
    ids = {words.get(token, f"t{token}"): token for token in range(vocab)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=_UNKNOWN))
    tokenizer.add_special_tokens([_END])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    save_tokenizer(tokenizer, folder, end=_END, chat_template=_CHAT_TEMPLATE)
