# SPDX-License-Identifier: Apache-2.0
"""The interface of SGLang that the plugin uses, checked by name before a server starts.

Much of it exists on instances only. So attributes are looked for in SGLang's source text, without
importing the modules, some of which take seconds.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name

# What is read, by the class under ``sglang.srt`` (or the function that makes the object).
# ``a.b``: attribute b of self.a, which the class must use itself.
_TABLE = """\
managers.schedule_batch.Req: kv lock rid
managers.schedule_batch.ReqKvInfo: req_pool_idx cache_protected_len kv_committed_len
    kv_allocated_len
managers.schedule_batch.ScheduleBatch: reqs tree_cache req_pool_indices_cpu forward_mode
    decoding_reqs
mem_cache.base_prefix_cache.TreeLock: node
mem_cache.radix_cache.RadixCache: disable root_node path_device_indices req_to_token_pool
mem_cache.radix_cache.TreeNode: id parent key
mem_cache.radix_cache.RadixKey: __len__
mem_cache.unified_radix_cache.UnifiedRadixCache: disable tree_core session path_device_indices
    req_to_token_pool
mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore: _node_arena
mem_cache.unified_cache.unified_tree_core.UnifiedTreeNode: id parent key
mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore: _binding _binding.collect_path_info
    _binding.validate_buffer_backup
session.streaming_session.StreamingSession: slots borrowed_slot
session.streaming_session.SessionSlot: lock
model_executor.forward_batch_info.ForwardMode: is_decode is_target_verify
model_executor.forward_batch_info.ForwardBatch: batch_size forward_mode spec_info encoder_lens
    req_pool_indices seq_lens seq_lens_cpu out_cache_loc
model_executor.runner.decode_cuda_graph_runner.build_replay_fb_view: batch_size forward_mode
    spec_info encoder_lens req_pool_indices seq_lens seq_lens_cpu num_padding
model_executor.model_runner.ModelRunner: device dtype kv_cache_dtype is_draft_worker
    init_new_workspace decode_attention_backend_str prefill_attention_backend_str kv_cache_dtype_str
    kv_index_translator model_config req_to_token_pool token_to_kv_pool memory_saver_adapter model
    prefill_aware_swa server_args
model_executor.cuda_graph_config.PhaseConfig: backend bs max_bs
managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager: resume_memory_occupation
managers.io_struct.ResumeMemoryOccupationReqInput: tags
configs.model_config.ModelConfig: get_num_attention_heads get_num_kv_heads head_dim
    is_encoder_decoder num_attention_heads kv_lora_rank qk_rope_head_dim attention_arch dtype
    hf_config is_generation quantization
layers.radix_attention.RadixAttention: layer_id tp_q_head_num tp_k_head_num tp_v_head_num
    qk_head_dim v_head_dim scaling logit_cap logit_capping_method k_scale v_scale k_scale_float
    v_scale_float is_cross_attention attn_type sliding_window_size xai_temperature_len
mem_cache.memory_pool.ReqToTokenPool: req_to_token req_generation size
disaggregation.decode.DecodeReqToTokenPool: req_generation
mem_cache.memory_pool.MHATokenToKVPool: device get_key_buffer get_value_buffer set_kv_buffer
    requires_physical_write_loc get_kv_cache_quant_method
mem_cache.memory_pool.MLATokenToKVPool: device get_key_buffer get_value_buffer set_kv_buffer
    set_mla_kv_buffer
mem_cache.memory_pool.HybridLinearKVPool: device get_key_buffer get_value_buffer set_kv_buffer
    full_kv_pool set_mla_kv_buffer
mem_cache.swa_memory_pool.SWAKVPool: layers_mapping full_kv_pool
mem_cache.kv_index_translator.KVIndexTranslator: is_translating
arg_groups.fields.parallel.Parallel: attn_tp_size attn_tp_rank attn_cp_size attn_dcp_size tp_rank
    pp_rank pp_size pp_async_batch_depth enable_kv_cache_sharding
server_args.ServerArgs: resolve_once
layers.attention.base_attn_backend.AttentionBackend: shared_read_ends
layers.attention.base_attn_backend.SharedReadEnds: IN_REPLAY max_of
layers.attention.torch_native_backend.TorchNativeAttnBackend: req_to_token_pool token_to_kv_pool
    forward_decode init_forward_metadata
layers.attention.flashattention_backend.FlashAttentionBackend: req_to_token_pool token_to_kv_pool
    forward_decode init_forward_metadata
