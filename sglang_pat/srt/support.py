# SPDX-License-Identifier: Apache-2.0
"""Why ``pat`` does not serve a server: one table for all who ask.

``MACHINE`` and ``REFUSED`` hold the reasons for which a server does not start, ``IDLE`` those for
which it has nothing to gain; those that leave a layer to SGLang are in ``layers``. The rows ask a
``Server``, which is made in the launcher and in ``sglang-pat doctor`` from SGLang's resolved
arguments and the model's configuration (``by_arguments``), and with the backend from what the model
runner has turned out to be (``by_runner``). ``S``: SGLang 0.5.23's ``srt/``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from sglang_pat import _C, gpus
from sglang_pat.config import CPU_PLATFORM
from sglang_pat.draft_masks import MOST_MASKED_DRAFTS
from sglang_pat.srt import BACKEND, stock
from sglang_pat.srt.facts import TEMPERATURE, WITH_SINKS, facts, names_of

CHOOSE_ANOTHER = "choose another --attention-backend"
# Without --attention-backend SGLang runs torch_native there.
ON_CPU = (
    f"start the server with SGLANG_PLATFORM={CPU_PLATFORM}, --device cpu and "
    f"--attention-backend {BACKEND}"
)
_OVER_TRITON = f"restart with --attention-backend triton --decode-attention-backend {BACKEND}"
# Dtypes of a model that the executors take, by device. K/V are of the same, or in float8_e4m3fn.
DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}
E4M3 = torch.float8_e4m3fn
_NO_GPU = "no GPU was found for --device cuda"
_NO_KERNELS = "this sglang_pat was built without CUDA kernels (PAT_CUDA=OFF)"
# Models whose attention window stands in no layer (``ModelRunner.prefill_aware_swa``).
PREFILL_AWARE_SWA = ("UnlimitedOCRForCausalLM",)
# Their workers verify as S speculative/eagle_worker_common.py:547 and ngram_worker.py:372 do.
ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")
# The backend of SGLang that pat extends for latents (MLA) on a GPU, and what our kernels of these
# are compiled to: like that backend, they run on a Hopper alone.
OF_LATENTS, LATENT_CODE = "fa3", "sm_90a"
# With up to so many packed rows a request, those of its draft tokens, verify steps took about as
# long as those of the better of FA3 and FlashInfer or less (docs/results.md).
MOST_DRAFT_ROWS = 64
# Of latents (MLA): two requests of so many rows fill a row tile, and more take one of their own.
MOST_LATENT_ROWS = 32


@dataclass(frozen=True)
class Reason:
    """Why not, and what to do about it."""

    words: str
    way_out: str
    serves: bool = False  # pat still runs decode steps, each request on its own; else SGLang does

    def __str__(self) -> str:
        if not self.way_out:
            return self.words
        return f"{self.words}{'; ' if ': ' in self.words else ': '}{self.way_out}"


@dataclass(frozen=True)
class Server:
    """What the tables ask of a server. Without a model what stands below ``code`` is not known."""

    args: Any  # SGLang's, resolved
    model: Any  # its ModelConfig
    device: str
    against_gpu: str = ""  # why our kernels do not run on its GPU
    code: str = ""  # what it runs of them (gpus.code_for)
    prefill_aware_swa: bool = False
    kv_dtype: torch.dtype = torch.bfloat16
    quantized: str = ""  # what the K/V pool has beside its dtype, as scales
    virtual_slots: bool = False
    layout: str = "nhd"  # of a pool with several parts the first that is not "nhd"

    @property
    def backends(self) -> tuple[str, str]:
        """Of prefill and of decode."""
        prefill, decode = _sglang("arg_groups.overrides.attention_backends_of")(self.args)
        return prefill, decode

    @property
    def latents(self) -> bool:
        """Whether the cache holds latents instead of K and V (MLA)."""
        return self.model is not None and self.model.attention_arch.name == "MLA"

    @property
    def extendable(self) -> tuple[str, ...]:
        """The backends of its device that pat extends."""
        if self.latents and self.device == "cuda":
            return (OF_LATENTS,)
        return tuple(stock.EXTENDABLE.get(self.device, ()))

    @property
    def most_drafts(self) -> int:
        """Draft tokens of a request that pat verifies on its device; 0 where it would not serve
        single ones either."""
        if self.model is None or self.device == "cpu":
            return MOST_MASKED_DRAFTS
        if self.latents:
            ranks = _sglang("runtime_context.attn_tp_size_of")(self.args)
            most: int = MOST_LATENT_ROWS // self.model.get_num_attention_heads(ranks)
        else:
            group: int = self.model.num_attention_heads // self.model.get_num_kv_heads(1)
            most = max(1, MOST_DRAFT_ROWS // group)
        return min(MOST_MASKED_DRAFTS, most)

    @property
    def fewer_drafts(self) -> str:
        """The way out of more draft tokens than ``most_drafts``."""
        most = self.most_drafts
        if most < 2:  # the first is the token that is known to be right
            return _DROP_ONE
        if may_be_trees(self.args):
            return f"set --speculative-num-draft-tokens to at most {most}"
        # SGLang has a chain's tokens follow its steps, and with these alone it does not start.
        return f"set --speculative-num-steps to at most {most - 1}; with --speculative-eagle-topk 1"

    @property
    def takes(self) -> tuple[torch.dtype, ...]:
        if self.latents and self.device == "cuda":
            return (torch.bfloat16,)
        return DTYPES.get(self.device, ())

    @property
    def names(self) -> str:
        """Of the dtypes that pat takes."""
        return ", ".join(str(dtype).removeprefix("torch.") for dtype in self.takes)


def by_arguments(
    server_args: Any,
    model_config: Any,
    gpu: gpus.Machine | None = None,
) -> Server:
    """A server that does not run yet. ``server_args``: SGLang's after ``resolve_once()``; ``gpu``:
    one that is not here."""
    args = _sglang("arg_groups.overrides.resolving_view")(server_args)
    server = Server(args, model_config, args.device)
    if args.device == "cuda":
        server = replace(server, against_gpu=_NO_GPU)
        capability, name = None, "this GPU"
        if gpu is not None:
            capability, name = (gpu.major, gpu.minor), gpu.name
        elif torch.cuda.is_available():
            # Trying a kernel, as the backend does when it is made, would make a CUDA context, and a
            # launcher would hold hundreds of megabytes for as long as the server runs.
            capability = torch.cuda.get_device_capability(args.base_gpu_id)
        if capability is not None:
            against, code = reason_against_capability(capability, name), gpus.code_for(capability)
            server = replace(server, against_gpu=against, code=code)
    if model_config is None:
        return server
    choice, scaled = args.kv_cache_dtype, args.kv_cache_dtype in stock.SCALED_KV
    names = set(model_config.hf_config.architectures or ())
    return replace(
        server,
        prefill_aware_swa=not names.isdisjoint(PREFILL_AWARE_SWA),
        kv_dtype=model_config.dtype if scaled else stock.kv_cache_dtype(choice, model_config),
        quantized=choice if scaled else "",
        virtual_slots=args.enable_unified_memory or args.enable_page_major_kv_layout,
        layout="hnd" if _sglang("environ.envs").SGLANG_USE_HND_KVCACHE.get() else "nhd",
    )


def by_runner(runner: Any) -> Server:
    """A server that starts, by its model runner with its pools."""
    pool, choice = runner.token_to_kv_pool, runner.kv_cache_dtype_str
    method = pool.get_kv_cache_quant_method()
    quantized = "" if method is None or method.name == "unquantized" else str(method.name)
    parts = (pool, getattr(pool, "full_kv_pool", None))
    layouts = [getattr(part, "kv_cache_layout", "nhd") for part in parts]
    on_gpu = runner.device == "cuda"
    return Server(
        args=_sglang("arg_groups.overrides.resolving_view")(runner.server_args),
        model=runner.model_config,
        device=runner.device,
        against_gpu=reason_against_gpu() if on_gpu else "",
        code=gpus.code_for(torch.cuda.get_device_capability()) if on_gpu else "",
        prefill_aware_swa=runner.prefill_aware_swa,
        kv_dtype=runner.kv_cache_dtype,
        # mxfp8 is stored as fp8_e4m3, with scales that only --kv-cache-dtype tells of.
        quantized=choice if choice in stock.SCALED_KV else quantized,
        virtual_slots=(
            runner.kv_index_translator.is_translating or pool.requires_physical_write_loc
        ),
        layout=max(layouts, key="nhd".__ne__),
    )


class Row(NamedTuple):
    """A row of a table: whether it holds of a server, the words, in which ``{s}`` is the server,
    and the way out. ``serves``: as in ``Reason``. ``variable``: of the environment, that is it."""

    holds: Callable[[Server], object]
    words: str
    way_out: str = CHOOSE_ANOTHER
    serves: bool = False
    variable: str = ""


def reasons_of(table: tuple[Row, ...], server: Server) -> list[Reason]:
    """The reasons of a table that hold of a server."""
    return [
        Reason(row.words.format(s=server), row.way_out.format(s=server), row.serves)
        for row in table
        if row.holds(server)
    ]


_NATIVE_NVFP4 = "uses_minimax_m3_nvfp4_native_stack"


def _sglang(path: str) -> Any:
    """What SGLang has at ``sglang.srt.{path}``, imported when it is asked for."""
    return resolve_name(f"sglang.srt.{path}")


def _is_on(option: str) -> Callable[[Server], bool]:
    """Whether an argument is true, or a number above 1."""
    return lambda s: (value := getattr(s.args, option, False)) is True or int(value) > 1


# Of the machine: asked before the model is looked at.
MACHINE = (
    Row(
        lambda s: s.device not in DTYPES,
        f"this version serves on {', '.join(DTYPES)}, not on {{s.device!r}}",
        f"set SGLANG_PLATFORM={CPU_PLATFORM}, --device cpu and --attention-backend {BACKEND}, or "
        f"{CHOOSE_ANOTHER}",
    ),
    Row(
        lambda s: s.device == "cpu" and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1",
        "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine",
        f"unset it and set SGLANG_PLATFORM={CPU_PLATFORM}",
        variable="SGLANG_USE_CPU_ENGINE",
    ),
    Row(lambda s: s.against_gpu == _NO_GPU, _NO_GPU, f"{ON_CPU}, or ask --gpu"),
    Row(lambda s: s.against_gpu not in ("", _NO_GPU), "{s.against_gpu}"),
)
# Of the model and the options: the server does not start.
REFUSED = (
    Row(  # it would die in its first prefill, for which these models give K and V by head
        lambda s: s.latents and s.device == "cpu",
        "the model uses MLA, which SGLang's torch_native does not run",
        "start the server on a GPU",
    ),
    Row(
        lambda s: s.latents and s.kv_dtype == E4M3 and s.backends[1] in s.extendable,
        "the model uses MLA, and pat does not read latents in float8_e4m3fn",
        f"set --kv-cache-dtype auto or {CHOOSE_ANOTHER}",
    ),
    Row(
        lambda s: s.model.is_encoder_decoder,
        "encoder-decoder models shift their rows of req_to_token",
    ),
    Row(
        lambda s: s.prefill_aware_swa,
        "the model attends to its prompt and a window of its last tokens "
        f"({', '.join(PREFILL_AWARE_SWA)}), which pat does not know",
    ),
    Row(  # it would die in its first prefill, for want of kernels
        lambda s: s.device == "cpu" and _sglang("configs.hybrid_arch.mambaish_config")(s.model),
        "SGLang's kernels of linear attention and state spaces need a GPU",
        "start the server on one",
    ),
    Row(  # it would die in its first prefill, of an argument that these do not have
        lambda s: (
            not names_of(s.model).isdisjoint(WITH_SINKS)
            and not {"flashinfer", "torch_native"}.isdisjoint(s.backends)
        ),
        "SGLang's flashinfer and torch_native take no attention sinks",
        f"{_OVER_TRITON}; on a CPU SGLang has none that takes them",
    ),
    Row(
        lambda s: s.takes and s.model.dtype not in s.takes,
        "the model is {s.model.dtype}, on {s.device} pat takes {s.names}",
        "set one as --dtype",
    ),
    Row(
        lambda s: s.takes and s.kv_dtype not in (E4M3, s.model.dtype, *s.takes),
        "the K/V cache is {s.kv_dtype}, on {s.device} pat reads {s.names} and float8_e4m3fn",
        "set --kv-cache-dtype auto or fp8_e4m3",
    ),
    Row(
        lambda s: s.kv_dtype in s.takes and s.kv_dtype != s.model.dtype,
        "the K/V cache is {s.kv_dtype} but the model {s.model.dtype}",
        "set --kv-cache-dtype auto",
    ),
    Row(
        lambda s: s.quantized,
        "the K/V cache is quantized by {s.quantized}",
        "set --kv-cache-dtype auto",
    ),
    Row(
        lambda s: s.virtual_slots,
        "slot ids of a unified memory pool are virtual",
        "drop --enable-unified-memory and --enable-page-major-kv-layout",
    ),
    Row(
        lambda s: s.layout != "nhd",
        "the K/V cache has layout {s.layout!r}, not 'nhd'",
        "unset SGLANG_USE_HND_KVCACHE or the option that chose it",
        variable="SGLANG_USE_HND_KVCACHE",
    ),
    *(
        Row(
            _is_on(option),
            f"--{option.replace('_', '-')}: {why}",
            f"drop it or {CHOOSE_ANOTHER}",
        )
        for option, why in {
            "enable_two_batch_overlap": "half batches have no requests of their own",
            "enable_pdmux": "two backends share one model runner",
            "enable_deterministic_inference": "packing depends on the batch",
            "enable_torch_compile": "it would freeze a plan",
            "dcp_size": "a rank holds part of each sequence",
            "attn_cp_size": "a rank holds part of each sequence",
            "enable_kv_cache_sharding": "pages are interleaved over ranks",
            "enable_hisparse": "slots move during a request",
            "prefill_only_disable_kv_cache": "nothing is cached",
            "enable_nvidia_megakernel": "one kernel runs the layers, attention included",
        }.items()
    ),
    Row(
        lambda _: _sglang("environ.envs").SGLANG_ENABLE_METADATA_GLUE_GRAPH.get(),
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH: it would freeze a plan",
        f"drop it or {CHOOSE_ANOTHER}",
        variable="SGLANG_ENABLE_METADATA_GLUE_GRAPH",
    ),
)


def verifies(args: Any) -> bool:
    """Whether a server's drafts are verified as by the algorithms that pat can serve."""
    return args.speculative_algorithm in ALGORITHMS


