# SPDX-License-Identifier: Apache-2.0
"""Batches whose requests differ: what is drawn."""

from __future__ import annotations

import hashlib
import json

import torch

from benchmarks.common.forests import GENERATOR, Forest, all_forests
from benchmarks.kernel.kv import slot_table

ALL = all_forests()


def test_a_generator_draws_the_same_batches_for_ever() -> None:
    """A change of what is drawn needs another name of the generator, and then a digest here."""
    drawn = json.dumps([(each.name, each.paths, each.seq_lens) for each in ALL])
    digest = hashlib.sha256(drawn.encode()).hexdigest()[:16]
    assert (GENERATOR, digest) == ("ragged-1", "6a2778d92c19f961")
    assert len({each.name for each in ALL}) == len(ALL) == 6 * 5 + 8 * 3


def test_slots_are_shared_where_nodes_are() -> None:
    """Also where a query shares the first tokens of a node only, as in a server's batches."""
    paths = [[(5, 0, 30), (6, 30, 50)], [(5, 0, 30), (6, 30, 41)], [(5, 0, 12)], []]
    small = Forest("small", paths, [60, 41, 20, 9])
    assert small.unique_tokens == 50 + 10 + 0 + 8 + 9
    for batch in (small, next(each for each in ALL if each.name == "zipf-4")):
        for permuted in (False, True):
            table, seq_lens = slot_table(batch, permuted=permuted)
            held = torch.arange(table.shape[1]) < seq_lens[:, None]
            used = table[1:][held].tolist()
            assert set(used) == set(range(1, batch.unique_tokens + 1)), "slot 0 is nobody's"
            assert not table[0].any() and len(used) == sum(batch.seq_lens)
            for query, path in enumerate(batch.paths, 1):
                first = next(i for i, other in enumerate(batch.paths, 1) if other[:1] == path[:1])
                end = path[0][2] if path else 0
                assert torch.equal(table[query, :end], table[first, :end])
    table, _ = slot_table(small, permuted=False)
    assert torch.equal(table[1, :41], table[2, :41]) and torch.equal(table[1, :12], table[3, :12])
    assert table[1, :50].tolist() == list(range(1, 51))
    assert (slot_table(small, permuted=True)[0][1, :30].diff() != 1).any()