layers.attention.flashinfer_backend.FlashInferAttnBackend: req_to_token_pool token_to_kv_pool
    forward_decode init_forward_metadata
layers.attention.triton_backend.TritonAttnBackend: req_to_token_pool token_to_kv_pool forward_decode
    init_forward_metadata
layers.attention.trtllm_mha_backend.TRTLLMHAAttnBackend: req_to_token_pool token_to_kv_pool
    forward_decode init_forward_metadata
"""
_ROWS = (row.split(": ") for row in _TABLE.replace("\n    ", " ").splitlines())
ATTRIBUTES = {path: tuple(names.split()) for path, names in _ROWS}

_LAYER = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")
_NATIVE = "layers.attention.torch_native_backend.TorchNativeAttnBackend"
_ANY = "layers.attention.base_attn_backend.AttentionBackend"
# The first parameters of what is called or overridden.
SIGNATURES = {
    "model_executor.forward_batch_info.ForwardBatch.init_new": ("batch", "model_runner"),
    f"{_NATIVE}.forward_decode": _LAYER,
    f"{_NATIVE}.init_forward_metadata": ("self", "forward_batch"),
    f"{_ANY}.init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
    f"{_ANY}.init_forward_metadata_in_graph": ("self", "forward_batch"),
    "mem_cache.memory_pool.KVWriteLoc.for_layer": ("forward_batch", "layer"),
}


def interface_mismatches() -> list[str]:
    """What SGLang lacks of the interface that the plugin uses, by name."""
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import TreePathNodeInfo

    lacks = []
    for path, expected in SIGNATURES.items():
        function = resolve_name(f"sglang.srt.{path}")
        taken = tuple(inspect.signature(function).parameters)[: len(expected)]
        if taken != expected:
            lacks.append(f"{'.'.join(path.split('.')[-2:])} takes {taken}, not {expected}")
    for path, needed in ATTRIBUTES.items():
        found = names_of(f"sglang.srt.{path}")
        if not found:
            lacks.append(f"there is no sglang.srt.{path}")
        elif missing := set(needed) - found:
            lacks.append(f"{path.rpartition('.')[2]} has no {', '.join(sorted(missing))}")
    # csrc/srt/radix_paths.h reads the elements of the Rust tree core's paths by position.
    elements = ("node_id", "parent_id", "path_start", "path_end")
    begins = TreePathNodeInfo.__struct_fields__[: len(elements)]
    if begins != elements:
        lacks.append(f"TreePathNodeInfo begins with {begins}, not {elements}")
    return lacks


@cache
def names_of(path: str) -> frozenset[str]:
    """Names of the attributes of a class's instances, by its dotted path, from the source text:
    what it and its bases define or assign to ``self``, and ``a.b`` where it uses ``self.a.b``. Of a
    function the keywords that it makes a SimpleNamespace of. Empty for what is not there.
    """
    module, _, name = path.rpartition(".")
    definitions, imports = parsed(module)
    node = definitions.get(name)
    if node is None:
        return frozenset()
    if not isinstance(node, ast.ClassDef):
        return frozenset(_keywords(node))
    names = set(_own_names(node))
    for base in node.bases:
        if isinstance(base, ast.Name):
            source = module if base.id in definitions else imports.get(base.id, "")
            if source.startswith("sglang."):
                names |= names_of(f"{source}.{base.id}")
    return frozenset(names)


@cache
def parsed(name: str) -> tuple[dict[str, ast.stmt], dict[str, str]]:
    """A module's classes and functions by name, and the module that each import comes from, of its
    source text; both empty where there is no such module."""
    import sglang

    path = Path(sglang.__path__[0], *name.split(".")[1:])
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    tree = ast.parse(files[0].read_text(encoding="utf-8") if files else "")
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            imports.update({alias.asname or alias.name: node.module for alias in node.names})
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            definitions[node.name] = node
    return definitions, imports


def _own_names(cls: ast.ClassDef) -> Iterator[str]:
    for statement in cls.body:
        match statement:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
                yield name
            case ast.AnnAssign(ast.Name(name)) | ast.Assign([ast.Name(name)]):
                yield name
    for node in ast.walk(cls):
        match node:
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                yield name
            case ast.Attribute(ast.Attribute(ast.Name("self"), owner), name):
                yield f"{owner}.{name}"


def _keywords(function: ast.stmt) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "SimpleNamespace":
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
