# SPDX-License-Identifier: Apache-2.0
"""The CPU executor against attention by its definition, on hand-made plans."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.cases import Case, case, count_refused, execute
from kit.plans import DYNAMIC, Damage, Piece, encode, forest, set_to

from sglang_pat import _C

# Relative to the norm of the output: what summation in fp32 leaves, besides rounded scores.
FP32_ERROR = 1e-6


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """These tensors are small: torch's threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference relative to the norm; infinite if any element is NaN."""
    distance = (out.double() - truth).norm() / truth.norm().clamp_min(1e-30)
    return float(distance.nan_to_num(nan=float("inf")))


def check(inputs: Case, bound: float = FP32_ERROR, **options: object) -> torch.Tensor:
    """Execute and compare. Scores are sums of |q| |k| at most, rounded in fp32; an error of a score
    is a relative error of its token's weight."""
    rounding = 2**-23 * inputs.scale * float(inputs.q.norm(dim=-1).max() * _norm(inputs.k))
    truth, truth_lse = inputs.truth()
    out, lse = execute(inputs, **options)  # type: ignore[arg-type]
    assert error(out, truth) < bound + rounding
    torch.testing.assert_close(lse.double(), truth_lse, rtol=1e-6, atol=2 * rounding)
    return out


def _norm(k: torch.Tensor) -> torch.Tensor:
    return k.float().norm(dim=-1).nan_to_num(nan=0.0).max()


def single(length: int) -> list[Piece]:
    return [Piece((0,), 0, length)]


def shared(num_queries: int, length: int, splits: int = 1) -> list[Piece]:
    """Queries with one common prefix in equal pieces, and a tail each."""
    size = length // splits
    everyone = tuple(range(num_queries))
    return [Piece(everyone, i * size, size) for i in range(splits)] + [
        Piece((query,), splits * size, DYNAMIC) for query in everyone
    ]


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("seed", range(6))
def test_random_forests(isa: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads = [(8, 2), (4, 4), (5, 1), (14, 2), (16, 1), (6, 3)][seed]
    check(case(forest(rng, 1 + 5 * seed), heads, seed=seed), isa=isa)


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("head_dim", [8, 64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_head_dims_and_ratios(isa: str, head_dim: int, group: int) -> None:
    check(case(shared(3, 70), (2 * group, 2), head_dim, seed=group), isa=isa)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 128), (192, 128), (128, 72), (80, 64)])
