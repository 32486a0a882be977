# SPDX-License-Identifier: Apache-2.0
"""Batches of a running server (``SGLANG_PAT_DUMP``), replayed beside FA3 and FlashInfer:
``python -m benchmarks.kernel --batches FILE``.

Heads, dtype of K and V and draft tokens are the server's unless options name others. Slots are
single tokens, contiguous within a node, whatever pages the server had; K and V are random. Row
``batch-N`` is batch N of the file. A cascade by levels is left out: these trees have none.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.common.forests import Forest, PrefixPath
from benchmarks.kernel.cases import Case, reason_against
from benchmarks.kernel.floor import Heads
from benchmarks.kernel.layer import E4M3, PatOptions
from sglang_pat.dump import Batch, Dump, read_dump
from sglang_pat.planner import plan

# Fields of a header that are needed, and as what.
_NEEDED = {"num_q_heads": int, "num_kv_heads": int, "head_dim": int, "draft_tokens": int}


@dataclass(frozen=True)
class Replay:
    """What is replayed, and on what. ``remarks``: what differs from the server, a sentence each."""

    heads: Sequence[Heads]
    forests: Sequence[Forest]
    draft_tokens: int
    kv_dtype: str
    remarks: tuple[str, ...]
    server: dict[str, Any]  # the dump's header, without its target

    @property
    def cases(self) -> list[Case]:
        """Each batch with each heads, those of equal KV heads side by side."""
        ordered = sorted(self.heads, key=lambda each: (each.kv, each.dim))
        return [
            Case(each, forest, self.draft_tokens) for each in ordered for forest in self.forests
        ]


def replay(options: argparse.Namespace) -> Replay:
    """What ``--batches`` and the options beside it ask for. Raises OSError or ValueError, in words,
    for a file that is no dump or has no batch."""
    return _replay(
        options.batches,
        options.sample,
        tuple(options.heads or ()),
        options.kv_dtype,
    )


@lru_cache(maxsize=1)  # asked for by several parts of one run
def _replay(
    file: Path, sample: int | None, heads: tuple[Heads, ...], kv_dtype: str | None
) -> Replay:
    dump = read_dump(file)
    for name, kind in _NEEDED.items():
        if type(dump.header.get(name)) is not kind:
            raise ValueError(f"{file}: its header has no {name}")
    if not dump.batches:
        raise ValueError(f"{file} has no batch: no decode step of several requests ran on pat")
    header = dump.header
    own = Heads(header["num_q_heads"], header["num_kv_heads"], header["head_dim"])
    draft_tokens = header["draft_tokens"]
    for each in heads or (own,):
        if reason := reason_against(each, draft_tokens):
            raise ValueError(f"{file} on {each} heads: {reason}; choose others by --heads")
    of_server = E4M3 if header.get("kv_dtype") == "float8_e4m3fn" else "bfloat16"
    chosen = kv_dtype or of_server
    return Replay(
        heads=heads or (own,),
        forests=_forests(file, pick(dump.batches, sample), draft_tokens),
        draft_tokens=draft_tokens,
        kv_dtype=chosen,
        remarks=tuple(_remarks(file, dump, chosen)),
        server={name: value for name, value in header.items() if name != "target"},
    )


def _forests(file: Path, picked: Sequence[Batch], draft_tokens: int) -> list[Forest]:
    """The batches with their names; raises ValueError that names one that is no tree."""
    settings, found = PatOptions(draft_tokens=draft_tokens), []
    for batch in picked:
        forest = as_forest(batch)
        try:
            plan(forest.paths, forest.seq_lens, settings.target(forest, Heads(1, 1)))
        except ValueError as error:
            raise ValueError(f"{file}, batch {batch.number}: {error}") from None
        found.append(forest)
    return found


def _remarks(file: Path, dump: Dump, kv_dtype: str) -> Iterator[str]:
    """What differs from the server."""
    header = dump.header
    of_server = header.get("kv_dtype", "unknown")
    if of_server != {E4M3: "float8_e4m3fn"}.get(kv_dtype, kv_dtype):
        yield f"K and V are {kv_dtype} here, the server's were {of_server}"
    if (page_size := header.get("page_size", 1)) != 1:
        yield f"the server had pages of {page_size} tokens; here every slot is a page"
    if (policy := header.get("policy", "default")) != "default":
        yield f"the server had the policy {policy}; here it is --policy's"
    if not dump.end:
        yield f"{file} was cut off; what there is is replayed"


def pick(batches: Sequence[Batch], sample: int | None) -> list[Batch]:
    """So many of them, evenly spaced from the first to the last; all for None."""
    if sample is None or sample >= len(batches):
        return list(batches)
    if sample == 1:
        return [batches[0]]
    return [batches[round(i * (len(batches) - 1) / (sample - 1))] for i in range(sample)]


def as_forest(batch: Batch) -> Forest:
    """A dumped batch with its name; queries of no tokens, which have nothing to read, left out."""
    held = [(path, n) for path, n in zip(batch.paths, batch.seq_lens, strict=True) if n]
    return Forest(
        f"batch-{batch.number}", cut([path for path, _ in held]), [length for _, length in held]
    )


def cut(paths: Sequence[PrefixPath]) -> list[PrefixPath]:
    """The same paths with nodes that all queries have whole: where one may share only the first
    tokens of a node, the node is cut in two. Nodes get ids of their own, from 0 on."""
    ends: dict[int, set[int]] = {}
    for path in paths:
        for node, _, end in path:
            ends.setdefault(node, set()).add(end)
    ids: dict[tuple[int, int], int] = {}
    found = []
    for path in paths:
        pieces: PrefixPath = []
        for node, start, end in path:
            for at in sorted(each for each in ends[node] if each <= end):
                number = ids.setdefault((node, at), len(ids))
                pieces.append((number, start, at))
                start = at
        found.append(pieces)
    return found
