# SPDX-License-Identifier: Apache-2.0
"""Writes the model of ``launch.sh demo`` to a folder: the demo's, small with random weights, and a
byte-level BPE tokenizer with a chat template, trained from the texts beside this file.

    python demo_model.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang_pat.demo.model import make_model
from sglang_pat.demo.run import MODEL, VOCAB

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


def make_tokenizer(folder: Path, *, vocab: int = VOCAB) -> Path:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` to ``folder``; return it.

    Exactly ``vocab`` token ids are given out: no row of the model is without a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = sorted(Path(__file__).parent.glob("*.py"))
    lines = [line for text in texts for line in text.read_text(encoding="utf-8").splitlines()]
    tokenizer.train_from_iterator(lines, trainer)
    assert tokenizer.get_vocab_size() == vocab
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


if __name__ == "__main__":
    make_tokenizer(make_model(sys.argv[1], **MODEL))