def test_values_of_another_dim(head_dim: int, v_head_dim: int) -> None:
    check(case(shared(5, 100), (6, 2), head_dim, v_head_dim))


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("num_queries", [*range(1, 35), 64, 65])
def test_numbers_of_packed_rows(isa: str, num_queries: int) -> None:
    check(case(shared(num_queries, 66), (1, 1), seed=num_queries), isa=isa)


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (14, 2)])
def test_half_precision(isa: str, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """At most twice the error of attention computed in that dtype by torch."""
    inputs = case(forest(np.random.default_rng(1), 9), heads, 80, 96).to(dtype)
    truth, _ = inputs.truth()
    plain, _ = inputs.truth(dtype)
    check(inputs, 2 * error(plain, truth) + 1e-6, isa=isa)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_value_is_read_and_written_as_torch_does(dtype: torch.dtype) -> None:
    """One token's weight is 1, so that its V comes out unchanged: all 65536 values of a dtype."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(-1, 1, 256)
    count = len(values)
    inputs = replace(
        case([Piece((i,), 0, 1) for i in range(count)], (1, 1), 8, 256).to(dtype), v=values
    )
    table = torch.arange(count, dtype=torch.int32).view(-1, 1).contiguous()
    inputs = replace(
        inputs,
        k=torch.zeros(count, 1, 8, dtype=dtype),
        table=table,
        rows=torch.arange(count),
    )
    for isa in _C.cpu_isas():
        out, _ = execute(inputs, isa=isa)
        finite = values.isfinite()
        assert torch.equal(out[finite], values[finite])
        assert torch.equal(out.isnan(), values.isnan())
        assert torch.equal(out.isposinf(), values.isposinf())
        assert torch.equal(out.isneginf(), values.isneginf())


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    """Two equal tokens average their V: exact in fp32, rounded once on the way out."""
    torch.manual_seed(0)
    size = torch.tensor([1e-7, 1e-5, 1.0, 300.0, 6e4]).repeat_interleave(200).view(-1, 1, 1)
    values = (torch.randn(1000, 1, 256).clamp(-1.05, 1.05) * size).to(dtype)
    inputs = case([Piece((i,), 0, 2) for i in range(500)], (1, 1), 8, 256).to(dtype)
    inputs = replace(
        inputs,
        v=values,
        k=torch.zeros(1000, 1, 8, dtype=dtype),
        table=torch.arange(1000, dtype=torch.int32).view(500, 2).contiguous(),
        rows=torch.arange(500),
    )
    out, _ = execute(inputs, isa=isa)
    mean = values.float().view(500, 2, 256).sum(1) / 2
    assert torch.equal(out[:, 0], mean.to(dtype))


def test_bf16_partials() -> None:
    """Outputs rounded to bf16 before the merge, everything else in fp32."""
    inputs = case(shared(6, 120, splits=4), tails=(1, 50))
    exact, _ = execute(inputs)
    out = check(inputs, bound=4e-3, partial=torch.bfloat16)
    assert error(out, exact.double()) > 1e-5


@pytest.mark.parametrize("splits", [*range(1, 13), 20, 40])
def test_splits(splits: int) -> None:
    check(case(shared(4, 40 * splits, splits), (4, 2), seed=splits))


def test_merge_of_uneven_parts() -> None:
    """A split whose scores are far below another's adds nothing, in either order."""
    inputs = case(shared(3, 90, splits=3), (4, 1), tails=(30,))
    for high in range(4):
        k = inputs.k.clone()
        at = inputs.table[inputs.rows[0], 30 * high].long()
        k[at] = 40 * inputs.q[0, 0]
        check(replace(inputs, k=k))


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("token", [0, 63, 64, 149])
def test_one_token_wins(isa: str, group: int, token: int) -> None:
    inputs = case(single(150), (group, 1))
    k = inputs.k.clone()
    slot = inputs.table[inputs.rows[0], token].long()
    k[slot] = 1e4 * inputs.q[0, 0].sign()
    v = inputs.v.clone()
    v[slot] = 1e4
    out = check(replace(inputs, k=k, v=v), isa=isa)
    assert torch.all(out[0, 0] == 1e4)


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("group", [1, 4, 8])
def test_equal_scores(isa: str, group: int) -> None:
    """All keys alike: the mean of V, and log2 of the number of tokens above the score."""
    inputs = case(shared(2, 128, splits=2), (group, 1), tails=(7,))
    k = torch.ones_like(inputs.k)
    for size in (0.0, 1.0, 1e4):
        check(replace(inputs, k=k * size), isa=isa)


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("group", [4, 8])
def test_large_values(isa: str, group: int) -> None:
    """V of 1e4 costs no relative accuracy; scores of 1e4 leave no second token."""
    inputs = case(shared(3, 100), (group, 1))
    check(replace(inputs, v=inputs.v * 1e4), isa=isa)
    sharp = replace(inputs, scale=1e4)
    check(sharp, isa=isa)


@pytest.mark.parametrize("isa", _C.cpu_isas())
@pytest.mark.parametrize("logit_cap", [0.5, 30.0, 1e3])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (8, 1)])
@pytest.mark.parametrize("scale", [0.01, 0.125, 5.0])
def test_soft_cap(isa: str, logit_cap: float, heads: tuple[int, int], scale: float) -> None:
    inputs = case(shared(3, 100, splits=2), heads, logit_cap=logit_cap)
    out = check(replace(inputs, scale=scale), isa=isa)
    uncapped, _ = replace(inputs, scale=scale, logit_cap=0.0).truth()
    assert logit_cap > 100 or scale < 0.1 or error(out, uncapped) > 1e-3


@pytest.mark.parametrize("group", [1, 4, 8])
def test_empty_tails(group: int) -> None:
    """A tail of no tokens is neutral beside a prefix, and alone gives zeros and -inf."""
    beside = case(shared(4, 60), (group, 1), tails=(0,))
    check(beside)
    alone = case([Piece((0,), 0, DYNAMIC), Piece((1,), 0, 5)], (group, 1), tails=(0,))
    out, lse = execute(alone)
    assert torch.all(out[0] == 0) and torch.all(lse[0] == -torch.inf)
    assert error(out[1:], alone.truth()[0][1:]) < FP32_ERROR


def test_queries_without_items() -> None:
    """No tokens and no splits: zeros, as for a padded row."""
    inputs = case([Piece((1,), 0, 40)])
    out, lse = execute(inputs)
    assert torch.all(out[0] == 0) and torch.all(lse[0] == -torch.inf)
    assert error(out, inputs.truth()[0]) < FP32_ERROR


def test_no_queries() -> None:
    inputs = case([])
    out, _ = execute(inputs)
    assert out.shape[0] == 0