def may_be_trees(args: Any) -> bool:
    """Whether a server that speculates may draft trees. NGRAM does even with a breadth of 1: it
    puts what followed matches of several lengths side by side (ngram_corpus/trie.cpp in SGLang)."""
    ngram: bool = args.speculative_algorithm == "NGRAM"
    return ngram or args.speculative_eagle_topk != 1


def draft_tokens_of(args: Any) -> int:
    """Draft tokens of a request in the verify steps that pat serves; 1 on a server whose decode
    steps it serves."""
    if not verifies(args) or reasons_of(SPECULATION, Server(args, None, args.device)):
        return 1
    tokens: int = args.speculative_num_draft_tokens
    return tokens


def _drafts(holds: Callable[[Any], object]) -> Callable[[Server], object]:
    """Whether a server's drafts are verified as pat can, and this holds of its arguments."""
    return lambda s: verifies(s.args) and holds(s.args)


_DROP_ONE = "drop that option, or pat"
# SGLang's own attention verifies.
SPECULATION = (
    Row(
        lambda s: s.args.speculative_algorithm is not None and not verifies(s.args),
        "under --speculative-algorithm {s.args.speculative_algorithm} the model verifies drafts "
        "instead of decoding, and that is SGLang's attention: pat verifies those of "
        f"{', '.join(ALGORITHMS)}",
        _DROP_ONE,
    ),
    Row(
        _drafts(lambda a: may_be_trees(a) and a.speculative_num_draft_tokens > MOST_MASKED_DRAFTS),
        "--speculative-algorithm {s.args.speculative_algorithm} drafts trees of "
        "{s.args.speculative_num_draft_tokens} tokens, and pat verifies trees of up to "
        f"{MOST_MASKED_DRAFTS}",
        "{s.fewer_drafts}",
    ),
    Row(
        lambda s: (
            verifies(s.args)
            and s.latents
            and s.device == "cuda"
            and 0 < s.most_drafts < s.args.speculative_num_draft_tokens
        ),
        "the model uses MLA, and {s.args.speculative_num_draft_tokens} draft tokens of a request "
        f"fill more than {MOST_LATENT_ROWS} packed rows (query heads of a GPU x draft tokens), of "
        "which packing saves nothing",
        "{s.fewer_drafts}",
    ),
    Row(
        _drafts(lambda a: a.speculative_adaptive),
        "under --speculative-adaptive the number of draft tokens changes, and pat verifies a fixed "
        "one",
        _DROP_ONE,
    ),
    Row(
        lambda s: (
            verifies(s.args)
            and s.backends[0] != s.backends[1]
            and s.args.speculative_attention_mode != "decode"
        ),
        "drafts are verified on --prefill-attention-backend {s.backends[0]}, as "
        "--speculative-attention-mode is {s.args.speculative_attention_mode}",
        "set --speculative-attention-mode decode",
    ),
    Row(
        _drafts(lambda a: may_be_trees(a) and (a.page_size or 1) > 1),
        "--speculative-algorithm {s.args.speculative_algorithm} may draft trees, and pat verifies "
        "them on pages of 1 token, not of {s.args.page_size}",
        "set --page-size 1",
    ),
    # On its plan stream SGLang has the base fill in what it prepared (S
    # layers/attention/base_attn_backend.py:309), which pat has nothing of.
    Row(
        _drafts(lambda _: _sglang("environ.envs").SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get()),
        "under SGLANG_ENABLE_OVERLAP_PLAN_STREAM drafts are verified on SGLang's attention",
        _DROP_ONE,
    ),
)


