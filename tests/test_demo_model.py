# SPDX-License-Identifier: Apache-2.0
"""The demo's model and tokenizer: made here, the same every time, and with teeth."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_pat.demo import workload as demo
from sglang_pat.demo.model import make_model
from sglang_pat.demo.scale import SCALES, VOCAB
from sglang_pat.demo.server import Server
from sglang_pat.demo.tokenizer import make_tokenizer
from sglang_pat.demo.workload import AgentWorkload, Generation

SMALL = {"hidden": 64, "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 300}


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_equal_parameters_give_equal_files(tmp_path: Path) -> None:
    first, second = make_model(tmp_path / "a", **SMALL), make_model(tmp_path / "b", **SMALL)
    assert {"config.json", "model.safetensors"} <= set(_bytes(first))
    assert _bytes(first) == _bytes(second)


@pytest.mark.parametrize("change", [{"seed": 1}, {"dtype": "bfloat16"}, {"layers": 3}])
def test_other_parameters_replace_the_model_in_a_folder(
    tmp_path: Path, change: dict[str, object]
) -> None:
    before = _bytes(make_model(tmp_path, **SMALL))
    after = _bytes(make_model(tmp_path, **{**SMALL, **change}))  # type: ignore[arg-type]
    assert before["model.safetensors"] != after["model.safetensors"]


def test_a_model_is_reused_and_other_files_are_kept(tmp_path: Path) -> None:
    weights = make_model(tmp_path, **SMALL) / "model.safetensors"
    (tmp_path / "tokenizer.json").write_text("{}")
    written = weights.stat().st_mtime_ns
    make_model(tmp_path, **SMALL)
    assert weights.stat().st_mtime_ns == written
    make_model(tmp_path, **SMALL, seed=1)
    assert weights.stat().st_mtime_ns != written
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"q_heads": 3}, "q_heads is 3 and kv_heads 2"),
        ({"head_dim": 33}, "head_dim is 33"),
        ({"dtype": "int8"}, "'int8'"),
        ({"architecture": "Nothing"}, "'Nothing'"),
    ],
)
def test_wrong_parameters_are_named_and_nothing_is_written(
    tmp_path: Path, wrong: dict[str, object], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        make_model(tmp_path / "model", **{**SMALL, **wrong})  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()


def _greedy(model: torch.nn.Module, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    with torch.no_grad():
        answers = model.generate(  # type: ignore[operator]
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return answers[:, prompts.shape[1] :]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_attention_decides_the_tokens(tmp_path: Path, architecture: str) -> None:
    """Zeroed attention, and 16 other tokens far back in the prompt, each change every answer."""
    folder = make_model(tmp_path, **{**SMALL, "hidden": 128}, architecture=architecture)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, SMALL["vocab"], (6, 200), generator=generator)
    answers = _greedy(model, prompts, 16)
    assert len({tuple(answer) for answer in answers.tolist()}) == len(prompts)

    other = prompts.clone()
    other[:, 40:56] = torch.randint(1, SMALL["vocab"], (6, 16), generator=generator)
    assert (_greedy(model, other, 16) != answers).any(dim=1).all()

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, out: out * 0)
    assert (_greedy(model, prompts, 16) != answers).any(dim=1).all()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> AutoTokenizer:
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=VOCAB)
    return AutoTokenizer.from_pretrained(folder)


def test_tokenizer_is_the_same_every_time(tmp_path: Path) -> None:
    first, second = make_tokenizer(tmp_path / "a"), make_tokenizer(tmp_path / "b")
    assert _bytes(first) == _bytes(second)


@given(st.text())
@settings(deadline=None)
def test_tokenizer_keeps_any_text(tokenizer: AutoTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token < VOCAB for token in ids)
    assert tokenizer.decode(ids) == text


def test_tokenizer_has_a_text_for_every_row_of_the_model(tokenizer: AutoTokenizer) -> None:
    assert len(tokenizer) == VOCAB
    assert len(set(tokenizer.convert_ids_to_tokens(range(VOCAB)))) == VOCAB
    assert tokenizer.eos_token_id == 0  # what make_model writes to config.json


@pytest.mark.parametrize(("vocab", "named"), [(200, "need 261"), (50_000, "tokens only")])
def test_tokenizer_names_a_vocabulary_it_cannot_have(
    tmp_path: Path, vocab: int, named: str
) -> None:
    with pytest.raises(ValueError, match=f"vocab is {vocab}.*{named}"):
        make_tokenizer(tmp_path, vocab=vocab)


def test_chats_share_what_they_have_in_common(tokenizer: AutoTokenizer) -> None:
    """Tools and system prompt first: the prompts of all agents begin with the same tokens."""
    workload = AgentWorkload.load()
    prompts = []
    for agent in workload.agents:
        chat = [
            {"role": "system", "content": workload.system},
            {"role": "system", "content": agent["prompt"]},
            {"role": "user", "content": agent["tasks"][0]},
        ]
        text = tokenizer.apply_chat_template(
            chat, tools=workload.tools, tokenize=False, add_generation_prompt=True
        )
        assert all(json.dumps(tool["function"]["name"]) in text for tool in workload.tools)
        assert text.endswith("<|assistant|>\n")
        prompts.append(tokenizer.encode(text))
    shared = next(i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    assert shared > 1000
    assert all(len(prompt) < 1.25 * shared for prompt in prompts)


def _prompt_tokens(tokenizer: AutoTokenizer, workload: AgentWorkload) -> list[list[int]]:
    """The first prompt of each conversation."""
    prompts = []
    for agent in workload.agents:
        for task in agent["tasks"]:
            chat = [
                {"role": "system", "content": workload.system},
                {"role": "system", "content": agent["prompt"]},
                {"role": "user", "content": task},
            ]
            text = tokenizer.apply_chat_template(
                chat, tools=workload.tools, tokenize=False, add_generation_prompt=True
            )
            prompts.append(tokenizer.encode(text))
    return prompts


def test_a_gpu_s_demo_is_made_of_attention(tokenizer: AutoTokenizer) -> None:
    """The figures in ``scale.py``: a stock decode step reads K/V for milliseconds, all fits."""
    scale = SCALES["cuda"]
    model = scale.model
    workload = AgentWorkload.load(
        parts=scale.parts, handbook=scale.handbook, max_tokens=scale.max_tokens
    )
    assert workload.num_conversations == 144 == 24 * scale.parts
    prompts = _prompt_tokens(tokenizer, workload)
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
    common = next(i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    assert 4300 < common < 4500
    own = sum(map(len, prompts)) / len(prompts) - common
    assert 120 < own < 200
    token_bytes = model["layers"] * model["kv_heads"] * model["head_dim"] * 2 * 2
    assert token_bytes == 64 << 10
    read_s = sum(map(len, prompts)) * token_bytes / 4.8e12
    assert read_s > 8e-3  # at the memory bandwidth of an H200
    follow_up = len(tokenizer.encode(workload.follow_up))
    longest = max(map(len, prompts)) + 2 * scale.max_tokens + follow_up + 20
    assert longest < 8192  # make_model's max_positions
    assert common + len(prompts) * (longest - common) < scale.kv_tokens
    width = model["head_dim"] * (2 * model["q_heads"] + 2 * model["kv_heads"])
    layer = model["hidden"] * (width + 6 * model["hidden"])
    assert 2 * (model["layers"] * layer + 2 * VOCAB * model["hidden"]) < 0.5e9


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_demo_s_models_have_a_head_dim_that_kernels_are_made_for(device: str) -> None:
    model = SCALES[device].model
    assert model["head_dim"] == 128
    assert model["q_heads"] == 4 * model["kv_heads"]


def test_parts_are_conversations_of_their_own() -> None:
    once, twice = AgentWorkload.load(), AgentWorkload.load(parts=2)
    assert twice.num_conversations == 2 * once.num_conversations
    assert once == AgentWorkload.load(parts=1) != AgentWorkload.load(parts=1, logprobs=False)
    assert twice.agents[0]["tasks"][0].startswith(once.agents[0]["tasks"][0])
    assert (twice.tools, twice.system) == (once.tools, once.system)


class Pausing:
    """In place of a server: what is asked in a turn is answered once all of it has come."""

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.turns: list[set[str]] = []
        self._goes_on = threading.Event()
        self._came = threading.Semaphore(0)

    @contextmanager
    def paused_until_arrived(self, requests: int) -> Iterator[None]:
        self.turns.append(set())
        self._goes_on.clear()
        yield
        for _ in range(requests):
            assert self._came.acquire(timeout=10)
        self._goes_on.set()

    def answer(self, _client: Any, _workload: Any, name: str, *_args: Any, **_: Any) -> Generation:
        if name != "warm-up":
            self.turns[-1].add(name)
            self._came.release()
            assert self._goes_on.wait(10)
        return Generation(name, [1], [2], [0.0], [0.0], "yes", 0.0)


def test_the_requests_of_a_turn_are_answered_once_all_have_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, asked = Pausing(), AgentWorkload.load(max_tokens=1)
    monkeypatch.setattr(demo, "_ask", server.answer)
    answers, _ = demo.run_workload(cast(Server, server), asked, label="test")
    talks = [f"{agent['name']}/{task}" for agent in asked.agents for task in range(4)]
    assert server.turns == [{f"{talk}/{turn}" for talk in talks} for turn in range(2)]
    assert [answer.name for answer in answers] == [f"{t}/{turn}" for t in talks for turn in (0, 1)]