def test_lse_is_optional() -> None:
    inputs = case(shared(3, 50))
    out, lse = execute(inputs, lse=0)
    assert torch.all(lse.isnan()) and torch.equal(out, execute(inputs)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_runs_give_equal_bits(dtype: torch.dtype) -> None:
    inputs = case(forest(np.random.default_rng(3), 24, max_splits=6), (8, 2), 128).to(dtype)
    expected, expected_lse = execute(inputs, threads=1)
    for threads in (1, 2, 3, 7) * 10:
        out, lse = execute(inputs, threads=threads)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_the_order_of_items_changes_no_bit() -> None:
    inputs = case(forest(np.random.default_rng(4), 12, max_splits=5))
    expected, _ = execute(inputs)
    backwards = encode(inputs.pieces[::-1], len(inputs.q), inputs.heads)
    assert torch.equal(execute(inputs, backwards)[0], expected)


def test_a_swapped_slot_is_seen() -> None:
    """The comparison has teeth: one wrong slot among hundreds exceeds the bound."""
    inputs = case(shared(4, 300), (8, 2))
    truth, _ = inputs.truth()
    table = inputs.table.clone()
    row = int(inputs.rows[3])
    table[row, 7] = table[row, 8]
    out, _ = execute(replace(inputs, table=table))
    assert error(out, truth) > 100 * FP32_ERROR


def test_callers_on_several_threads() -> None:
    inputs = [case(forest(np.random.default_rng(s), 9), seed=s) for s in range(4)]
    expected = [execute(one)[0] for one in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(50):
            if not torch.equal(execute(inputs[i], threads=3)[0], expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def _in_a_child(inputs: Case, expected: torch.Tensor) -> None:
    assert torch.equal(execute(inputs, threads=3)[0], expected)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_works_after_a_fork() -> None:
    inputs = case(shared(16, 600), (8, 2), 128)
    expected, _ = execute(inputs, threads=3)
    child = multiprocessing.get_context("fork").Process(target=_in_a_child, args=(inputs, expected))
    child.start()
    child.join(30)
    assert child.exitcode == 0


# On shared(3, 40, splits=2): items 0 and 1 of all three queries, then three tails; 9 partials.
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (set_to("header", 0, "magic", 1), "not a plan: magic 1"),
        (set_to("header", 0, "version", 9), "plan version 9"),
        (set_to("header", 0, "total_bytes", 1 << 20), "truncated plan"),
        (set_to("header", 0, "num_q_heads", 16), "16 query"),
        (set_to("header", 0, "num_kv_heads", 1), "1 KV heads"),
        (set_to("header", 0, "num_queries", 2), "2 queries"),
        (set_to("header", 0, "num_items", -1), "-1 items"),
        (set_to("header", 0, "num_items", 2**31 - 1), "2147483647 items"),
        (set_to("header", 0, "items_offset", -64), "items at byte -64"),
        (set_to("header", 0, "items_offset", 66), "items at byte 66"),
        (set_to("header", 0, "members_offset", 2**31 - 4), "members at byte"),
        (set_to("header", 0, "queries_offset", 0), "queries at byte 0"),
        (set_to("header", 0, "num_partials", -1), "-1 partials"),
        (set_to("header", 0, "num_partials", 1 << 30), "1073741824 partials"),
        (set_to("header", 0, "num_partials", 8), "partials 6 \\+ 3 of 8"),
        (set_to("items", 0, "member_offset", -1), "item 0 has members -1"),
        (set_to("items", 1, "member_offset", 2**31 - 1), "item 1 has members 2147483647"),
        (set_to("items", 1, "member_offset", 0), "item 1 writes partial 0"),
        (set_to("items", 0, "num_queries", 0), "item 0 has members 0 \\+ 0"),
        (set_to("items", 0, "num_queries", 2**31 - 1), "members 0 \\+ 2147483647"),
        (set_to("items", 0, "row", 3), "reads row 3 of 3"),
        (set_to("items", 0, "row", -1), "reads row -1 of 3"),
        (set_to("items", 0, "kv_start", -5), "begins at token -5"),
        (set_to("items", 0, "kv_start", 2**31 - 1), "item 0 reads tokens 2147483647"),
        (set_to("items", 0, "kv_len", 0), "with length 0"),
        (set_to("items", 0, "kv_len", -1), "item 0 of 3 queries"),
        (set_to("items", 0, "kv_len", 2**31 - 1), "item 0 reads tokens 0 \\+ 2147483647"),
        (set_to("items", 0, "kv_len", 19), "covers 69 tokens of query 0, whose length is 70"),
        (set_to("items", 2, "kv_start", 71), "item 2 reads tokens 71"),
        (set_to("members", 0, "query", 3), "query 3 of 3"),
        (set_to("members", 0, "query", -1), "query -1 of 3"),
        (set_to("members", 0, "query", 1), "writes partial 0 of query 1"),
        (set_to("members", 0, "partial", 9), "writes partial 9"),
        (set_to("members", 0, "partial", -1), "writes partial -1"),
        (set_to("members", 0, "partial", 1), "item 1 writes partial 1"),
        (set_to("queries", 0, "num_splits", -1), "partials 0 \\+ -1"),
        (set_to("queries", 0, "num_splits", 1), "has one split"),
        (set_to("queries", 0, "num_splits", 4), "member of 3 items and has 4 splits"),
        (set_to("queries", 2, "partial_offset", 2**31 - 1), "partials 2147483647"),
    ],
)
def test_damaged_plans_are_refused(damage: Damage, named: str) -> None:
    inputs = case(shared(3, 40, splits=2), tails=(30,))
    plan = inputs.plan()
    check(inputs, hand=plan)
    damage(plan)
    with pytest.raises(ValueError, match=named):
        execute(inputs, plan.encode())


def test_random_damage_never_crashes() -> None:
    """Any change of a plan's words runs or raises ValueError."""
    inputs = case(shared(3, 40, splits=2), tails=(30,))
    plan = inputs.plan()
    assert count_refused(inputs, plan, [-1, 0, 1, 2, 3]) > 1000
    check(inputs, hand=plan)


def test_a_cut_plan_is_refused() -> None:
    inputs = case(shared(3, 40))
    plan = inputs.plan()
    for size in (0, 63, 64, plan.nbytes - 8):
        with pytest.raises(ValueError, match="bytes"):
            execute(inputs, plan, plan_bytes=size)
    with pytest.raises(ValueError, match="null"):
        execute(inputs, plan, plan=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"head_dim": 60}, "head_dim is 60"),
        ({"head_dim": 520}, "head_dim is 520"),
        ({"v_head_dim": 0}, "v_head_dim is 0"),
        ({"num_queries": -1}, "num_queries is -1"),
        ({"num_queries": 2**40}, "num_queries is 1099511627776"),
        ({"num_queries": 2}, "for 3 queries, the arguments have 2"),
        ({"num_q_heads": 9}, "9 query heads do not divide into 2"),
        ({"num_q_heads": 8192}, "8192 query heads"),
        ({"num_kv_heads": 0}, "0 KV heads"),
        ({"dtype": 3}, "dtype is 3"),
        ({"partial_dtype": 2}, "partial_dtype is 2"),
        ({"logit_cap": -1.0}, "logit_cap is -1"),
        ({"logit_cap": float("nan")}, "logit_cap is nan"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"num_threads": 5000}, "num_threads is 5000"),
        ({"num_slots": -1}, "num_slots -1"),
        ({"isa": "v9"}, "isa is v9, this machine has .*base"),
        ({"q": (0, 1, 1)}, "null pointer: q 0"),
        ({"rows": 0}, "null pointer"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changes: dict[str, object], named: str) -> None:
    inputs = case(shared(3, 40))
    with pytest.raises(ValueError, match=named):
        execute(inputs, **changes)  # type: ignore[arg-type]


