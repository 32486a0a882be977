# SPDX-License-Identifier: Apache-2.0
"""Profiles of GPUs: which one counts, what a file holds, what is said of one that is no good."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.trees import target

from sglang_pat import _C, gpus, plan, profiles
from sglang_pat.bench.common.trees import PAPER_TREES, Tree
from sglang_pat.profiles import COSTS, Profile, ProfileError
from sglang_pat.target import Target

HEADS = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_queries": 64}
H200 = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang_pat" / "profiles"


def measured() -> Profile:
    """Another profile of the H200 than the one that ships, every figure another."""
    base = gpus.h200()
    costs = {name: 0.9 * value for name, value in asdict(base.costs).items()}
    return replace(base, costs=profiles.Costs(**costs), date="2030-01-01", versions={"torch": "9"})


def test_the_users_profile_counts_before_the_shipped_one(folder: Path) -> None:
    shipped = Target.gpu(H200, **HEADS)
    path = profiles.write(measured(), folder)
    assert path == profiles.user_folder() / "nvidia-h200-132sm.json"
    own = Target.gpu(H200, **HEADS)
    for name in COSTS:
        assert getattr(own, name) == pytest.approx(0.9 * getattr(shipped, name))
    assert Target.h200(**HEADS) == shipped  # whatever the user measured
    half = SimpleNamespace(**(vars(H200) | {"multi_processor_count": 66}))
    assert Target.gpu(half, **HEADS).bytes_per_s == shipped.bytes_per_s  # a slice is another GPU


def test_a_profile_is_read_as_it_was_written(folder: Path) -> None:
    path = profiles.write(measured(), folder)
    assert profiles.read(path) == replace(measured(), path=path)
    assert [each.name for each in folder.iterdir()] == [path.name]


def test_without_xdg_cache_home_it_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profiles.user_folder() == Path.home() / ".cache" / "sglang_pat" / "profiles"


def test_a_user_without_a_home_has_the_shipped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert Target.gpu(H200, **HEADS) == Target.h200(**HEADS)


def test_a_damaged_profile_that_ships_is_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "SHIPPED", tmp_path)
    (tmp_path / "nvidia-h200-132sm.json").write_text("")
    with pytest.raises(ProfileError, match="or install sglang-pat again"):
        Target.gpu(H200, **HEADS)


def test_every_shipped_profile_can_be_read_and_has_its_name() -> None:
    paths = sorted(profiles.SHIPPED.glob("*.json"))
    assert paths
    for path in paths:
        found = profiles.read(path)
        assert path.name == profiles.file_name(found.gpu, found.sms)
        assert found.date and found.command and "measured" in found.sources.values()
        assert (found.fit is not None) == ("fitted" in found.sources.values())


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(data: dict[str, Any]) -> Any:
        *above, last = key.split(".")
        inner = data
        for each in above:
            inner = inner[each]
        inner[last] = value
        return data

    return change


def removed(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: {k: v for k, v in data.items() if k != key}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: [data], "not of format 1"),
        (changed("format", 2), "not of format 1"),
        (removed("costs"), "no 'costs'"),
        (removed("sms"), "sms"),
        (changed("surprise", 1), "surprise"),
        (changed("costs.bytes_per_s", 0), "bytes_per_s is 0"),
        (changed("costs.bytes_per_s", "fast"), "bytes_per_s is 'fast', must be a number"),
        (changed("costs.merge_factor", float("nan")), "merge_factor is nan"),
        (changed("costs.wide_factor", -0.1), "wide_factor is -0.1"),
        (changed("costs.reread_weight", 1.5), "reread_weight is 1.5, must be at most 1"),
        (changed("costs", {"bytes_per_s": 1e12}), "missing"),
        (changed("costs", None), "NoneType"),
        (changed("capability", 9), "int"),
        (changed("sources", {}), "sources name []"),
        (changed("sources.bytes_per_s", "guessed"), "source of bytes_per_s is 'guessed'"),
        (changed("sms", 0), "sms is 0"),
        (changed("gpu", "NVIDIA A100-SXM4-80GB"), "it is of NVIDIA A100-SXM4-80GB"),
        (changed("sms", 66), "with 66 SMs"),
    ],
)
def test_a_bad_profile_is_named_with_the_way_out(
    change: Callable[[dict[str, Any]], Any], words: str, folder: Path
) -> None:
    path = profiles.write(measured(), folder)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ProfileError, match=re.escape(words)) as raised:
        Target.gpu(H200, **HEADS)
    assert str(path) in str(raised.value)
    assert "sglang-pat calibrate" in str(raised.value) and "delete the file" in str(raised.value)


def test_half_a_file_is_named_too(folder: Path) -> None:
    path = profiles.write(measured(), folder)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ProfileError, match=re.escape(f"{path} cannot be used: it cannot be read")):
        Target.gpu(H200, **HEADS)


@pytest.mark.parametrize(
    "name", ["reread_factor", "wide_factor", "merge_factor", "branch_overhead_s"]
)
def test_factors_of_a_target_are_checked(name: str) -> None:
    for value in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"Target.{name} is .*, must be a finite number of 0"):
            target(**{name: value})
    target(**{name: 0.0})


def terms_of(tree: Tree, made_for: Target) -> Any:
    made = plan(tree.paths, tree.seq_lens, made_for)
    return _C.plan_terms(made, np.array(tree.seq_lens), tree.unique_tokens), made


def test_terms_of_a_plan_by_hand() -> None:
    """Queries of 4 packed rows on 4096 common tokens, with a private tail of 200 each."""
    tree = Tree((1, 16), (4096, 200))
    unique = 4096 + 16 * 200
    packs, made = terms_of(tree, target(branching="never"))
    assert (packs.unique_tokens, packs.reread_tokens) == (unique, 0)
    assert (packs.items, packs.partials) == (made.num_items, made.num_partials)
    assert packs.partials > 16 and packs.longest_item_tokens < 4096
    assert (packs.branches, packs.wide_tokens, packs.longest_branch_tokens) == (0, 0, 0)
    private, made = terms_of(tree, target(branching="never", row_tiles=(4,)))
    assert private.reread_tokens == 15 * 4096
    assert private.reread_tokens == made.kv_tokens_read(sum(tree.seq_lens)) - unique
    branches, made = terms_of(tree, target(branching="always", branch_rows=(64,)))
    assert branches.branches == branches.items == 1 and branches.partials == 0
    assert branches.longest_branch_tokens == branches.longest_item_tokens == unique
    wide, _ = terms_of(Tree((1, 32), (8192, 1)), target(branching="never", num_sms=2))
    assert wide.wide_tokens == 8192 and wide.unique_tokens == 8192 + 32


@pytest.mark.parametrize(
    ("name", "tree", "options"),
    [
        ("reread_factor", Tree((1, 16), (4096, 200)), {"row_tiles": (4,), "branching": "never"}),
        ("wide_factor", Tree((1, 64), (8192, 16)), {"branching": "never"}),
        ("merge_factor", Tree((1, 64), (8192, 16)), {"branching": "never"}),
        ("branch_overhead_s", PAPER_TREES[8], {"branching": "always"}),
    ],
)
def test_a_factor_charges_for_what_the_plan_has(
    name: str, tree: Tree, options: dict[str, Any]
) -> None:
    """Seconds are linear in the factor, with what the plan has of it as the slope."""
    made_for = target(**options)
    terms, _ = terms_of(tree, made_for)
    token_s = 2 * 128 * 2 / made_for.bytes_per_s
    partial_s = 2 * 4 * (128 * 4 + 4) / made_for.bytes_per_s
    slope = {
        "reread_factor": terms.reread_tokens * token_s,
        "wide_factor": terms.wide_tokens * token_s,
        "merge_factor": terms.partials * partial_s,
        "branch_overhead_s": terms.branches / made_for.num_sms,
    }[name]
    assert slope > 0
    seconds = [
        _C.plan_seconds(replace(made_for, **{name: value}).native, terms) for value in (2.0, 3.0)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(8 * slope)


@pytest.mark.parametrize(("queries", "joint"), [(256, True), (400, False)])
def test_a_long_branch_slows_all_sms(queries: int, joint: bool) -> None:
    """A plan takes longer than its bytes and than its longest branch, the more the nearer these
    are; but not a joint one, whose branches have an SM each."""
    made_for = target(
        branching="always", branch_rows=(64,), branch_overhead_s=0.0, max_queries=queries
    )
    terms, made = terms_of(Tree((1, queries), (2048, 100)), made_for)
    assert terms.branches == terms.items and terms.partials == 0
    assert (made.num_items * 8 <= made_for.num_sms) == joint
    token_s = 2 * 128 * 2 / made_for.bytes_per_s
    read = terms.unique_tokens + made_for.reread_factor * terms.reread_tokens
    in_bytes = 8 * read * token_s
    longest = terms.longest_branch_tokens * token_s * made_for.num_sms
    both = max(in_bytes, 0.6 * longest) if joint else (in_bytes**4 + longest**4) ** 0.25
    assert _C.plan_seconds(made_for.native, terms) == pytest.approx(both)
    assert 0.5 < in_bytes / longest < 2


def test_lengths_of_another_batch_are_refused() -> None:
    tree = PAPER_TREES[0]
    made = plan(tree.paths, tree.seq_lens, target())
    with pytest.raises(ValueError, match="does not hold for these 10 sequence lengths"):
        _C.plan_terms(made, np.array([1] * 10), tree.unique_tokens)
    with pytest.raises(ValueError, match="does not hold for these 3 sequence lengths"):
        _C.plan_terms(made, np.array(tree.seq_lens[:3]), tree.unique_tokens)