def _only_prefills(s: Server) -> bool:
    """With --enable-pd-role-switch it may become a decode server while it runs."""
    return s.args.disaggregation_mode == "prefill" and not s.args.enable_pd_role_switch


# The server starts, and there is nothing to gain: SGLang runs decode, or nothing is ever shared.
IDLE = (
    Row(
        lambda s: (
            stock.asked_for_decode(_sglang("arg_groups.overrides.record_of")(s.args)) != BACKEND
        ),
        f"decode runs on {{s.backends[1]}}: the flags name {BACKEND} for prefill alone",
        f"set --decode-attention-backend {BACKEND}",
    ),
    Row(
        lambda s: s.latents and s.device == "cuda" and s.code != LATENT_CODE,
        "the model uses MLA, for which pat has kernels for compute capability 9.0 alone",
    ),
    Row(
        lambda s: s.backends[1] not in s.extendable,
        "decode runs on {s.backends[1]}, which pat cannot extend",
        "where it was SGLang's choice for this model, drop pat; else name another backend, for MLA "
        f"{OF_LATENTS}",
    ),
    Row(
        lambda s: s.args.dllm_algorithm is not None,
        "under --dllm-algorithm a model never decodes",
        f"{CHOOSE_ANOTHER}: nothing is lost",
    ),
    *SPECULATION,
    Row(
        lambda s: not s.model.is_generation,
        "an embedding or reward model never decodes",
        f"{CHOOSE_ANOTHER}: nothing is lost",
    ),
    Row(
        lambda s: s.model.attention_arch.name == "SSM",
        "the model has no attention, only state spaces",
        "drop the option",
    ),
    Row(
        lambda s: _sglang("layers.attention.qsa.config.is_qwen_qsa")(s.model.hf_config),
        "SGLang runs the model's sparse attention (QSA) on a backend of its own",
    ),
    Row(
        lambda s: (
            _sglang("configs.model_config.is_minimax_sparse")(s.model.hf_config)
            # 0.5.22 has no such stack.
            and (native := getattr(_sglang("configs.model_config"), _NATIVE_NVFP4, None))
            and native(s.model.quantization)
        ),
        "SGLang runs the model's NVFP4 sparse attention on a backend of its own",
    ),
    Row(
        _only_prefills,
        "the prefill server of a disaggregated pair never decodes",
        f"give --attention-backend {BACKEND} to the decode server",
    ),
    Row(
        lambda s: s.args.disable_radix_cache and s.args.disaggregation_mode == "decode",
        "the decode server of a disaggregated pair keeps no radix cache, which tells shared "
        "prefixes",
        "set --disaggregation-decode-enable-radix-cache",
        serves=True,
    ),
    Row(
        lambda s: (
            s.args.disable_radix_cache
            and s.args.disaggregation_mode != "decode"
            and not _only_prefills(s)
        ),
        "the radix cache, which tells shared prefixes, is off",
        "drop --disable-radix-cache; where it is not set, SGLang turned the cache off for this "
        "model",
        serves=True,
    ),
)


