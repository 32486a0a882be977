# SPDX-License-Identifier: Apache-2.0
"""The servers of these tests by name. A module names those it needs as ``SERVERS``.

SGLang's defaults apply, prefill graphs, overlap and the Rust tree core among them, but for the
memory of some twenty servers on one GPU (``serving/server.py``) and what a configuration is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from kit.hybrid_models import FAMILIES, make_hybrid
from serving.adapters import RANK, TARGETS, make_adapter
from serving.server import Config, ServingServer

from .models import make_eagle, make_eagle3, make_gemma2, make_llama, with_kv_scales

# Logits in fp32 leave the attention as the main thing that rounds.
COMPARED = ("--enable-fp32-lm-head", "--enable-custom-logit-processor")
WINDOW = 64
ADAPTERS = ("red", "blue")
# Tokens of the K/V pool of the server with a second level of cache: less than half of what its
# test asks for, so that nodes are evicted.
SMALL_POOL = 4096

MODELS: dict[str, Callable[[Path], Path]] = {
    "ratio4": lambda path: make_llama(path, q_heads=8, kv_heads=2),
    "ratio4b": lambda path: make_llama(path, q_heads=8, kv_heads=2, seed=1),  # other weights
    "eagle4": lambda path: make_eagle(path, q_heads=8, kv_heads=2),
    "eagle34": lambda path: make_eagle3(path, q_heads=8, kv_heads=2),
    "scaled4": lambda path: with_kv_scales(make_llama(path, q_heads=8, kv_heads=2)),
    "ratio5": lambda path: make_llama(path, q_heads=10, kv_heads=2),
    "ratio7": lambda path: make_llama(path, q_heads=14, kv_heads=2, head_dim=64),
    "ratio8": lambda path: make_llama(path, q_heads=16, kv_heads=2),
    "gemma2": lambda path: make_gemma2(path, window=WINDOW),
    **{
        family: lambda path, family=family: make_hybrid(path, family)  # type: ignore[misc]
        for family in FAMILIES
    },
    "mtp": lambda path: make_hybrid(path, "qwen3_next", mtp=True),
}
DRAFT_TOKENS, TREE_TOKENS = 4, 8
# In an argument: the folder of all models and adapters.
FOLDER = "{models}"
_ADAPTED = (
    *("--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", *TARGETS),
    *("--max-loras-per-batch", str(len(ADAPTERS) + 1)),  # the bare model takes a place, too
    *("--lora-paths", *(f"{name}={FOLDER}/{name}" for name in ADAPTERS)),
)
_TWO_LEVELS = (
    *("--enable-hierarchical-cache", "--hicache-write-policy", "write_back"),
    *("--hicache-ratio", "4", "--max-total-tokens", str(SMALL_POOL)),
)


def drafted(
    algorithm: str, draft_model: str, *, top_k: int = 1, draft_tokens: int = DRAFT_TOKENS
) -> tuple[str, ...]:
    """Options with which a model of ``MODELS`` drafts tokens in three steps: a chain, or with a
    ``top_k`` above 1 a tree."""
    return (
        *("--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", f"{FOLDER}/{draft_model}"),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", str(top_k)),
        *("--speculative-num-draft-tokens", str(draft_tokens)),
    )


def _trees(algorithm: str, draft_model: str) -> tuple[str, ...]:
    return drafted(algorithm, draft_model, top_k=4, draft_tokens=TREE_TOKENS)


def _ngram(draft_tokens: int = DRAFT_TOKENS, breadth: int = 1) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "NGRAM"),
        *("--speculative-ngram-max-bfs-breadth", str(breadth)),
        *("--speculative-num-draft-tokens", str(draft_tokens)),
    )


# SGLang would fill most of the memory with states.
_STATES = ("--max-mamba-cache-size", "512")
# More options of a family. Every layer of a Falcon-H1 attends. So SGLang 0.5.23 takes it for one
# without state spaces and captures these in prefill graphs. Replayed, they read the capture's
# metadata, which is freed by then.
_OF_FAMILY: dict[str, tuple[str, ...]] = {
    "gemma3": (),
    "falcon_h1": (*_STATES, "--disable-prefill-cuda-graph"),
}
_SLEEPER = (
    *("--enable-memory-saver", "--enable-weights-cpu-backup"),
    # So many that the workspace is seen beside the rest of the server's memory.
    *("--max-running-requests", "2048"),
)


def _config(name: str, *args: str, env: Mapping[str, str] | None = None) -> Config:
    """``name`` begins with MODEL-BACKEND."""
    backend = name.split("-")[1]
    return Config(
        name,
        backend=backend,
        args=(*COMPARED, *args),
        env=tuple((env or {}).items()),
        device="cuda",
    )


# Servers that must not start, and what they say.
REFUSED = {
    "ratio4-pat-fp8_e5m2": "on cuda pat reads bfloat16, float16",
    "ratio4-pat-torch-compile": "it would freeze a plan",
    "ratio4-pat-deterministic": "deterministic",
}
FLEET = {
    config.name: config
    for config in (
        _config("ratio4-pat-fp8_e5m2", "--kv-cache-dtype", "fp8_e5m2"),
        _config("ratio4-pat-torch-compile", "--enable-torch-compile"),
        _config("ratio4-pat-deterministic", "--enable-deterministic-inference"),
        _config("ratio4-fa3"),
        _config("ratio4-flashinfer"),
        _config("ratio4-pat"),
        _config(
            "ratio4-pat-pages-branches",
            *("--page-size", "16"),
            # And the one on which pat serves single requests, too.
            env={"SGLANG_PAT_BRANCHING": "always", "SGLANG_PAT_MIN_BATCH": "1"},
        ),
        _config("ratio4-pat-no-graphs", "--disable-cuda-graph"),
        _config("ratio4-pat-flashinfer-prefill", "--prefill-attention-backend", "flashinfer"),
        _config("ratio4b-fa3"),
        *(
            _config(f"ratio4-{name}-fp8_e4m3", "--kv-cache-dtype", "fp8_e4m3")
            for name in ("fa3", "flashinfer", "pat")
        ),
        *(_config(f"scaled4-{name}") for name in ("fa3", "flashinfer", "pat")),
        _config("ratio5-fa3"),
        _config("ratio5-pat"),
        _config("ratio7-fa3"),
        _config("ratio7-pat"),
        _config("gemma2-fa3"),
        _config("gemma2-pat"),
        *(
            _config(f"{family}-{name}", *_OF_FAMILY.get(family, _STATES))
            for family in FAMILIES
            for name in ("fa3", "flashinfer", "pat")
        ),
        _config("ratio4-fa3-adapters", *_ADAPTED),
        _config("ratio4-pat-adapters", *_ADAPTED),
        _config("ratio4-pat-two-levels", *_TWO_LEVELS),
        _config("ratio4-pat-sleeper", *_SLEEPER),
        # The model drafts for itself, so that some drafts are right; those of other weights are
        # nearly all wrong.
        *(
            _config(f"ratio4-{name}-drafts-right", *drafted("STANDALONE", "ratio4"))
            for name in ("fa3", "pat")
        ),
        _config(
            "ratio4-pat-drafts-no-overlap",
            *drafted("STANDALONE", "ratio4"),
            "--disable-overlap-schedule",
        ),
        _config("ratio4-pat-drafts-wrong", *drafted("STANDALONE", "ratio4b")),
        _config("ratio4-pat-eagle", *drafted("EAGLE", "eagle4")),
        *(
            _config(f"ratio4-{name}-trees-right", *_trees("STANDALONE", "ratio4"))
            for name in ("fa3", "pat")
        ),
        _config("ratio4-pat-trees-eagle", *_trees("EAGLE", "eagle4")),
        _config("ratio4-pat-eagle3", *drafted("EAGLE3", "eagle34")),
        *(_config(f"mtp-{name}", *_STATES) for name in ("fa3", "pat")),
        *(
            _config(f"mtp-{name}-drafts", *_STATES, *drafted("NEXTN", "mtp"))
            for name in ("fa3", "pat")
        ),
        _config("ratio4-fa3-ngram", *_ngram()),
        _config("ratio4-pat-ngram", *_ngram()),
        _config("ratio4-pat-trees-ngram", *_ngram(TREE_TOKENS, breadth=10)),
        # 64 packed rows a request, the most that pat takes.
        _config("ratio8-fa3"),
        _config("ratio8-pat"),
        _config("ratio8-pat-ngram", *_ngram(8)),
    )
}


class Fleet:
    """Servers on the models of one folder, started all at once: a start takes a minute of imports.

    Args:
        names: of ``FLEET``.
        folder: gets the models, the adapters and the logs.
    """

    def __init__(self, names: Iterable[str], folder: Path) -> None:
        self.models = folder / "models"
        self._folder = folder
        self._ready: set[str] = set()
        self._servers: dict[str, ServingServer] = {}
        for name in names:
            self._servers[name] = self._make(FLEET[name])

    def _make(self, config: Config) -> ServingServer:
        args = tuple(arg.replace(FOLDER, str(self.models)) for arg in config.args)
        for arg in config.args:
            if arg.startswith(FOLDER):
                self.model(arg.removeprefix(f"{FOLDER}/"))
        if "--enable-lora" in config.args:
            for seed, name in enumerate(ADAPTERS):
                if not (self.models / name).exists():
                    make_adapter(self.models / name, self.model("ratio4"), seed=seed)
        model = self.model(config.name.split("-")[0])
        return ServingServer(model, replace(config, args=args), self._folder / config.name)

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
            KeyError: the test's module does not name it in ``SERVERS``.
            ServerError: it did not start.
        """
        server = self._servers[name]
        if name not in self._ready:
            server.wait_until_ready()
            self._ready.add(name)
        return server
