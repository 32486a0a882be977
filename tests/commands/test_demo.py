# SPDX-License-Identifier: Apache-2.0
"""``sglang-pat demo``: two real servers, its judgement, its model, and how counters are read."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.forks import start_server
from kit.start import cpu_server
from transformers import AutoModelForCausalLM

from sglang_pat.demo import run
from sglang_pat.demo.counters import Counters, parse_counters
from sglang_pat.demo.model import make_model
from sglang_pat.demo.run import SCALES, Agreement, Generation, Run, compare
from sglang_pat.demo.server import Server, ServerError

SMALL: dict[str, Any] = {
    **{"hidden": 128, "layers": 2, "vocab": 300},
    **{"q_heads": 4, "kv_heads": 2, "head_dim": 32},
}


def _demo(cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_pat", "demo", "--device", "cpu", "--cache", str(cache)],
        cwd=cache,
        env=os.environ | cpu_server(fork=False) | env,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.timeout(1000)
def test_fp32_demo_chooses_the_same_tokens_and_packs(tmp_path: Path) -> None:
    done = _demo(tmp_path, SGLANG_PAT_CHECK="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("PASSED\n") and "torch_native           pat" in done.stdout
    assert "equal to torch_native: 100.0%" in done.stdout and "not served" not in done.stdout
    # No near-tie that rounding on another machine could turn round.
    _, largest, margin = map(float, re.findall(r"\d\.\de-\d\d", done.stdout))
    assert 10 * largest < margin
    # Two turns of 32 tokens; the first of each comes from the prefill.
    found = re.search(r"packed: (\d+) of (\d+); (\d+) plans made, (\d+) reused", done.stdout)
    assert found
    packed, steps, made, reused = map(int, found.groups())
    assert 62 <= steps == made + reused and packed > 0.9 * steps
    read = re.search(r"read per decode step +([\d,.]+) +([\d,.]+)", done.stdout)
    assert read
    unpacked, packed_reads = (float(number.replace(",", "")) for number in read.groups())
    assert 6 * packed_reads < unpacked
    assert f"saved: {1 - packed_reads / unpacked:.0%}" in done.stdout


@pytest.mark.timeout(1000)
def test_bf16_as_on_a_gpu_agrees_and_a_dropped_pack_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound on log-probabilities has teeth: a plugin of the tests leaves out one pack."""
    monkeypatch.setattr(Server, "_spawn", start_server)
    fault = tmp_path / "fault"
    fault.write_text("")
    for name, value in (cpu_server(plugins=True) | {"PAT_TEETH_FAULT": str(fault)}).items():
        monkeypatch.setenv(name, value)  # servers inherit it
    cpu = SCALES["cpu"]
    model = {**cpu.model, "layers": 1}
    scale = replace(cpu, dtype="bfloat16", model=model, parts=2, answer=4, apart=6)
    folder = make_model(tmp_path / "model", dtype=scale.dtype, **model)
    pat, stock = run.run_both(folder, scale, "cpu", tmp_path)
    agreed = compare(pat.compared, stock.compared)
    assert agreed.passes(scale) and agreed.mean_diff > 0
    # Of the timed pass alone: two turns of 4 tokens, the first of each from the prefill.
    assert len(pat.timed) == 96 and len(pat.compared) == 48
    assert 6 <= pat.counters.decode_steps < 24 and pat.counters.packed_steps > 0
    assert "Cache flushed" in (tmp_path / "server-pat.log").read_text()
    fault.write_text("drop_pack")
    args = ["--skip-tokenizer-init", "--dtype", scale.dtype, "--max-total-tokens", "65536"]
    log = tmp_path / "faulty.log"
    with Server(folder, backend="pat", device="cpu", log=log, args=args) as server:
        faulty = run.measure(server, scale)
    assert faulty.counters.packed_steps > 0
    assert not compare(faulty.compared, stock.compared).passes(scale)


def test_a_server_that_does_not_start_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "_spawn", start_server)
    model = make_model(tmp_path / "model", **SMALL)
    server = Server(model, backend="no_such", device="cpu", log=tmp_path / "server.log")
    with pytest.raises(ServerError, match=r"(?s)ended with code 2.*invalid choice: 'no_such'"):
        server.__enter__()


def test_a_wrong_setting_stops_the_demo_with_its_name(tmp_path: Path) -> None:
    done = _demo(tmp_path, SGLANG_PAT_POLICY="clever")
    assert done.returncode == 1 and "SGLANG_PAT_POLICY=clever" in done.stderr
    assert not list(tmp_path.iterdir())  # neither a model was made nor a server started


def answer(*tokens: int, prompt: int = 1, logprob: float = -1.0) -> Generation:
    """Each token with that log-probability, and the next one with one less."""
    steps = [{token: logprob, token + 1: logprob - 1} for token in tokens]
    return Generation([prompt], list(tokens), steps, 0.01)


STOCK = answer(4, 5, 6, 7)


def test_answers_are_compared_up_to_the_first_other_token() -> None:
    assert compare([STOCK], [STOCK]) == Agreement(1.0, 0.0, 0.0, 1.0)
    # The stock's 6 is 0.5 more likely to the stock; what follows has another context.
    other = answer(4, 5, 5, 7, logprob=-1.0)
    assert compare([STOCK, other], [STOCK, STOCK]) == Agreement(7 / 8, 1.0, 1 / 7, 1.0)
    assert compare([STOCK, answer(4, 9, 6, 7)], [STOCK, STOCK]).max_diff == math.inf
    assert compare([STOCK, answer(4, 9, 6, 7, prompt=2)], [STOCK, STOCK]).max_diff == 0


