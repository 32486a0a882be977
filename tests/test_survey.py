# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model the plugin will serve, found out from its modules and the K/V pool before
the first forward. No server, no GPU."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

from kit.runner import DIM, HEADS, KV_HEADS, make_layer, make_pool, make_runner, set_ranks

from sglang_pat.srt.layers import SPARSE
from sglang_pat.srt.survey import heads_of, survey_layers


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ranks(monkeypatch, 1)


def test_plain_layers_are_all_served() -> None:
    found = survey_layers(make_runner([make_layer(0), make_layer(1)]))
    assert found.reasons == {0: "", 1: ""} and not found.serves_none
    assert str(found) == "all 2 attention layers"


def test_a_sliding_window_leaves_a_layer_to_the_base() -> None:
    found = survey_layers(make_runner([make_layer(0), make_layer(1, sliding_window_size=128)]))
    assert found.reasons == {0: "", 1: "a sliding window"}
    assert str(found) == "1 of 2 attention layers (1 with a sliding window)"
    assert not found.serves_none


def test_llama_4_attends_in_chunks_where_it_has_rope() -> None:
    # As in SGLang's models/llama4.py: every fourth layer has no rope, and only that tells it apart.
    layers = [make_layer(i, use_irope=(i + 1) % 4 != 0) for i in range(8)]
    found = survey_layers(make_runner(layers))
    ours = [layer for layer, reason in found.reasons.items() if not reason]
    assert ours == [3, 7]
    assert found.reasons[0] == "chunked attention (use_irope)"


def test_a_layer_in_the_pool_of_sliding_windows_is_left_to_the_base() -> None:
    found = survey_layers(make_runner([make_layer(0), make_layer(1)], sliding=(0,)))
    assert found.reasons == {0: "its K/V in the sliding-window pool", 1: ""}


def test_a_layer_without_kv_in_the_pool_is_not_decided(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang_pat")
    runner = make_runner([make_layer(0), make_layer(1)], token_to_kv_pool=make_pool(1))
    assert survey_layers(runner).reasons == {0: ""}
    assert "attention layers 1 have no K/V in the pool" in caplog.text


def test_of_two_modules_with_one_layer_id_the_one_with_a_reason_counts() -> None:
    windowed = make_layer(0, sliding_window_size=128)
    for layers in ([windowed, make_layer(0)], [make_layer(0), windowed]):
        assert survey_layers(make_runner(layers)).reasons == {0: "a sliding window"}


def test_layers_of_sparse_attention_are_sglangs_though_they_look_like_others() -> None:
    """MiniMax M3: SGLang's wrapper sends them to a backend of its own."""
    config = {
        "architecture": "MiniMaxM3SparseForCausalLM",
        "hf_config": {"sparse_attention_config": {"sparse_attention_freq": [0, 1, 1]}},
    }
    found = survey_layers(make_runner([make_layer(layer) for layer in range(3)], config=config))
    assert found.reasons == {0: "", 1: SPARSE, 2: SPARSE}
    assert str(found).startswith("1 of 3 attention layers (2 with sparse attention")


def test_a_rank_has_its_share_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ranks(monkeypatch, 2)
    assert heads_of(make_runner([])) == (HEADS // 2, KV_HEADS // 2, DIM, 1)
