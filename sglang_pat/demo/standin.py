# SPDX-License-Identifier: Apache-2.0
"""A model that chats in place of SmolLM2 where that cannot be had: random weights, so that what it
says means nothing, and a byte-level BPE tokenizer with a chat template, trained here."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path
from typing import Any

from sglang_pat.demo.desk import ANSWERED, RULES
from sglang_pat.demo.model import make_model, save_tokenizer
from sglang_pat.demo.smollm2 import NoPackage, cache_folder, model_folder

END = "<|end|>"  # id 0, the eos_token_id of ``make_model``
ROLES = ("system", "user", "assistant", "tool")
_SPECIAL = (END, *(f"<|{role}|>" for role in ROLES))
_VOCAB = 1024
_MODEL: dict[str, Any] = {
    **{"hidden": 256, "layers": 4, "vocab": _VOCAB, "seed": 1},
    **{"q_heads": 4, "kv_heads": 1, "head_dim": 128},
}
# Tools come first, before the system prompt: every agent is given the same ones.
_CHAT_TEMPLATE = (
    r"{%- if tools %}{{ '<|system|>\nTools:\n' }}"
    r"{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{%- endfor %}"
    r"{{ '<|end|>\n' }}{%- endif %}"
    r"{%- for message in messages %}"
    r"{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{%- endfor %}"
    r"{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}"
)


def demo_model() -> Path:
    """The folder of SmolLM2, or, with a word on stderr about what fetches that, of a stand-in; both
    in the user's cache. Raises OSError if they cannot be written."""
    try:
        return model_folder()
    except NoPackage as missing:
        print(f"{missing}\nRandom weights stand in for it.", file=sys.stderr)
        return make_standin(cache_folder() / "standin")


def make_standin(folder: Path) -> Path:
    """Write a Llama with random weights and its tokenizer to ``folder``; return it."""
    return make_tokenizer(make_model(folder, **_MODEL))


def make_tokenizer(folder: Path) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` to ``folder``; return it.

    It gives out as many token ids as the model has rows: none is without a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=_VOCAB,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([RULES, *chain(*chain(*ANSWERED.values()))], trainer)
    assert tokenizer.get_vocab_size() == _VOCAB
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder, end=END, chat_template=_CHAT_TEMPLATE, pad_token=END)
    return folder
