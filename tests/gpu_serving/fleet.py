# SPDX-License-Identifier: Apache-2.0
"""The servers of these tests by name: MODEL-BACKEND, or MODEL-BACKEND-OPTION. A test's row names
those it needs as ``servers``, or its module as ``SERVERS``.

SGLang's defaults apply, prefill graphs, overlap and the Rust tree core among them, but for the
memory of some twenty servers on one GPU (``serving/server.py``) and what an option is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from kit.hybrid_models import FAMILIES, make_hybrid
from serving.adapters import RANK, TARGETS, make_adapter
from serving.server import Config, ServingServer

from sglang_pat.demo.smollm2 import model_folder

from .models import make_eagle, make_eagle3, make_gemma2, make_llama, make_qwen3, with_kv_scales

# Logits in fp32 leave the attention as the main thing that rounds.
COMPARED = ("--enable-fp32-lm-head", "--enable-custom-logit-processor")
ADAPTERS = ("red", "blue")
# Tokens of the K/V pool of the server with a second level of cache: less than half of what its
# test asks for, so that nodes are evicted.
SMALL_POOL = 4096
DRAFT_TOKENS, TREE_TOKENS = 4, 8
FOLDER = "{models}"  # in an argument: the folder of all models and adapters


def _smollm2(path: Path) -> Path:
    """A real model; raises NoPackage where its weights are not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(model_folder(), target_is_directory=True)
    return path


_llama4 = partial(make_llama, q_heads=8, kv_heads=2)
_HEADS = ("num_attention_heads", "num_key_value_heads")
MODELS: dict[str, Callable[[Path], Path]] = {
    "smollm2": _smollm2,
    "ratio4": _llama4,
    "ratio4b": partial(_llama4, seed=1),  # other weights
    "qwen3": make_qwen3,
    "eagle4": make_eagle,
    "eagle34": make_eagle3,
    "scaled4": lambda path: with_kv_scales(_llama4(path)),
    "ratio5": partial(make_llama, q_heads=10, kv_heads=2),
    "ratio7": partial(make_llama, q_heads=14, kv_heads=2, head_dim=64),
    "ratio8": partial(make_llama, q_heads=16, kv_heads=2),
    "gemma2": make_gemma2,
    **{family: partial(make_hybrid, family=family) for family in FAMILIES},
    "mtp": partial(make_hybrid, family="qwen3_next", mtp=True),
    # Eight query heads: with four draft tokens as many packed rows as pat takes of latents.
    "latents8": partial(make_hybrid, family="deepseek_v2", **{name: 8 for name in _HEADS}),
}


def _drafted(
    algorithm: str, draft_model: str, *, top_k: int = 1, draft_tokens: int = DRAFT_TOKENS
) -> tuple[str, ...]:
    """A model of ``MODELS`` drafts tokens in three steps: a chain, or with a ``top_k`` above 1 a
    tree."""
    return (
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", f"{FOLDER}/{draft_model}"),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", str(top_k)),
        *("--speculative-num-draft-tokens", str(draft_tokens)),
    )


_trees = partial(_drafted, top_k=4, draft_tokens=TREE_TOKENS)


def _ngram(draft_tokens: int = DRAFT_TOKENS, breadth: int = 1) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "NGRAM"),
        *("--speculative-ngram-max-bfs-breadth", str(breadth)),
        *("--speculative-num-draft-tokens", str(draft_tokens)),
    )


