# SPDX-License-Identifier: Apache-2.0
"""Batches of a running server (``SGLANG_PAT_DUMP``), to be replayed beside FA3 and FlashInfer.

Slots are single tokens, contiguous within a node, whatever pages the server had; K and V are
random. ``batch-N`` is batch N of the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.forests import Forest
from sglang_pat.dump import Batch, read_dump

NUMBERS = ("num_q_heads", "num_kv_heads", "head_dim", "draft_tokens")


def read_batches(file: Path) -> tuple[dict[str, Any], list[Forest]]:
    """The header of a dump, without its target, ``complete`` or cut off, and its batches.

    Raises OSError or ValueError, in words, for a file that is no dump or has no batch.
    """
    dump = read_dump(file)
    if not dump.batches:
        raise ValueError(f"{file} has no batch: no decode step of several requests ran on pat")
    header = {name: value for name, value in dump.header.items() if name != "target"}
    numbers: list[Any] = [header.get(name) for name in NUMBERS]
    if not all(type(each) is int for each in numbers):
        raise ValueError(
            f"{file}: {', '.join(NUMBERS)} of its header are {numbers}, must be whole numbers: "
            "make the dump anew"
        )
    return header | {"complete": bool(dump.end)}, [as_forest(batch) for batch in dump.batches]


def as_forest(batch: Batch) -> Forest:
    """A dumped batch with its name; queries of no tokens, which have nothing to read, left out."""
    held = [i for i, tokens in enumerate(batch.seq_lens) if tokens]
    paths, seq_lens = [batch.paths[i] for i in held], [batch.seq_lens[i] for i in held]
    return Forest(f"batch-{batch.number}", paths, seq_lens)
