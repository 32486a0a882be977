# SPDX-License-Identifier: Apache-2.0
"""Batches of a running server (``SGLANG_PAT_DUMP``), to be replayed beside FA3 and FlashInfer.

Slots are single tokens, contiguous within a node, whatever pages the server had; K and V are
random. ``batch-N`` is batch N of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.forests import Forest
from benchmarks.kernel.floor import Heads
from sglang_pat.dump import Batch, read_dump

_NUMBERS = ("num_q_heads", "num_kv_heads", "head_dim", "draft_tokens")


@dataclass(frozen=True)
class Batches:
    """The batches of a dump and what the server ran them with. ``header``: without its target."""

    file: Path
    heads: Heads
    forests: list[Forest]
    draft_tokens: int
    header: dict[str, Any]
    whole: bool  # not cut off

    @property
    def kv_dtype(self) -> str:
        return str(self.header.get("kv_dtype", "unknown"))

    def remarks(self, kv_dtype: str, draft_tokens: Sequence[int]) -> tuple[str, ...]:
        """What differs from the server, a sentence each, in runs with such K, V and drafts."""
        found = []
        if self.kv_dtype != {"fp8_e4m3": "float8_e4m3fn"}.get(kv_dtype, kv_dtype):
            found.append(f"K and V are {kv_dtype} here, the server's were {self.kv_dtype}")
        if list(draft_tokens) != [self.draft_tokens]:
            found.append(f"the server's queries had {self.draft_tokens} draft tokens")
        if (page_size := self.header.get("page_size", 1)) != 1:
            found.append(f"the server had pages of {page_size} tokens; here every slot is a page")
        if (policy := self.header.get("policy", "default")) != "default":
            found.append(f"the server had the policy {policy}; here it is --policy's")
        if not self.whole:
            found.append(f"{self.file} was cut off; what there is is replayed")
        return tuple(found)


def read_batches(file: Path) -> Batches:
    """Raises OSError or ValueError, in words, for a file that is no dump or has no batch."""
    dump = read_dump(file)
    if not dump.batches:
        raise ValueError(f"{file} has no batch: no decode step of several requests ran on pat")
    header = {name: value for name, value in dump.header.items() if name != "target"}
    numbers: list[Any] = [header.get(name) for name in _NUMBERS]
    if not all(type(each) is int for each in numbers):
        raise ValueError(
            f"{file}: {', '.join(_NUMBERS)} of its header are {numbers}, must be whole numbers: "
            "make the dump anew"
        )
    *heads, draft_tokens = numbers
    forests = [as_forest(batch) for batch in dump.batches]
    return Batches(file, Heads(*heads), forests, draft_tokens, header, bool(dump.end))


def as_forest(batch: Batch) -> Forest:
    """A dumped batch with its name; queries of no tokens, which have nothing to read, left out."""
    held = [i for i, tokens in enumerate(batch.seq_lens) if tokens]
    paths, seq_lens = [batch.paths[i] for i in held], [batch.seq_lens[i] for i in held]
    return Forest(f"batch-{batch.number}", paths, seq_lens)