def _lacks_triton(s: Server) -> bool:
    """Whether a GPU does not run all attention on SGLang's triton."""
    return s.device == "cuda" and set(s.backends) != {"triton"}


def _captures_states(s: Server) -> bool:
    """Whether the state spaces of a Falcon-H1 are captured in prefill graphs. SGLang 0.5.23 takes a
    model of which every layer attends for one without them; the graphs then read freed memory."""
    if s.device != "cuda" or "FalconH1ForCausalLM" not in (s.model.hf_config.architectures or ()):
        return False
    if not _sglang("utils.is_cuda")():  # a GPU elsewhere: here SGLang leaves these graphs out
        return not (s.args.disable_prefill_cuda_graph or s.args.disable_cuda_graph)
    disabled = _sglang("model_executor.cuda_graph_config.Backend").DISABLED
    return bool(s.args.cuda_graph_config.prefill.backend != disabled)


# What to know of a server that starts, under any attention backend.
KNOWN = (
    Row(
        _captures_states,
        "SGLang 0.5.23 captures the state spaces of a Falcon-H1 in prefill graphs, and the server "
        "dies at its first prompts, also without pat",
        "restart with --disable-prefill-cuda-graph",
    ),
    Row(  # S layers/attention/triton_backend.py:2455
        lambda s: facts(s.model)(0) == TEMPERATURE and _lacks_triton(s),
        "of SGLang's backends only triton applies the model's temperature by position "
        "(attn_temperature_len), and attention runs on {s.backends[0]}, also without pat",
        "restart with --attention-backend triton",
    ),
    Row(  # S models/gemma3_mm.py:225
        lambda s: (
            "Gemma3ForConditionalGeneration" in names_of(s.model)
            and s.model.is_multimodal
            and _lacks_triton(s)
        ),
        "of SGLang's backends only triton lets the tokens of an image attend to each other, and "
        "prefill runs on {s.backends[0]}, also without pat",
        _OVER_TRITON,
    ),
)


