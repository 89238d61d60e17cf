"""Every argument of transformers' language models (tested by signature), and its treatment on a ring; others raise."""

import difflib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from ringspan.core.errors import UnsupportedError

T = TypeVar("T")

# Arguments of ``RingCausalLM.forward``, which honours them.
HONOURED: Final = frozenset((
    "batch_digest", "document_lengths", "input_ids", "layout_digest", "media", "num_items_in_batch",
    "output_router_logits", "position_ids", "real_tokens", "sequence_length", "shift_labels",
    "tree_targets",
))  # fmt: skip

# Arguments that have one possible value on a ring, beside None for the default.
FIXED: Final[Mapping[str, Any]] = {
    "interpolate_pos_encoding": False,
    "is_causal": True,
    "logits_to_keep": 0,
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "sample": True,
    "use_cache": False,
    "use_mems": False,
}

_SHARD: Final = "make the batch with rs.shard_batch"
_ENCODER: Final = "a model on a ring has no encoder: leave it out"
_CACHE: Final = "a model on a ring keeps no cache: leave it out"
_TEXT: Final = "give it to rs.shard_batch, which takes the images of some models, or leave it out"
_PACK: Final = "pack documents with position_ids that start from 0 for each, and make the batch with rs.shard_batch"
_HEAD: Final = "it belongs to a model with another head: leave it out"
_EXTRA: Final = "this input is not split over the ring: leave it out"


def _all(value: T, names: str) -> dict[str, T]:
    return dict.fromkeys(names.split(), value)


# Arguments that raise, and what to do instead.
REFUSED: Final[Mapping[str, str]] = {
    **_all(_SHARD, "attention_mask labels padding_mask input_mask"),
    "inputs_embeds": "give input_ids, made with rs.shard_batch",
    **_all(_CACHE, "past_key_values cache cache_params cache_position mems past_buckets_states shared_kv_states state"),
    **_all(_CACHE, "encoder_past_key_values padding_cache"),
    **_all(_ENCODER, "encoder_hidden_states encoder_attention_mask encoder_outputs encoder_inputs_embeds"),
    **_all(_ENCODER, "decoder_input_ids decoder_attention_mask decoder_inputs_embeds decoder_position_ids"),
    **_all(_PACK, "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k seq_idx"),
    # images
    **_all(_TEXT, "pixel_values pixel_values_videos pixel_mask image_patches image_pixel_values image_sizes"),
    **_all(_TEXT, "image_attention_mask image_position_ids video_position_ids num_frames_per_video image_grid_thw"),
    **_all(_TEXT, "video_grid_thw mm_encoder_outputs mm_token_type_ids aspect_ratio_ids aspect_ratio_mask"),
    **_all(_TEXT, "cross_attention_states cross_attention_mask full_text_row_masked_out_mask visual_pos_masks"),
    **_all(_TEXT, "deepstack_visual_embeds vision_feature_select_strategy vision_feature_layer vision_aspect_ratio"),
    **_all(_TEXT, "pixel_attention_mask pixel_values_images pixel_values_local high_res_pixel_values"),
    **_all(_TEXT, "flattened_patches height width num_local_patches patches_grid spatial_shapes tile_fine_mask"),
    **_all(_TEXT, "image_embeds image_embeds_position_mask image_encoder_embeddings perceiver_embeddings"),
    **_all(_TEXT, "batch_num_images image_grid_hw image_grids image_merge_sizes image_num_crops image_token_pooling"),
    **_all(_TEXT, "image_sizes_videos target_sizes target_sizes_videos downsample_mode moe_mm_token_type_ids"),
    **_all(_TEXT, "video_compression_mask video_grids video_merge_sizes video_token_pooling video_second_per_grid"),
    **_all(_TEXT, "second_per_grid_ts use_audio_in_video"),
    # sound
    **_all(_TEXT, "input_features input_features_mask input_values audio_input_features audio_embed_sizes"),
    **_all(_TEXT, "audio_attention_mask audio_input_ids audio_input_ids_mask chunk_sample_lengths"),
    **_all(_TEXT, "user_input_values user_audio_codes moshi_input_values moshi_audio_codes text_labels audio_labels"),
    **_all(_TEXT, "audio_feature_lengths feature_attention_mask input_values_mask num_delay_tokens"),
    # further inputs
    **_all(_EXTRA, "token_type_ids task_type_ids per_layer_inputs ple_input_ids input_shape_ids lang_ids langs"),
    **_all(_EXTRA, "input_pronunciation_ids lengths num_hashes perm_mask target_mapping patch_lengths"),
    **_all(_EXTRA, "qformer_input_ids qformer_attention_mask bbox visual_bbox router_labels"),
    **_all(_EXTRA, "protein_input_ids protein_attention_mask structure_feats structure_batch_mask msa_feats"),
    **_all(_EXTRA, "msa_batch_mask action_embeds actions noise timestep"),
    **_all(_EXTRA, "self_conditioning_logits self_conditioning_mask"),
    **_all(_HEAD, "return_loss start_positions end_positions cls_index is_impossible p_mask mc_token_ids mc_labels"),
}