@pytest.mark.parametrize("position", range(4))
def test_a_nan_is_never_passed_over(position: int) -> None:
    steps = [*STOCK.likeliest]
    steps[position] = {STOCK.tokens[position]: math.nan, 0: -2.0}
    found = compare([STOCK._replace(likeliest=steps)], [STOCK])
    assert math.isnan(found.max_diff) and math.isnan(found.mean_diff)
    assert not any(found.passes(scale) for scale in SCALES.values())


def test_what_is_printed_adds_up() -> None:
    counters = Counters(decode_steps=10, packed_steps=9, kv_tokens_read=20, kv_tokens_unpacked=80)
    pat, stock = (Run(name, [STOCK], [STOCK], 2.0, counters) for name in ("pat", "fa3"))
    text = run.report(pat, stock, compare([STOCK], [STOCK]))
    assert "saved: 75%" in text and "packed: 9 of 10" in text and "to fa3: 100.0%" in text
    assert (pat.tpot_ms, pat.tokens_per_s) == (10, 2)


METRICS = """
# TYPE sglang_pat_decode_steps_total counter
sglang_pat_decode_steps_total{dp_rank="0",tp_rank="0"} 3.0
sglang_pat_decode_steps_total{dp_rank="1",tp_rank="0"} 2.0
# TYPE sglang_pat_plan_seconds_total counter
sglang_pat_plan_seconds_total{tp_rank="0"} 0.25
# TYPE sglang_pat_base_forwards_total counter
sglang_pat_base_forwards_total{dp_rank="0",kind="extend",tp_rank="0"} 2.0
sglang_pat_base_forwards_total{dp_rank="1",kind="extend",tp_rank="0"} 1.0
sglang_pat_base_forwards_total{dp_rank="1",kind="idle",tp_rank="0"} 0.0
# TYPE sglang_pat_serving gauge
sglang_pat_serving{tp_rank="0"} 1.0
# TYPE sglang_pat_fallbacks_total counter
sglang_pat_fallbacks_total{reason="a layer with, \\"quotes\\"",tp_rank="0"} 1.0
# TYPE sglang_gen_throughput gauge
sglang_gen_throughput 3.0
"""


def test_counters_of_all_replicas_and_of_a_span_of_time() -> None:
    assert parse_counters(METRICS) == Counters(
        decode_steps=5,
        plan_seconds=0.25,
        base_forwards={"extend": 3},
        fallbacks={'a layer with, "quotes"': 1},
    )
    assert parse_counters("") == Counters()
    before = Counters(decode_steps=2, base_forwards={"extend": 2}, fallbacks={"old": 1})
    after = Counters(decode_steps=7, base_forwards={"extend": 3}, fallbacks={"old": 1, "new": 4})
    expected = Counters(decode_steps=5, base_forwards={"extend": 1}, fallbacks={"new": 4})
    assert after - before == expected


def test_equal_parameters_give_equal_files_and_others_replace_them(tmp_path: Path) -> None:
    weights = [make_model(tmp_path / n, **SMALL) / "model.safetensors" for n in "ab"]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    kept = weights[0].with_name("tokenizer.json")
    kept.write_text("{}")
    written = weights[0].stat().st_mtime_ns
    make_model(tmp_path / "a", **SMALL)
    assert weights[0].stat().st_mtime_ns == written
    for change in ({"seed": 1}, {"dtype": "bfloat16"}, {"layers": 3}):
        make_model(tmp_path / "a", **SMALL | change)
        assert weights[0].read_bytes() != weights[1].read_bytes()
    assert kept.read_text() == "{}"


@pytest.mark.parametrize("wrong", [{"q_heads": 3}, {"head_dim": 33}, {"architecture": "Nothing"}])
def test_wrong_parameters_are_named_and_nothing_is_written(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=str(*wrong.values())):
        make_model(tmp_path / "model", **SMALL | wrong)
    assert not (tmp_path / "model").exists()


def _greedy(model: Any, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    mask, length = torch.ones_like(prompts), {"max_new_tokens": tokens, "min_new_tokens": tokens}
    with torch.no_grad():
        answers: torch.Tensor = model.generate(
            prompts, attention_mask=mask, do_sample=False, pad_token_id=0, **length
        )
    return answers[:, prompts.shape[1] :]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_attention_decides_the_tokens(tmp_path: Path, architecture: str) -> None:
    """Zeroed attention, and 16 other tokens far back in the prompt, each change every answer."""
    folder = make_model(tmp_path, **SMALL, architecture=architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, SMALL["vocab"], (6, 200), generator=generator)
    answers = _greedy(model, prompts, 16)
    assert len({tuple(each) for each in answers.tolist()}) == len(prompts)

    other = prompts.clone()
    other[:, 40:56] = torch.randint(1, SMALL["vocab"], (6, 16), generator=generator)
    assert (_greedy(model, other, 16) != answers).any(dim=1).all()

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, out: out * 0)
    assert (_greedy(model, prompts, 16) != answers).any(dim=1).all()