def refusals(server: Server) -> list[Reason]:
    """Every reason for which a server does not start; without a model, those of the machine."""
    return reasons_of(MACHINE if server.model is None else (*MACHINE, *REFUSED), server)


def idle_reasons(server: Server, min_batch: int) -> list[Reason]:
    """Every reason for which ``pat`` would serve nothing, or could never pack."""
    args = server.args
    ranks, limit = max(1, int(args.attn_dp_size)), args.max_running_requests
    # As SGLang shares them out (S mem_cache/kv_cache_configurator.py:3131).
    most = min_batch if limit is None else max(1, limit // ranks)
    reasons = reasons_of(IDLE, server)
    if most < min_batch:
        few = (
            f"--max-running-requests {limit} lets at most {most} decode at a time, and pat serves "
            f"batches of {min_batch} or more"
        )
        reasons.append(Reason(few, f"raise it to {min_batch * ranks} or more"))
    return reasons


def idle_message(reasons: list[Reason]) -> str:
    """All reasons for which there is nothing to gain, in one line for the log."""
    what = "packs nothing" if all(reason.serves for reason in reasons) else "serves nothing"
    listed = "; ".join(f"{reason.words} ({reason.way_out})" for reason in reasons)
    return f"pat {what} on this server: {listed}"


def reason_against_gpu() -> str:
    """Why our kernels do not run on the current CUDA device, or "": one of them is tried."""
    if not hasattr(_C, "cuda_probe"):
        return _NO_KERNELS
    device = torch.cuda.current_device()
    error = _C.cuda_probe(device)
    if not error:
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    return _cannot_run(f"GPU {device} of {major}.{minor} ({error})")


def reason_against_capability(capability: tuple[int, int], name: str) -> str:
    """Why our kernels cannot run on a GPU of this compute capability, or ""."""
    if not hasattr(_C, "cuda_probe"):
        return _NO_KERNELS
    if gpus.code_for(capability):
        return ""
    return _cannot_run(f"{name} of {capability[0]}.{capability[1]}")


def _cannot_run(what: str) -> str:
    return f"our kernels, built for compute capability {gpus.built_for()}, do not run on {what}"
