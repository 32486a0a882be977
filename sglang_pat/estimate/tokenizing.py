# SPDX-License-Identifier: Apache-2.0
"""The tokenizer that the user names, from a folder, a ``tokenizer.json`` or Hugging Face."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_pat.estimate.requests import InputError

_TRANSFORMERS = (
    "pip install transformers (SGLang brings it along), or give prompts as token ids, "
    '{"input_ids": [...]}'
)


class Tokenizer:
    """Text to token ids and back. A folder or name is opened with ``transformers``; without that
    library a folder's ``tokenizer.json`` with ``tokenizers``, which has no chat templates."""

    def __init__(self, name: str) -> None:
        """Raises InputError for a tokenizer that cannot be opened, and where a library is missing.

        ``name``: a folder, a ``tokenizer.json`` in it, or a name on Hugging Face.
        """
        self.name = name
        folder = Path(name)
        if folder.name == "tokenizer.json":
            folder = folder.parent
        self._chat: Any = None
        self._plain: Any = None
        if not folder.is_dir():
            print(
                f"no folder {folder} is here: looking for {name} on Hugging Face", file=sys.stderr
            )
        try:
            self._chat = _open_with_transformers(folder if folder.is_dir() else name)
        except ImportError as error:
            self._plain = _open_with_tokenizers(folder, name, error)
        except Exception as error:  # whatever transformers raises
            words = " ".join(f"{error}".split()) or type(error).__name__
            raise InputError(
                f"--tokenizer {name}: cannot be opened: {words}; give the folder of a model, with "
                "its tokenizer.json, or a name on Hugging Face that can be reached from here"
            ) from None

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that a server puts before it."""
        if self._chat is not None:
            return [int(token) for token in self._chat.encode(text)]
        return [int(token) for token in self._plain.encode(text).ids]

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
        """Token ids of a conversation, by the tokenizer's chat template.

        Raises InputError for messages that the template refuses, and without a template.
        """
        if self._chat is None:
            raise InputError(
                f"--tokenizer {self.name}: messages need a chat template, which the library "
                f"tokenizers does not read; {_TRANSFORMERS}"
            )
        try:
            text = self._chat.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True
            )
            return [int(token) for token in self._chat.encode(text, add_special_tokens=False)]
        except Exception as error:  # of the template or of what it is given
            words = " ".join(f"{error}".split()) or type(error).__name__
            raise InputError(
                f"--tokenizer {self.name}: its chat template does not take the messages: {words}"
            ) from None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; what is no text of its own becomes a replacement character."""
        if self._chat is not None:
            return str(self._chat.decode(list(tokens)))
        return str(self._plain.decode(list(tokens), skip_special_tokens=False))


def _open_with_transformers(name: Path | str) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def _open_with_tokenizers(folder: Path, name: str, error: ImportError) -> Any:
    file = folder / "tokenizer.json"
    try:
        from tokenizers import Tokenizer as Plain
    except ImportError:
        raise InputError(
            f"--tokenizer {name}: neither transformers nor tokenizers is installed ({error}): "
            f"{_TRANSFORMERS}"
        ) from None
    if not file.is_file():
        raise InputError(
            f"--tokenizer {name}: {file} does not exist, and without transformers ({error}) only "
            f"that file can be read: {_TRANSFORMERS}"
        )
    return Plain.from_file(str(file))
