# SPDX-License-Identifier: Apache-2.0
"""The batches and rules of studies: what is drawn, that its plans fit, and how full they are."""

from __future__ import annotations

import hashlib
import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_pat import _C, Target, plan
from sglang_pat.bench.common.forests import SEEDS
from sglang_pat.bench.common.trees import PAPER_TREES, Tree
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.bench.kernel.layer import PatOptions
from sglang_pat.bench.kernel.studies import (
    chunk,
    engine,
    lengths,
    neighbours,
    packinfer,
    paged,
    persistent,
    plans,
)
from sglang_pat.bench.kernel.studies.catalogue import STUDIES
from sglang_pat.bench.kernel.studies.engine import BASE
from sglang_pat.capacity import buffer_shapes
from sglang_pat.config import PRESETS
from sglang_pat.planner import BRANCH
from sglang_pat.utilisation import utilisation

PAGE = Path(__file__).parents[1] / "docs" / "experiments" / "studies.md"


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", STUDIES)
def test_every_rule_has_room_on_every_batch(name: str, quick: bool) -> None:
    """A plan without splits would be taken for one of the rule's."""
    study = STUDIES[name]
    cases = study.cases((), quick, ())
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        names = [each.name for each in study.variants(case.batch)]
        assert engine.BASE in names and len(set(names)) == len(names)
        for each in study.variants(case.batch):
            target = each.settings.target(case.batch, case.heads)
            made = plan(case.batch.paths, case.batch.seq_lens, target)
            assert not made.degraded, (case.name, each.name)
            assert 0 < utilisation(made, case.batch.seq_lens) <= 1, (case.name, each.name)


@pytest.mark.skipif(not hasattr(_C, "check_plan_cuda"), reason="built without CUDA kernels")
@pytest.mark.parametrize("name", STUDIES)
def test_every_plan_fits_the_buffers_of_a_gpu(name: str) -> None:
    """What a workspace checks before it loads a plan, and how much memory it takes."""
    for case in STUDIES[name].cases((), False, ()):
        batch, heads = case.batch, case.heads
        for each in STUDIES[name].variants(batch):
            target = each.settings.target(batch, heads)
            made = plan(batch.paths, batch.seq_lens, target)
            fields = ("max_queries", "max_partials", "max_branch_tokens")
            room = {field: getattr(target, field) for field in fields}
            shapes = buffer_shapes(
                num_q_heads=heads.q,
                head_dim=heads.dim,
                list_tokens=made.list_tokens,
                partial_dtype=each.settings.partial_dtype,
                max_items=target.max_items,
                max_segments=target.max_segments,
                **room,
            )
            _C.check_plan_cuda(
                plan=made.data_ptr,
                plan_bytes=made.nbytes,
                max_bytes=shapes["plan"][0][0],
                max_context=max(batch.seq_lens),
                max_list_tokens=made.list_tokens,
                num_q_heads=heads.q,
                num_kv_heads=heads.kv,
                draft_tokens=1,
                **room,
            )
            taken = sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
            assert taken < 1 << 30, (case.name, each.name)  # several lie on a GPU side by side


def test_quick_runs_some_batches_of_the_first_heads() -> None:
    for study in STUDIES.values():
        every = {case.name for case in study.cases((), False, ())}
        quick = study.cases((), True, ())
        assert {case.name for case in quick} < every
        assert {case.heads for case in quick} == {study.heads[0]}
    asked = [Heads(8, 1)]
    assert {case.heads for case in paged.STUDY.cases(asked, False, ())} == set(asked)


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_says_what_a_study_runs(name: str) -> None:
    study, cases = STUDIES[name], STUDIES[name].cases((), False, ())
    names = len(study.variants(Tree((1,), (1,)))) + len(study.usable_peers({}))
    heads = ", ".join(map(str, study.heads))
    (line,) = (each for each in PAGE.read_text().splitlines() if each.startswith(f"| `{name}` |"))
    assert line.endswith(f" | {heads} | {len(cases)} | {len(cases) * names} |")


def test_what_the_studies_compare() -> None:
    assert list(neighbours.STUDY.rules) == list(PRESETS)
    batches = [batch for _, batch in neighbours.batches(Heads(32, 8), False)]
    assert batches[:20] == list(PAPER_TREES) and len(batches) == 20 + 54
    assert [str(each) for each in batches[20:23]] == ["uniform-0", "bimodal-0", "zipf-0"]
    launches = {name: settings.launch for name, settings in chunk.RULES.items()}
    assert launches["chunk-streams"] == "streams" and launches["chunk-serial"] == "serial"
    assert chunk.RULES["chunk"].split == "chunks" and launches["chunk"] == "queue"
    shared = [Tree.parse(str(b)) for f, b in chunk.batches(Heads(32, 32), False) if f == "shared"]
    assert [tree.tokens[0] for tree in shared][:2] == [8192, 4096] and not shared[-1].shares
    assert {tree.num_queries for tree in shared} == {32}
    assert not any(Tree.parse(str(b)).shares for _, b in paged.batches(Heads(32, 8), False))
    splits = {s.split_tokens for n, s in persistent.ALTERNATIVES.items() if n.startswith("fixed")}
    assert splits == {128, 256, 512, 1024, 2048}
    counts = {b.num_queries for f, b in persistent.batches(Heads(32, 8), False) if "-b" in f}
    assert {1, 2, 3, 4, 8} == counts
    assert not any("forest" in f for f, _ in persistent.batches(Heads(64, 8), False))
    groups = {s.split_tokens for s in packinfer.RULES.values() if s.branching == "groups"}
    assert groups == {256, 512, 1024, 2048}


