# SPDX-License-Identifier: Apache-2.0
"""Builds a model of SGLang without weights, and compares its attention layers with what doctor says
of its config.json. What is known of architectures (``facts``) is not asked of the built model: its
own source tells what it gives its attention."""

from __future__ import annotations

import ast
import inspect
import json
import re
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from models.configs import config_of
from sglang_pat.gpus import SHARED_PER_BLOCK, machine_of
from sglang_pat.srt import layers, support, verdict

MACHINE = machine_of("H100")
SHARED = SHARED_PER_BLOCK[MACHINE.major, MACHINE.minor]
# Arguments of an attention layer that pat takes, or that are no business of the backend's.
TAKEN = {"q", "k", "v", "sinks", "forward_batch", "save_kv_cache", "key_value_num_tokens"}


def compare(architecture: str) -> dict[str, Any]:
    """Doctor's ``status`` and ``reason``, and ``wrong``: of layers that one side serves and the
    other does not, what doctor and what the model says, by layer id. Without ``wrong``, SGLang's
    resolution refuses what it is asked.

    Leaves SGLang's process-wide state changed: for a process of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_of(architecture)))
        with mock.patch.object(verdict, "_weigh", side_effect=verdict._weigh) as weigh:
            asked = ["--model-path", folder, "--attention-backend", "pat"]
            found = verdict.judge(asked, gpu=MACHINE.name.split()[1])
        said = {"status": found.status, "reason": " ".join(map(str, found.reasons))}
        if weigh.call_args is None:
            return said
        args, model_config = weigh.call_args.args[:2]
        model = build(args, model_config)
    by_doctor = verdict._layers(support.by_arguments(args, model_config, MACHINE), SHARED)
    doctors = {layer: why for why, ids in by_doctor.items() for layer in ids}
    models = reasons_in(model, model_config)
    wrong = {
        layer: (doctors.get(layer, "no layer"), models.get(layer, "no layer"))
        for layer in doctors | models
        if (doctors.get(layer) == "") != (models.get(layer) == "")
    }
    # Where it starts and serves nothing for another reason, or is refused.
    elsewhere = not all(reason.serves for reason in found.reasons)
    return said | {"wrong": {} if elsewhere else wrong}


def build(server_args: Any, model_config: Any) -> torch.nn.Module:
    """The model of a server on the meta device, in a process of one rank."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.runtime_context import SpawnRanks, publish

    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(
            **{"backend": "gloo", "world_size": 1, "rank": 0, "local_rank": 0},
            distributed_init_method=f"file://{folder}/meeting",
        )
        parallel_state.initialize_model_parallel()
    initialize_dp_attention(server_args=server_args)
    torch.set_default_dtype(model_config.dtype)
    line, empty = torch.linspace, torch.empty
    with (
        torch.device("meta"),
        # What models ask of a GPU when they are made, and numbers that they read back.
        mock.patch.object(torch.cuda, "current_device", lambda: torch.device("meta")),
        mock.patch.object(torch.cuda, "Stream", mock.MagicMock()),
        mock.patch.object(torch.nn.Module, "to", lambda self, *a, **k: self),
        mock.patch.object(torch, "empty", lambda *a, **k: empty(*a, **k | {"device": "meta"})),
        mock.patch.object(torch, "linspace", lambda *a, **k: line(*a, **k | {"device": "cpu"})),
    ):
        model: torch.nn.Module = _initialize_model(model_config, LoadConfig())
    return model


def reasons_in(model: torch.nn.Module, model_config: Any) -> dict[int, str]:
    """Why a layer of a model is SGLang's, or "", by its id."""
    planned = layers.heads_by_config(model_config, 1)
    taken = TAKEN | ({"q_rope", "k_rope"} if layers.reads_latents(planned) else set())
    callers = dict(callers_in(model))
    paths = {module: path for path, module in model.named_modules()}
    reasons: dict[int, str] = {}
    shared: dict[int, str] = {}
    gpu = SimpleNamespace(shared_memory_per_block_optin=SHARED)
    for layer in layers.attention_layers(model, planned):
        keys = torch.empty(0, layer.tp_k_head_num, layer.qk_head_dim, dtype=torch.bfloat16)
        values = torch.empty(0, layer.tp_v_head_num, layer.v_head_dim, dtype=torch.bfloat16)
        pool = SimpleNamespace(device="cuda")
        pool.get_key_buffer, pool.get_value_buffer = (lambda _, k=keys: k), (lambda _, v=values: v)
        with mock.patch.object(torch.cuda, "get_device_properties", lambda _: gpu):
            reason = layers.reason_against_layer(layer, torch.bfloat16, pool, planned)
        if not reason and layer in callers:
            reason = ", ".join(sorted({*arguments_of(*callers[layer])} - taken))
        reasons[layer.layer_id] = reasons.get(layer.layer_id) or reason
        # A layer that reads the K/V of another has the other's id.
        if number := re.search(r"\blayers\.(\d+)\.", paths.get(layer, "")):
            shared.setdefault(int(number[1]), reason)
    return shared | reasons


def callers_in(model: torch.nn.Module) -> Iterator[tuple[Any, tuple[Any, str]]]:
    """Of each module: the one that calls it, and by what name."""
    several = torch.nn.ModuleDict | torch.nn.ModuleList
    for module in model.modules():
        for name, child in module.named_children():
            for each in child.children() if isinstance(child, several) else [child]:
                yield each, (module, name)


def arguments_of(module: Any, name: str) -> Iterator[str]:
    """What ``module`` gives its attention ``name``, by its source; what is None in this module is
    not given."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith("sglang."):
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
            yield from _given(tree, module, name)


def _given(node: ast.AST, module: Any, name: str) -> Iterator[str]:
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If):
        taken = _value(node.test, module)
        children = [*(node.body if taken else []), *(node.orelse if taken in (False, "?") else [])]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split("[")[0] == f"self.{name}":
        for keyword in node.keywords:
            value = _value(keyword.value, module)
            if keyword.arg is None:
                yield from value if isinstance(value, dict) else ()
            elif value is not None:
                yield keyword.arg
    for child in children:
        yield from _given(child, module, name)


def _value(expression: ast.expr, module: Any) -> Any:
    """Of an expression of ``self`` alone; "?" where it needs more."""
    try:
        return eval(ast.unparse(expression), {"self": module})
    except Exception:
        return "?"
