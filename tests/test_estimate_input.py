# SPDX-License-Identifier: Apache-2.0
"""What ``sglang-pat estimate`` reads, and what it says of mistakes in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_pat import cli
from sglang_pat.demo.tokenizer import make_tokenizer
from sglang_pat.estimate.model import Model, open_model
from sglang_pat.estimate.prompts import prompts_of, read_bodies
from sglang_pat.estimate.requests import InputError, Prompts
from sglang_pat.estimate.shape import heads_of_rank
from sglang_pat.estimate.tokenizing import Tokenizer
from sglang_pat.estimate.trace import read_trace


def written(folder: Path, *lines: object) -> Path:
    file = folder / "lines.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n")
    return file


def read_prompts(file: Path, tokenizer: Tokenizer | None, output_tokens: int) -> Prompts:
    return prompts_of(read_bodies(file), tokenizer, output_tokens)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(make_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def test_prompts_of_all_kinds(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = written(
        tmp_path,
        {"prompt": "Where is my parcel?", "output_tokens": 9},
        "",
        {"messages": [{"role": "user", "content": "Where is my parcel?"}], "n": 3},
        {"custom_id": "a", "body": {"input_ids": [5, 6, 7], "model": "not looked at"}},
    )
    requests = read_prompts(file, tokenizer, 256).requests
    assert [request.line for request in requests] == [1, 3, 4]
    assert [request.output for request in requests] == [9, 256, 256]
    assert [request.samples for request in requests] == [1, 3, 1]
    texts = [tokenizer.decode(request.symbols.tolist()) for request in requests]
    assert texts[0] == "Where is my parcel?"
    assert texts[1] == "<|user|>\nWhere is my parcel?<|end|>\n<|assistant|>\n"
    assert requests[2].symbols.tolist() == [5, 6, 7]
    assert [request.length for request in requests] == [len(r.symbols) for r in requests]


def test_an_answer_is_no_longer_than_a_request_allows(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"input_ids": [1], "max_tokens": 40},
        {"input_ids": [1], "max_tokens": 4096},
        {"body": {"input_ids": [1], "max_completion_tokens": 30, "max_tokens": None}},
        {"input_ids": [1], "max_tokens": 40, "output_tokens": 50},
    )
    requests = read_prompts(file, None, 256).requests
    assert [request.output for request in requests] == [40, 256, 30, 50]


def test_tool_calls_as_the_openai_sdk_writes_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The text of such an answer is None and its arguments are JSON, which templates do not take:
    SGLang turns both before it renders them."""
    call = {"id": "a", "type": "function", "function": {"name": "order", "arguments": '{"n": 1}'}}
    broken = {**call, "function": {"name": "order", "arguments": '{"n": '}}
    told = {"role": "assistant", "content": None, "tool_calls": [call, broken]}
    result = {"role": "tool", "tool_call_id": "a", "content": "on its way"}
    file = written(
        tmp_path,
        {"messages": [{"role": "user", "content": "Where?"}, told, result, result]},
        {"messages": [{"role": "user", "content": "Where?"}, {**told, "content": ""}]},
    )
    first, second = read_prompts(file, tokenizer, 256).requests
    text = tokenizer.decode(first.symbols.tolist())
    assert text.startswith("<|user|>\nWhere?<|end|>\n<|assistant|>\n<|end|>\n<|tool|>\non its way")
    assert tokenizer.decode(second.symbols.tolist()) == text.partition("<|tool|>")[0] + (
        "<|assistant|>\n"
    )
    seen: list[Any] = []

    class Template:
        def apply_chat_template(self, messages: list[Any], **_: object) -> str:
            seen.extend(messages)
            return ""

        def encode(self, text: str, **_: object) -> list[int]:
            return [1]

    spied = Tokenizer(tokenizer.name)
    spied._chat = Template()
    read_prompts(file, spied, 256)
    calls = seen[1]["tool_calls"]
    assert [type(call["function"]["arguments"]) for call in calls] == [dict, str]
    assert calls[0]["function"]["arguments"] == {"n": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON"),
        ([1], "line 2: must be an object with one of prompt, messages, input_ids"),
        ({"text": "hi"}, "must be an object with one of prompt, messages, input_ids"),
        ({"prompt": "a", "input_ids": [1]}, "must be an object with one of"),
        ({"prompt": 3}, "prompt is int, must be text"),
        ({"prompt": ""}, "the prompt has 0 tokens, must have 1 to 16,777,216"),
        ({"messages": []}, "messages must be a list of"),
        ({"messages": ["hi"]}, "messages must be a list of"),
        ({"messages": [{"role": "user"}]}, "chat template does not take the messages"),
        ({"input_ids": [1, -1]}, "input_ids must be a list of whole numbers from 0"),
        ({"input_ids": "12"}, "input_ids must be a list of whole numbers from 0"),
        ({"input_ids": [1], "output_tokens": 0}, "output_tokens: is 0, must be a whole number"),
        ({"input_ids": [1], "n": 5000}, "n: is 5000, must be a whole number from 1 to 1,024"),
        ({"input_ids": [1], "n": True}, "n: is True, must be"),
    ],
)
def test_a_line_that_is_no_prompt(
    line: object, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InputError) as raised:
        read_prompts(written(tmp_path, {"prompt": "good"}, line), tokenizer, 256)
    assert message in str(raised.value)