@torch.compiler.disable()
def check_arguments(model_name: str, arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for the first argument that a ring does not support or no model has."""
    for name, value in arguments.items():
        if name in REFUSED:
            if value is not None:
                raise UnsupportedError(f"{name} is not supported on a ring; {REFUSED[name]}")
        elif name in FIXED:
            if value is not None and (isinstance(value, Tensor) or value != FIXED[name]):
                shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else value
                raise UnsupportedError(f"{name}={shown} is not supported on a ring; it must be {FIXED[name]}")
        else:
            raise UnsupportedError(
                f"{model_name}.forward does not take {name!r}{_similar(name, [*HONOURED, *FIXED])}; leave it out"
            )


def _similar(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]!r}?" if near else ""


class Unsaid(Enum):
    UNSAID = "unsaid"


UNSAID: Final = Unsaid.UNSAID

# Arguments of attention that ``attend`` in models.py computes with.
COMPUTED: Final = frozenset({"alibi_slopes", "ring_packed", "s_aux", "scaling", "sliding_window", "softcap"})


_ANY: Final = ()

# What models hand to transformers' attention interface beside what ``attend`` in models.py computes with.
ATTENTION: Final[Mapping[str, tuple[Any, ...]]] = {
    # Not used by attention functions: inputs of the layers before, or flags for what is returned.
    **_all(_ANY, "input_ids position_embeddings position_ids"),
    "output_router_logits": _ANY,
    **_all((False, None), "use_cache output_attentions output_hidden_states"),
    **_all((None,), "labels encoder_hidden_states past_key_values cache cache_position"),
    "deterministic": _ANY,  # of flash attention's backward pass; the ring's sums always come in the same order
    # What changes whom a query sees, or its score.
    "is_causal": (True, None),
    **_all(
        (None,),
        "attention_mask block_indices cu_seq_lens_k cu_seq_lens_q head_mask indices max_length_k max_length_q "
        "position_bias seq_idx sinks",
    ),
    "dropout": (0, None),
}


def check_attention(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a layer's first argument that asks for other attention than the ring's."""
    kind = type(module).__name__
    # A decoder's own (BigBird-Pegasus) has its causality from its mask, and says is_causal=False all the same.
    if getattr(module, "is_causal", True) is False and not getattr(module, "is_decoder", False):
        raise UnsupportedError(f"{kind} has is_causal=False: its tokens see later ones, which a ring does not support")
    for name, value in arguments.items():
        known = ATTENTION.get(name)
        if known is None:
            raise UnsupportedError(f"{kind} gives attention {name}, which the ring does not know; leave it out")
        if known and (isinstance(value, Tensor) or value not in known):
            shown = "" if isinstance(value, Tensor) else f"={value}"
            raise UnsupportedError(f"{kind} asks for {name}{shown}, which the ring does not support yet; unset it")
