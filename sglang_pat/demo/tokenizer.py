# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer with a chat template, trained from ``corpus.txt`` beside this file."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

END = "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
_SPECIAL = (END, *(f"<|{role}|>" for role in ROLES))  # END is id 0, the model's eos_token_id

# Tools come first, before the system prompt: every agent is given the same ones.
_CHAT_TEMPLATE = (
    r"{%- if tools %}{{ '<|system|>\nTools:\n' }}"
    r"{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{%- endfor %}"
    r"{{ '<|end|>\n' }}{%- endif %}"
    r"{%- for message in messages %}"
    r"{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{%- endfor %}"
    r"{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}"
)


def make_tokenizer(path: str | Path, *, vocab: int = 1024) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` to the folder ``path``; return it.

    Deterministic, and quick enough (a tenth of a second) to be written anew each time. Exactly
    ``vocab`` token ids are given out, so a model with as many rows has no id without a text.

    Raises:
        ValueError: ``vocab`` is too small for 256 bytes and the special tokens, or larger than what
            can be learnt from the text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = 256 + len(_SPECIAL)
    if vocab < smallest:
        raise ValueError(f"vocab is {vocab}; 256 bytes and special tokens need {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = (files("sglang_pat.demo") / "corpus.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(corpus.splitlines(), trainer)
    learnt = tokenizer.get_vocab_size()
    if learnt < vocab:
        raise ValueError(f"vocab is {vocab}; corpus.txt has pairs for {learnt} tokens only")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