def test_the_form_of_lines_is_checked_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes seconds to open one, or longer to look for it on Hugging Face."""

    def never(*_: Any) -> Any:
        raise AssertionError("a tokenizer was opened")

    monkeypatch.setattr("sglang_pat.estimate.tokenizing.Tokenizer.__init__", never)
    for line, message in (("{", "line 2: is not JSON"), ({"text": "hi"}, "line 2: must be an obj")):
        file = written(tmp_path, {"prompt": "good"}, line)
        assert cli.main(["estimate", "--prompts", str(file), "--tokenizer", "nowhere"]) == 1
        assert message in capsys.readouterr().err


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 1: is text, .*--tokenizer FOLDER_OR_NAME"):
        read_prompts(written(tmp_path, {"prompt": "hi"}), None, 256)
    with pytest.raises(InputError, match="holds no prompts"):
        read_prompts(written(tmp_path, ""), None, 256)


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--tokenizer .*cannot be opened: .*; give the folder"):
        Tokenizer(str(tmp_path))


def test_without_transformers_a_tokenizer_json_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer")
    monkeypatch.setitem(sys.modules, "transformers", None)
    plain = Tokenizer(str(folder / "tokenizer.json"))
    text = "Where is my parcel?"
    assert plain.encode(text) == tokenizer.encode(text)
    assert plain.decode(plain.encode(text)) == text
    with pytest.raises(InputError, match="messages need a chat template"):
        plain.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(InputError, match=r"tokenizer\.json does not exist.*pip install transform"):
        Tokenizer(str(tmp_path))


def test_without_any_library_the_way_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install transformers.*input_ids"):
        Tokenizer(str(tmp_path))


def test_a_trace(tmp_path: Path) -> None:
    line = {"timestamp": 3, "input_length": 700, "output_length": 0, "hash_ids": [4, 9]}
    requests = read_trace(written(tmp_path, line))
    assert requests.unit == 512
    (request,) = requests.requests
    assert (request.length, request.output, request.symbols.tolist()) == (700, 1, [4, 9])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_length": 0}, "input_length: is 0, must be a whole number from 1"),
        ({"output_length": "9"}, "output_length: is None"),
        ({"hash_ids": [4]}, "input_length is 700, but there are 1 hash_ids"),
        ({"hash_ids": 4}, "hash_ids must be a list"),
    ],
)
def test_a_line_that_is_no_trace(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    line = {"timestamp": 3, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}
    with pytest.raises(InputError) as raised:
        read_trace(written(tmp_path, line | change))
    assert "line 1" in str(raised.value) and message in str(raised.value)


def test_other_files_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be an object with input_length"):
        read_trace(written(tmp_path, {"prompt": "hi"}))
    with pytest.raises(InputError, match="is not JSON"):
        read_trace(written(tmp_path, "timestamp,input_length"))
    with pytest.raises(InputError, match="holds no requests"):
        read_trace(written(tmp_path, ""))


CONFIG = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}
DENSE = 4 * (2 * 512 * 64 * (8 + 2) + 3 * 512 * 1024) + 1000 * 512


def model_of(folder: Path, **changes: Any) -> Model:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return open_model(str(folder))


def test_a_dense_model(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    assert (model.q_heads, model.kv_heads, model.head_dim, model.attention_layers) == (8, 2, 64, 4)
    assert model.bytes_read(1) == model.bytes_read(99) == 2 * DENSE
    assert model.flops(3) == 6 * DENSE


def test_weights_of_few_bits_are_fewer_bytes(tmp_path: Path) -> None:
    assert model_of(tmp_path, quantization_config={"bits": 4}).weight_bytes == 0.5
    assert model_of(tmp_path, quantization_config={"quant_method": "fp8"}).weight_bytes == 1
    assert model_of(tmp_path, torch_dtype="float32").weight_bytes == 2  # as SGLang loads them


def test_more_requests_read_more_experts(tmp_path: Path) -> None:
    model = model_of(tmp_path, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=256)
    expert = 4 * 3 * 512 * 256
    assert model.expert == expert
    few, all_ = model.bytes_read(1), model.bytes_read(10_000)
    assert few == pytest.approx(2 * (model.dense + 2 * expert))
    assert all_ == pytest.approx(2 * (model.dense + 16 * expert))
    assert model.flops(1) == 2 * (model.dense + 2 * expert)


def test_layers_of_other_kinds_are_not_counted(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    assert model_of(tmp_path, layer_types=kinds).attention_layers == 2
    nested = {"text_config": CONFIG, "model_type": "two in one"}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert open_model(str(tmp_path)).layers == 4


def test_models_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be a folder with a config\.json or one of"):
        open_model(str(tmp_path))
    with pytest.raises(InputError, match="which pat does not serve"):
        model_of(tmp_path, kv_lora_rank=512)
    with pytest.raises(InputError, match="must have num_hidden_layers"):
        model_of(tmp_path, num_hidden_layers=0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    ("heads", "tp", "found"),
    [(None, 1, (32, 8)), (None, 4, (8, 2)), ("32/2", 4, (8, 1)), ("28/4", 2, (14, 2))],
)
def test_heads_of_a_rank(heads: str | None, tp: int, found: tuple[int, int]) -> None:
    assert heads_of_rank(open_model("llama3-8b"), heads, tp)[1:] == found


@pytest.mark.parametrize(
    ("heads", "tp", "message"),
    [
        ("32", 1, "--heads is '32', must be QUERY/KV"),
        ("32/0", 1, "the heads are 32/0"),
        ("32/5", 1, "the heads are 32/5: the KV heads must divide the query heads"),
        ("32/8", 3, "--tp is 3: it must divide the 32 query heads"),
        ("64/2", 1, "64 query heads share 2 KV heads on a GPU: pat's kernels have up to 16"),
    ],
)
def test_heads_that_make_no_sense(heads: str, tp: int, message: str) -> None:
    with pytest.raises(InputError) as raised:
        heads_of_rank(open_model("llama3-8b"), heads, tp)
    assert message in str(raised.value)