# FlashInfer's fused all-reduce may use NVLink multicast: see README.md.
_TP2 = ("--tp-size", "2", "--enforce-disable-flashinfer-allreduce-fusion")
_FP8 = ("--kv-cache-dtype", "fp8_e4m3")
_PAGES = ("--page-size", "16")
_FA3_PREFILL = ("--prefill-attention-backend", "fa3")
OPTIONS: dict[str, tuple[str, ...]] = {
    "": (),
    "fp8_e5m2": ("--kv-cache-dtype", "fp8_e5m2"),
    "fp8_e4m3": _FP8,
    "fp8_flashinfer": (*_FP8, "--prefill-attention-backend", "flashinfer"),
    "compiled": ("--enable-torch-compile",),
    "deterministic": ("--enable-deterministic-inference",),
    "pages": _PAGES,  # and pat serves single requests, too (``ENV``)
    "pages_fa3_prefill": (*_PAGES, *_FA3_PREFILL),
    "pages64": ("--page-size", "64"),
    "no_graphs": ("--disable-cuda-graph",),
    "fa3_prefill": _FA3_PREFILL,
    "flashinfer_prefill": ("--prefill-attention-backend", "flashinfer"),
    "adapters": (
        *("--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", *TARGETS),
        *("--max-loras-per-batch", str(len(ADAPTERS) + 1)),  # the bare model takes a place, too
        *("--lora-paths", *(f"{name}={FOLDER}/{name}" for name in ADAPTERS)),
    ),
    "two_levels": (
        *("--enable-hierarchical-cache", "--hicache-write-policy", "write_back"),
        *("--hicache-ratio", "4", "--max-total-tokens", str(SMALL_POOL)),
    ),
    "sleeper": (
        *("--enable-memory-saver", "--enable-weights-cpu-backup"),
        # So many that the workspace is seen beside the rest of the server's memory.
        *("--max-running-requests", "2048"),
    ),
    # The model drafts for itself, so that some drafts are right; those of other weights are nearly
    # all wrong.
    "right": _drafted("STANDALONE", "ratio4"),
    "right_pages64": (*_drafted("STANDALONE", "ratio4"), "--page-size", "64"),
    "no_overlap": (*_drafted("STANDALONE", "ratio4"), "--disable-overlap-schedule"),
    "wrong": _drafted("STANDALONE", "ratio4b"),
    "eagle": _drafted("EAGLE", "eagle4"),
    "eagle3": _drafted("EAGLE3", "eagle34"),
    "right_trees": _trees("STANDALONE", "ratio4"),
    "eagle_trees": _trees("EAGLE", "eagle4"),
    "ngram": _ngram(),
    "ngram_trees": _ngram(TREE_TOKENS, breadth=10),
    "ngram8": _ngram(8),
    "nextn": _drafted("NEXTN", "mtp"),
    "latents": _drafted("STANDALONE", "latents8"),
    "latents_trees": _trees("STANDALONE", "latents8", top_k=2, draft_tokens=DRAFT_TOKENS),
    # Two GPUs; data parallel attention, where a rank may pad or be idle.
    "tp2": _TP2,
    "dp2": (*_TP2, "--dp-size", "2", "--enable-dp-attention"),
    "tp2_right": (*_TP2, *_drafted("STANDALONE", "qwen3")),
}
# Of a model, beside its option. SGLang would fill most of the memory with states. Every layer of a
# Falcon-H1 attends. So SGLang 0.5.23 takes it for one without state spaces and captures these in
# prefill graphs. Replayed, they read the capture's metadata, which is freed by then.
_STATES = ("--max-mamba-cache-size", "512")
_STATELESS = ("gemma3", "gpt_oss", "deepseek_v2")
OF_MODEL = {family: _STATES for family in (*FAMILIES, "mtp") if family not in _STATELESS}
OF_MODEL["falcon_h1"] = (*_STATES, "--disable-prefill-cuda-graph")
ENV = {"pages": {"SGLANG_PAT_MIN_BATCH": "1"}}
UNCHECKED = (("SGLANG_PAT_CHECK", "0"),)
# The other servers' growth makes ranks look unbalanced while they start.
_UNBALANCED = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
ENV |= {option: _UNBALANCED for option in ("tp2", "dp2", "tp2_right")}


class Fleet:
    """Servers on the models of one folder, started all at once: a start takes a minute of imports.

    Args:
        names: MODEL-BACKEND[-OPTION] each.
        folder: gets the models, the adapters and the logs.
        device: ``cuda`` or ``cpu``.
        check: whether pat's servers check every plan, which waits for the GPU.
    """

    def __init__(
        self, names: Iterable[str], folder: Path, device: str = "cuda", *, check: bool = True
    ) -> None:
        self.models = folder / "models"
        self._folder, self._device, self._check = folder, device, check
        self._ready: set[str] = set()
        self._servers = {name: self._make(name) for name in names}

    def _make(self, name: str) -> ServingServer:
        model, backend, option = (*name.split("-"), "")[:3]
        args = (*COMPARED, *OF_MODEL.get(model, ()), *OPTIONS[option])
        for arg in args:
            if arg.startswith(FOLDER):
                self.model(arg.removeprefix(f"{FOLDER}/"))
        for seed, adapter in enumerate(ADAPTERS if option == "adapters" else ()):
            if not (self.models / adapter).exists():
                make_adapter(self.models / adapter, self.model(model), seed=seed)
        config = Config(
            name,
            backend=backend,
            args=tuple(arg.replace(FOLDER, str(self.models)) for arg in args),
            env=tuple(ENV.get(option, {}).items()) + (() if self._check else UNCHECKED),
            device=self._device,
        )
        return ServingServer(self.model(model), config, self._folder / name)

    def model(self, name: str) -> Path:
        """The folder of a model, made when it is first asked for."""
        path = self.models / name
        return path if path.exists() else MODELS[name](path)

    def start(self) -> None:
        for server in self._servers.values():
            server.start()

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()

    def starting(self, name: str) -> ServingServer:
        """A server that may not be ready, or must not become so."""
        return self._servers[name]

    def __call__(self, name: str) -> ServingServer:
        """A server by name, once it is ready.

        Raises:
            KeyError: the test does not name it.
            ServerError: it did not start.
        """
        server = self._servers[name]
        if name not in self._ready:
            server.wait_until_ready()
            self._ready.add(name)
        return server