def test_rows_and_lengths_outside_the_table_are_refused() -> None:
    inputs = case(shared(3, 40), tails=(30,))
    for name, value, named in (
        ("rows", 99, "query 1: row 99"),
        ("rows", -1, "query 1: row -1"),
        ("seq_lens", 1000, "query 1: length 1000"),
        ("seq_lens", -1, "query 1: length -1"),
        ("seq_lens", 39, "make a new one"),
    ):
        wrong = getattr(inputs, name).clone()
        wrong[1] = value
        with pytest.raises(ValueError, match=named):
            execute(replace(inputs, **{name: wrong}))


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("slot", [-1, 10**9])
@pytest.mark.parametrize("token", [0, 100, 149])
def test_slots_outside_the_cache_are_refused(group: int, slot: int, token: int) -> None:
    inputs = case(single(150), (group, 1))
    table = inputs.table.clone()
    table[inputs.rows[0], token] = slot
    with pytest.raises(ValueError, match=r"item 0 names a slot outside of the K/V cache of 200"):
        execute(replace(inputs, table=table))


def test_offsets_beyond_32_bits() -> None:
    """Heads lie more than 2^31 elements apart; pages that nobody touches take no memory."""
    far = 2**31 + 64
    inputs = case(single(3), (2, 2)).to(torch.bfloat16)
    memory = torch.empty(far + 3 * 64, dtype=torch.bfloat16)
    pool = memory.as_strided((3, 2, 64), (64, far, 1))
    pool.copy_(torch.randn(3, 2, 64))
    table = torch.arange(3, dtype=torch.int32).view(1, 3).contiguous()
    rows = torch.zeros(1, dtype=torch.int64)
    check(replace(inputs, k=pool, v=pool, table=table, rows=rows), 4e-3)
