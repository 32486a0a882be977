# SPDX-License-Identifier: Apache-2.0
"""Everything that decode attention in SGLang depends on is in our table, and nothing else is.

What does not stand where we look (``use_irope``, ``prefill_aware_swa``) is how a model could be
served silently wrong. No server, no GPU; SGLang's source is read, not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

sglang = pytest.importorskip("sglang", reason="needs SGLang 0.5.23")

ADVICE = "read what the backends do with it in decode, then enter it here"

# By verdict, and where it is not plain why. ``handled``: pat's decode respects it; ``base``: layers
# or steps where it matters are served by the base; ``refused``: such a server does not start;
# ``irrelevant``: no effect on what a decode step computes.
_BY_VERDICT = {
    "handled": """
        layer.layer_id layer.scaling layer.logit_cap
        layer.k_scale layer.v_scale layer.k_scale_float layer.v_scale_float
        runner.req_to_token_pool runner.spec_algorithm runner.dtype
        model_config.head_dim model_config.num_attention_heads model_config.get_num_kv_heads
        model_config.v_head_dim model_config.attention_arch model_config.context_len
        batch.forward_mode batch.batch_size batch.req_pool_indices batch.seq_lens
        batch.seq_lens_cpu batch.out_cache_loc batch.kv_loc_plan batch.spec_info
        parallel.attn_tp_size parallel.attn_dp_enabled
        spec.speculative_algorithm spec.speculative_eagle_topk
        spec.speculative_num_draft_tokens spec.speculative_num_steps
    """,
    # Most are of a layer. The runner's windows and chunks are its layers' too, its pool has a part
    # for those with windows, and its model layers that only encode. The next are of drafts, which
    # run on SGLang's own backend. Positions count where a temperature does.
    "base": """
        layer.logit_capping_method layer.tp_q_head_num layer.tp_k_head_num layer.tp_v_head_num
        layer.qk_head_dim layer.head_dim layer.v_head_dim layer.sliding_window_size
        layer.use_irope layer.xai_temperature_len layer.is_cross_attention layer.attn_type
        runner.attention_chunk_size model_config.is_local_attention_model
        runner.sliding_window_size runner.token_to_kv_pool runner.model
        runner.is_draft_worker batch.kv_loc_cols schedule.page_size
        envs.SGLANG_OPT_FLASHINFER_DRAFT_HOST_INDPTR
        batch.encoder_lens batch.positions exec.dllm.dllm_algorithm
    """,
    # A window that stands in no layer (UnlimitedOCR); virtual slot ids; dtypes and quantized K/V;
    # a device without an executor; encoder-decoder models; ranks that hold part of each sequence.
    "refused": """
        runner.prefill_aware_swa runner.kv_index_translator batch.out_cache_loc_is_physical
        runner.kv_cache_dtype runner.kv_cache_dtype_str runner.device
        model_config.is_encoder_decoder batch.cross_attention_custom_mask
        batch.dcp_kv_mask parallel.attn_cp_size parallel.attn_dcp_rank parallel.attn_dcp_size
        parallel.dcp_group parallel.enable_prefill_cp
        exec.deterministic.enable_deterministic_inference
    """,
    # Pages do not count, as slots are read one by one. What sizes buffers of the base or names it;
    # of prefill alone, chunked prefixes and MLA's among it; how the base splits its work or picks
    # its kernels, and the blocks of small weight that it leaves out: pat computes all.
    "irrelevant": """
        runner.page_size
        runner.decode_num_tokens_per_req runner.gpu_id runner.decode_attention_backend_str
        runner.prefill_attention_backend_str runner.token_to_kv_pool_allocator
        runner.max_running_requests model_config.get_max_num_attention_heads
        model_config.swa_v_head_dim hf_text_config.attn_logit_softcapping
        hf_text_config.num_attention_heads hf_config.architectures batch.seq_lens_sum

        model_config.is_multimodal batch.extend_prefix_lens batch.extend_prefix_lens_cpu
        batch.extend_seq_lens batch.extend_seq_lens_cpu batch.input_ids
        batch.multi_item_delimiter_indices batch._attn_output batch._triton_dense_fp8_output_dtype
        exec.features.enable_mis memory.disable_radix_cache model.is_embedding
        schedule.chunked_prefill_size envs.SGLANG_FLASHINFER_USE_PAGED
        envs.SGLANG_TRITON_DENSE_PREFILL_ATTN envs.SGLANG_TRITON_FP8_PREFILL_ATTN
        batch.extend_num_tokens batch.extend_start_loc batch.spec_algorithm
        envs.SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR
        batch.attn_attend_prefix_cache batch.fused_prefix_k batch.fused_prefix_v
        batch.mha_empty_kv_indptr batch.mha_one_shot batch.mha_return_lse
        batch.prefix_chunk_cu_seq_lens batch.prefix_chunk_idx batch.prefix_chunk_max_seq_lens
        batch.prefix_dense_kv_indices schedule.disable_chunked_prefix_cache

        exec.kernel.enable_lean_attention exec.kernel.triton_attention_num_kv_splits
        exec.kernel.triton_attention_split_tile_size envs.SGLANG_DISABLE_LEAN_ATTENTION
        envs.SGLANG_ENABLE_SPLITKV_VERIFY envs.SGLANG_FLASHINFER_WORKSPACE_SIZE
        envs.SGLANG_OPT_FLASHINFER_VERIFY_HOST_PLAN platform.is_sm100 platform.is_sm120
        platform.is_sm90 envs.SGLANG_TRTLLM_MHA_DECODE_SEQ_LEN_SPLITS
        exec.graph.cuda_graph_config.decode.max_bs schedule.max_prefill_tokens
        envs.SGLANG_ENABLE_TORCH_COMPILE
        envs.SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR
    """,
}
SEMANTICS = {name for names in _BY_VERDICT.values() for name in names.split()}

# All of these modules is read, prefills and draft workers included.
HOME = Path(sglang.__path__[0], "srt", "layers", "attention")
BACKENDS = (
    *("flashattention_backend", "flashinfer_backend", "triton_backend", "trtllm_mha_backend"),
    "local_attention",  # helpers of the first
)
# The objects whose attributes count, by the names that SGLang's source has for them.
ROOTS = {
    **{name: name for name in ("runner", "model_config", "hf_config", "hf_text_config")},
    **{name: name for name in ("server_args", "layer", "envs")},
    "model_runner": "runner",
    "forward_batch": "batch",
}
# Namespaces of the published configuration, of which the leaf counts: get_exec().graph.leaf.
NAMESPACES = {"exec", "spec", "parallel", "memory", "schedule", "disagg", "model", "platform"}
# Objects that are followed: of runner.model_config.x it is model_config.x that counts.
FOLLOWED = {"model_config", "hf_config", "hf_text_config", "server_args"}


def dependencies() -> set[str]:
    """Every attribute of the model, the runner, the configuration, a layer or a batch on which the
    backends depend, as ``layer.scaling`` or ``exec.graph.max_bs``."""
    found: set[str] = set()
    for module in BACKENDS:
        found |= set(attributes(ast.parse((HOME / f"{module}.py").read_text())))
    # Of exec.graph.max_bs, exec.graph is a part, not another attribute.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def attributes(tree: ast.AST) -> Iterator[str]:
    """The attributes that code reads, ``getattr`` and ``hasattr`` with a literal name included."""
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Attribute():
                names = _names(node)
            case ast.Call(ast.Name("getattr" | "hasattr"), [owner, ast.Constant(name), *_]):
                names = [*_names(owner), str(name)]
        if name := _canonical(names):
            yield name


def _names(node: ast.AST) -> list[str]:
    """["a", "b", "c"] of ``a.b.c``, ["get_exec()", "b"] of ``get_exec().b``; [] of others."""
    first, *names = ast.unparse(node).split(".")
    plain = all(name.isidentifier() for name in (first.removesuffix("()"), *names))
    return [first, *names] if plain else []


def _canonical(names: list[str]) -> str:
    """ "layer.scaling" of ["layer", "scaling", "item"]; "" of what does not count."""
    while len(names) > 1 and (names[1] in FOLLOWED or names[0] == "self"):
        names = names[1:]  # self.model_config.x, runner.model_config.x
    if len(names) < 2:
        return ""
    first = names[0]
    if first in ROOTS:
        return f"{ROOTS[first]}.{names[1]}"
    namespace = first.removeprefix("get_").removesuffix("()")
    if first == f"get_{namespace}()" and namespace in NAMESPACES:
        return ".".join((namespace, *names[1:]))
    return ""


def test_our_table_has_what_decode_attention_depends_on_and_nothing_else() -> None:
    found = dependencies()
    assert "layer.use_irope" in found  # in a helper of another module
    assert "runner.prefill_aware_swa" in found  # by getattr
    assert "model_config.is_local_attention_model" in found  # of the runner's
    new, stale = sorted(found - SEMANTICS), sorted(SEMANTICS - found)
    assert not new, f"SGLang's decode attention also depends on {', '.join(new)}: {ADVICE}"
    assert not stale, f"SGLang's decode attention no longer reads {', '.join(stale)}: remove it"
