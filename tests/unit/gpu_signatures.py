"""Signatures of the GPU libraries, read from the releases named, and functions that have them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    Drops = Collection[str]


SIGNATURES = {
    "flash-attn 2.8.3 flash_attn_func": (
        "q k v dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
        "alibi_slopes=None deterministic=False return_attn_probs=False"
    ),
    "flash-attn 2.8.3 flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0.0 "
        "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
        "deterministic=False return_attn_probs=False block_table=None"
    ),
    "flash-attn 2.8.3 flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
        "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False "
        "window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 "
        "return_softmax_lse=False"
    ),
    "fa3-fwd 0.0.3 flash_attn_func": (
        "q k v softmax_scale=None causal=False qv=None q_descale=None k_descale=None "
        "v_descale=None window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 "
        "pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
    ),
    "fa3-fwd 0.0.3 flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None "
        "softmax_scale=None causal=False qv=None q_descale=None k_descale=None v_descale=None "
        "window_size=(-1,-1) attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None "
        "deterministic=False sm_margin=0 return_attn_probs=False"
    ),
    "fa3-fwd 0.0.3 flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
        "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None "
        "cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
        "q_descale=None k_descale=None v_descale=None softmax_scale=None causal=False "
        "window_size=(-1,-1) attention_chunk=0 softcap=0.0 rotary_interleaved=True "
        "scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False"
    ),
    "flash-attn-4 4.0.0b36 flash_attn_func": (
        "q k v qv=None gather_kv_indices=None softmax_scale=None causal=False "
        "window_size=(None,None) learnable_sink=None softcap=0.0 num_splits=1 pack_gqa=None "
        "deterministic=False score_mod=None score_mod_bwd=None mask_mod=None aux_tensors=None "
        "aux_scalars=None block_sparse_tensors=None block_sparse_tensors_bwd=None "
        "return_lse=False gather_bwd_recompute_p=False gather_bwd_token_chunk=None"
    ),
    "flash-attn-4 4.0.0b36 flash_attn_varlen_func": (
        "q k v qv=None cu_seqlens_q=None cu_seqlens_k=None max_seqlen_q=None max_seqlen_k=None "
        "min_seqlen_k=None seqused_q=None seqused_k=None gather_kv_indices=None page_table=None "
        "softmax_scale=None causal=False window_size=(None,None) learnable_sink=None softcap=0.0 "
        "num_splits=1 pack_gqa=None deterministic=False score_mod=None score_mod_bwd=None "
        "mask_mod=None block_sparse_tensors=None aux_tensors=None aux_scalars=None "
        "return_lse=False scheduler_metadata=None seqlen_k_per_split=None "
        "disable_scheduler_metadata=False gather_bwd_recompute_p=False "
        "gather_bwd_token_chunk=None"
    ),
    "torch 2.10.0 varlen_attn": (
        "query key value cu_seq_q cu_seq_k max_q max_k is_causal=False return_aux=None"
    ),
    "torch 2.11.0 varlen_attn": (
        "query key value cu_seq_q cu_seq_k max_q max_k *, return_aux=None scale=None "
        "window_size=(-1,-1)"
    ),
    "torch 2.13.0 varlen_attn": (
        "query key value cu_seq_q cu_seq_k max_q max_k *, return_aux=None scale=None "
        "window_size=(-1,-1) enable_gqa=False seqused_k=None block_table=None num_splits=None"
    ),
    "flashinfer 0.7.4 BatchDecodeWithPagedKVCacheWrapper.plan": (
        "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size *, "
        "pos_encoding_mode='NONE' window_left=-1 window_right=0 logits_soft_cap=None "
        "q_data_type='float16' kv_data_type=None o_data_type=None data_type=None sm_scale=None "
        "rope_scale=None rope_theta=None non_blocking=True block_tables=None seq_lens=None "
        "fixed_split_size=None disable_split_kv=False q_len_per_req=1 is_causal=None "
        "use_token_head_sf=False"
    ),
    "flashinfer 0.7.4 BatchPrefillWithPagedKVCacheWrapper.plan": (
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads "
        "num_kv_heads head_dim_qk page_size head_dim_vo=None custom_mask=None "
        "packed_custom_mask=None causal=False pos_encoding_mode='NONE' "
        "use_fp16_qk_reduction=False sm_scale=None window_left=-1 logits_soft_cap=None "
        "rope_scale=None rope_theta=None q_data_type='float16' kv_data_type=None "
        "o_data_type=None non_blocking=True seq_lens=None block_tables=None "
        "fixed_split_size=None disable_split_kv=False"
    ),
    "flashinfer 0.7.4 BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo=None "
        "custom_mask=None packed_custom_mask=None causal=False pos_encoding_mode='NONE' "
        "use_fp16_qk_reduction=False window_left=-1 logits_soft_cap=None sm_scale=None "
        "rope_scale=None rope_theta=None q_data_type='float16' kv_data_type=None "
        "o_data_type=None non_blocking=True fixed_split_size=None disable_split_kv=False"
    ),
}
"""Parameters by release and function, read from the wheels named."""


def signature(name: str) -> inspect.Signature:
    """Return the recorded signature of a function."""
    parameters = []
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for word in SIGNATURES[name].split():
        if word == "*,":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        key, equals, default = word.partition("=")
        value = eval(default) if equals else inspect.Parameter.empty
        parameters.append(inspect.Parameter(key, kind, default=value))
    return inspect.Signature(parameters)


def recorded(name: str, calls: list[dict[str, object]], body: Callable[..., object]) -> object:
    """Return a function of the recorded signature that notes its keyword call."""
    found = signature(name)

    def function(*args: object, **kwargs: object) -> object:
        assert not args, "positions differ between releases; everything goes by keyword"
        bound = found.bind(**kwargs)
        calls.append(dict(kwargs))
        bound.apply_defaults()
        return body(**bound.arguments)

    function.__signature__ = found  # type: ignore[attr-defined]
    return function
