# SPDX-License-Identifier: Apache-2.0
"""What calibration measures: random forests, their plans, and the plans that rates come from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kit.machines import H200, LAUNCH_S, TRUTH, SyntheticMachine

from sglang_pat import gpus
from sglang_pat.bench.kernel.floor import Heads
from sglang_pat.calibrate import batches, command, plans, rates
from sglang_pat.calibrate.machine import CalibrationError


def test_the_plans_of_forests_have_every_term_and_run_on_the_machine_there_is() -> None:
    machine = SyntheticMachine(TRUTH, launch_s=LAUNCH_S)
    bench = rates.Bench(machine, Heads(32, 8), gpus.vendor_profile(H200))
    rows = plans.measure(bench, range(30), lambda _line: None)
    assert 2 * 30 < len(rows) == machine.measured < 3 * 30
    assert {row.target.num_sms for row in rows} == {H200.multi_processor_count}
    assert any(row.terms.branches for row in rows) and any(row.terms.wide_tokens for row in rows)
    assert any(row.terms.reread_tokens for row in rows)


def test_a_plan_that_does_not_fit_is_not_measured() -> None:
    machine = SyntheticMachine(TRUTH, launch_s=LAUNCH_S)
    bench = rates.Bench(machine, Heads(32, 8), gpus.vendor_profile(H200))
    batch = batches.forest(4)
    with pytest.raises(CalibrationError, match="the plan of forest 4 for 32/8 heads was made"):
        bench.plan(batch, max_partials=0, max_segments=0)
    assert bench.plan(batch, branching="never")[0].num_partials > 0


@pytest.mark.parametrize("heads", [Heads(32, 8), Heads(8, 1), Heads(32, 32), Heads(16, 2, 64)])
@pytest.mark.parametrize("sms", [58, 108, 132])
def test_plans_that_measure_rates_have_what_they_measure(heads: Heads, sms: int) -> None:
    """No splits where items are counted or tokens read, and wide items for the products."""
    machine = SyntheticMachine(
        TRUTH, launch_s=LAUNCH_S, device=replace(H200, multi_processor_count=sms)
    )
    given_plans = []
    measured = machine.seconds
    machine.seconds = lambda *given: given_plans.append(given) or measured(*given)  # type: ignore
    bench = rates.Bench(machine, heads, gpus.vendor_profile(machine.device))
    rates.measure(bench, lambda _line: None)
    wide, plain = [], []
    for _batch, plan, target in given_plans:
        (wide if target.policy == "naive" and plan.num_wide_items else plain).append(plan)
    assert len(wide) == len(rates.PRODUCT_TOKENS) and len(plain) == 8
    assert [plan.num_partials for plan in plain] == [0] * 8
    once, twice = plain[-2:]
    assert once.num_shared_items == once.num_items == twice.num_items / 2


def test_an_overhead_that_hides_is_said_and_not_taken_for_nothing() -> None:
    machine = SyntheticMachine(replace(TRUTH, item_overhead_s=1e-9), launch_s=LAUNCH_S)
    said: list[str] = []
    bench = rates.Bench(machine, Heads(32, 8), gpus.vendor_profile(H200))
    assert rates.measure(bench, said.append).item_overhead_s == rates.LEAST_OVERHEAD_S
    # Plans for three query heads a KV head are not simulated: they are the cost model's.
    found = command.measure(machine, Heads(30, 10), said.append)
    assert found.profile.sources["item_overhead_s"] == "chosen"
    assert any("hidden behind loads: taken as 0.1 us" in line for line in said)


def test_forests_are_random_but_the_same_for_a_seed() -> None:
    one, again, other = batches.forest(5), batches.forest(5), batches.forest(6)
    assert (one.paths, one.seq_lens) == (again.paths, again.seq_lens) != (other.paths, 0)
    for seed in range(40):
        batch = batches.forest(seed)
        assert batches.QUERIES[0] <= batch.num_queries <= batches.QUERIES[1]
        bounds: dict[int, tuple[int, int]] = {}
        for path, length in zip(batch.paths, batch.seq_lens, strict=True):
            ends = [0, *(end for _, _, end in path)]
            assert [start for _, start, _ in path] == ends[:-1] and length > ends[-1]
            for node, start, end in path:
                assert bounds.setdefault(node, (start, end)) == (start, end)
        tails = sum(
            n - (p[-1][2] if p else 0) for p, n in zip(batch.paths, batch.seq_lens, strict=True)
        )
        assert batch.unique_tokens == tails + sum(end - start for start, end in bounds.values())