def test_other_plans_are_by_other_targets() -> None:
    """Each changes what it names, and equal parts are pieces of whole tiles."""
    batch = Tree((1, 16), (4096, 1000))
    heads = Heads(32, 8)
    base = plans.STUDY.rules[BASE].target(batch, heads)
    for name, settings in plans.ALTERNATIVES.items():
        made = settings.target(batch, heads)
        assert made != base, name
        changed = plan(batch.paths, batch.seq_lens, made)
        assert not changed.degraded, name
    parts = plans.ALTERNATIVES["264 parts"].target(batch, heads)
    # 20,096 tokens of 8 KV heads are 609 tokens for each of 264.
    assert (parts.split, parts.split_tokens, parts.branching) == ("fixed", 640, "never")
    slower = plans.ALTERNATIVES["memory 0.85"].target(batch, heads)
    assert slower.bytes_per_s == pytest.approx(0.85 * base.bytes_per_s)
    names = [str(batch) for batch in plans.served()]
    assert len(names) == len(set(names)) == 84
    assert {names[0], names[-1]} == {"served-512x8+20", "agents-128+2000"}


def test_a_generator_draws_the_same_batches_for_ever() -> None:
    """A change of what is drawn needs another name of the generator, and then a digest here."""
    fitted = range(13)  # seeds of what cost model and simulation were fitted to
    assert set(SEEDS) < set(fitted) and not set(persistent.HELD_OUT) & set(fitted)
    digests = {}
    for seeds in (range(5, 10), persistent.HELD_OUT):  # those of the first run, those of now
        drawn = [draw(size) for draw in lengths.MIXES.values() for size in packinfer.BATCHES]
        drawn += [
            lengths.long_contexts(kind, count, seed)
            for count, kind in persistent.WORKLOADS + persistent.FEW
            for seed in seeds
        ]
        text = json.dumps([(each.name, each.paths, each.seq_lens) for each in drawn])
        digests[seeds] = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert lengths.GENERATOR == "studies-1"
    assert digests == {range(5, 10): "ddd2557c0db6ae9a", range(13, 18): "c79fa39ccd734648"}


def test_inputs_of_the_mixes_are_as_the_paper_says() -> None:
    """More than 60 % are shorter than 128 tokens (PackInfer, section 3.1), text2sql's questions
    without their schema."""
    rng = lengths._random("test")
    inputs = [lengths.ALPACA_INPUT, lengths.LMSYS_INPUT, lengths.QUESTION_INPUT]
    for each in inputs:
        drawn = [lengths._input(rng, each) for _ in range(2000)]
        assert np.mean(np.array(drawn) < 128) > 0.6 and min(drawn) >= 1
    for draw in lengths.MIXES.values():
        forest = draw(64)
        assert forest.num_queries == 64 and len(set(forest.seq_lens)) > 32
        flat = lengths.even(forest)
        assert sum(flat.seq_lens) == sum(forest.seq_lens) == flat.unique_tokens
        assert max(flat.seq_lens) - min(flat.seq_lens) <= 1
    shared = lengths.text2sql(64)
    assert shared.unique_tokens < sum(shared.seq_lens)
    plan(shared.paths, shared.seq_lens, PatOptions().target(shared, Heads(32, 8)))


def test_utilisation_counts_the_pairs_that_attention_needs() -> None:
    heads = Heads(32, 8)
    whole: dict[str, Any] = {"policy": "queries", "split": "none", "branching": "never"}
    # Four rows of a query in a tile of 16; 96 tokens in two tiles of 64.
    batch = Tree((2,), (96,))
    made = plan(batch.paths, batch.seq_lens, PatOptions(**whole).target(batch, heads))
    assert utilisation(made, batch.seq_lens) == pytest.approx(4 * 96 / (16 * 128))
    # One pack of four queries fills its tile of 16 rows; the tails fill a quarter of theirs.
    batch = Tree((1, 4), (640, 64))
    options = PatOptions(policy="naive", split="none", branching="never")
    made = plan(batch.paths, batch.seq_lens, options.target(batch, heads))
    assert made.num_items == 5
    needed = 4 * 4 * (640 + 64)
    assert utilisation(made, batch.seq_lens) == pytest.approx(needed / (16 * 640 + 4 * 16 * 64))


def test_utilisation_of_branches() -> None:
    tree = PAPER_TREES[5]
    target: Target = PatOptions().target(tree, Heads(32, 8))
    made = plan(tree.paths, tree.seq_lens, target)
    assert (made.items["kind"] == BRANCH).any()
    assert 0 < utilisation(made, tree.seq_lens) < 1
