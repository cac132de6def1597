"""What tensor names do not show, for each model_type. Written by tools/known_models.py."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Known:
    """dense: patterns (rules.matches) of modules that transformers does not replace by 4-bit
    layers, or not by one with this weight. skip: entries of llm_int8_skip_modules for modules
    that are replaced and have no weight of their own in the file."""

    dense: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


# Of transformers 5.23.0.
KNOWN: dict[str, Known] = {
    "aria": Known(skip=("lm_head",)),
    "audioflamingo3": Known(skip=("lm_head",)),
    "axk2": Known(dense=("weights_proj",)),
    "bark": Known(skip=("fine_acoustics.lm_heads",)),
    "bert": Known(skip=("decoder",)),
    "bert-generation": Known(skip=("decoder",)),
    "big_bird": Known(skip=("decoder",)),
    "biogpt": Known(skip=("output_projection",)),
    "blip": Known(skip=("decoder",)),
    "blip-2": Known(skip=("lm_head",)),
    "camembert": Known(skip=("decoder",)),
    "cohere_asr": Known(dense=("mlp",)),
    "ctrl": Known(dense=("w",)),
    "d_fine": Known(skip=("bbox_embed", "class_embed")),
    "dac": Known(dense=("*",)),
    "data2vec-audio": Known(dense=("objective",)),
    "data2vec-text": Known(skip=("decoder",)),
    "deepseek_v4": Known(dense=("compressor", "head", "wgate", "wo_a"), skip=("indexer.q_b_proj",)),
    "deimv2": Known(skip=("bbox_embed", "class_embed")),
    "encoder-decoder": Known(skip=("predictions.decoder",)),
    "ernie": Known(skip=("decoder",)),
    "ernie4_5_vl_moe": Known(skip=("patch_embed.proj",)),
    "flaubert": Known(skip=("pred_layer",)),
    "fuyu": Known(skip=("lm_head",)),
    "gpt_neox_japanese": Known(skip=("embed_out",)),
    "gradium_phonon_tts": Known(
        dense=("in_proj",),
        skip=("cond_proj", "flow_head.timestep_embeddings", "k_proj", "q_proj", "v_proj"),
    ),
    "granite_speech5_ctc": Known(dense=("out",), skip=("ctc_head", "out")),
    "grounding-dino": Known(skip=("bbox_embed", "model.decoder.bbox_embed")),
    "gte": Known(
        dense=("qkv_proj", "up_gate_proj"),
        skip=("decoder", "gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"),
    ),
    "hrm_text": Known(
        dense=("gate_up_proj", "gqkv_proj"),
        skip=("gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"),
    ),
    "inkling2": Known(skip=("lm_head", "patch_embedding", "weight_proj")),
    "inkling2_text": Known(skip=("weight_proj",)),
    "inkling_mm_model": Known(dense=("encoder",)),
    "janus": Known(skip=("lm_head",)),
    "jev": Known(skip=("proj$",)),
    "jina_embeddings_v3": Known(dense=("Wqkv",), skip=("decoder", "k_proj", "q_proj", "v_proj")),
    "kimi_k25": Known(dense=("wqkv",), skip=("k_proj", "q_proj", "v_proj")),
    "llama4": Known(dense=("*",)),
    "llama4_text": Known(dense=("*",)),
    "llava": Known(skip=("lm_head",)),
    "llava_next": Known(skip=("lm_head",)),
    "llava_next_video": Known(skip=("lm_head",)),
    "llava_onevision": Known(skip=("lm_head",)),
    "longformer": Known(skip=("decoder",)),
    "luke": Known(skip=("decoder",)),
    "lw_detr": Known(dense=("query_feat",)),
    "marian": Known(skip=("lm_head",)),
    "mask2former": Known(dense=("queries_features",)),
    "maskformer": Known(dense=("dense", "key", "self"), skip=("dense", "key", "query", "value")),
    "megatron-bert": Known(skip=("decoder",)),
    "minimax_m3_vl": Known(dense=("gate_proj", "up_proj"), skip=("gate_up_proj", "lm_head")),
    "mistral_large4": Known(
        dense=(
            "attention.wk",
            "vision_encoder.transformer.layers.*.attention.wq",
            "vision_tower.transformer.layers.*.attention.wq",
            "weights_proj",
        ),
        skip=("attention.q_proj", "k_proj"),
    ),
    "mistral_large4_text": Known(dense=("weights_proj",)),
    "mllama": Known(skip=("lm_head",)),
    "mm-grounding-dino": Known(skip=("bbox_embed", "model.decoder.bbox_embed")),
    "modernbert": Known(skip=("decoder",)),
    "modernbert-decoder": Known(skip=("decoder",)),
    "molmo2": Known(
        dense=("att_proj", "ff_proj", "image_projector.w1", "w3", "wk", "wq", "wv"),
        skip=(
            "language_model.layers..*.self_attn.k_proj$",
            "language_model.layers..*.self_attn.q_proj$",
            "language_model.layers..*.self_attn.v_proj$",
            "mlp.gate_proj",
            "mlp.up_proj",
            "model.language_model.layers..*.self_attn.k_proj$",
            "model.language_model.layers..*.self_attn.q_proj$",
            "model.language_model.layers..*.self_attn.v_proj$",
            "patch_embedding",
        ),
    ),
    "molmo2_text": Known(
        dense=("att_proj", "ff_proj"), skip=("gate_proj", "k_proj", "q_proj", "up_proj", "v_proj")
    ),
    "mpnet": Known(skip=("decoder",)),
    "musicflamingo": Known(skip=("lm_head",)),
    "nemo_speechlm": Known(
        dense=("w_qkv",),
        skip=("lm_head", "self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"),
    ),
    "nemotron_h_omni": Known(
        dense=("qkv",),
        skip=("attention.k_proj", "attention.q_proj", "attention.v_proj", "patch_projection"),
    ),
    "neomme": Known(skip=("unembedding_projection",)),
    "nomic_bert": Known(dense=("Wqkv",), skip=("k_proj", "q_proj", "v_proj")),
    "pp_doclayout_v3": Known(
        dense=("enc_bbox_head", "enc_score_head"),
        skip=(
            "class_embed",
            "decoder.bbox_embed",
            "enc_bbox_head",
            "enc_score_head",
            "model.decoder.bbox_embed",
            "model.enc_bbox_head",
        ),
    ),
    "qianfan_ocr": Known(
        dense=("qkv",), skip=("attention.k_proj", "attention.q_proj", "attention.v_proj", "lm_head")
    ),
    "qwen2_audio": Known(skip=("lm_head",)),
    "radio": Known(dense=("qkv",), skip=("embeddings", "k_proj", "q_proj", "v_proj")),
    "rf_detr": Known(
        dense=("query_feat",),
        skip=(
            "enc_out_bbox_embed",
            "enc_out_class_embed",
            "model.enc_out_bbox_embed",
            "model.enc_out_class_embed",
            "model.model.enc_out_bbox_embed",
            "model.model.enc_out_class_embed",
            "self_attn.k_proj",
            "self_attn.o_proj",
            "self_attn.q_proj",
            "self_attn.v_proj",
        ),
    ),
    "roberta": Known(skip=("decoder",)),
    "roberta-prelayernorm": Known(skip=("decoder",)),
    "roc_bert": Known(skip=("decoder",)),
    "roformer": Known(skip=("decoder",)),
    "rt_detr_v2": Known(skip=("bbox_embed", "class_embed")),
    "sam3": Known(dense=("reference_points",)),
    "sam3_lite_text": Known(dense=("reference_points",)),
    "sam3_video": Known(dense=("reference_points",)),
    "sapiens2": Known(dense=("w12",), skip=("gate_proj", "up_proj")),
    "seamless_m4t": Known(skip=("lm_head",)),
    "seamless_m4t_v2": Known(skip=("lm_head",)),
    "shieldgemma2": Known(skip=("lm_head",)),
    "speech-encoder-decoder": Known(skip=("predictions.decoder",)),
    "speecht5": Known(skip=("lm_head",)),
    "step3p7": Known(
        skip=(
            "model.vision_model.layers..*.self_attn.k_proj$",
            "model.vision_model.layers..*.self_attn.q_proj$",
            "model.vision_model.layers..*.self_attn.v_proj$",
            "out_proj",
            "vision_model.layers..*.self_attn.k_proj$",
            "vision_model.layers..*.self_attn.q_proj$",
            "vision_model.layers..*.self_attn.v_proj$",
        )
    ),
    "tipsv2": Known(dense=("qkv",), skip=("k_proj", "out_proj", "q_proj", "v_proj")),
    "tipsv2_dpt": Known(dense=("*",)),
    "tipsv2_text_model": Known(skip=("k_proj", "out_proj", "q_proj", "v_proj")),
    "tipsv2_vision_model": Known(dense=("qkv",), skip=("k_proj", "q_proj", "v_proj")),
    "trocr": Known(skip=("output_projection",)),
    "ultravbert": Known(dense=("decoder",)),
    "unispeech-sat": Known(dense=("objective",)),
    "unlimited_ocr": Known(
        dense=("qkv_proj",),
        skip=(
            "model.vision_tower.vision_encoder.encoder.layers..*.self_attn.k_proj$",
            "model.vision_tower.vision_encoder.encoder.layers..*.self_attn.q_proj$",
            "model.vision_tower.vision_encoder.encoder.layers..*.self_attn.v_proj$",
            "vision_tower.vision_encoder.encoder.layers..*.self_attn.k_proj$",
            "vision_tower.vision_encoder.encoder.layers..*.self_attn.q_proj$",
            "vision_tower.vision_encoder.encoder.layers..*.self_attn.v_proj$",
        ),
    ),
    "vibevoice_asr": Known(skip=("lm_head",)),
    "video_llava": Known(skip=("lm_head",)),
    "vipllava": Known(skip=("lm_head",)),
    "vision-encoder-decoder": Known(skip=("predictions.decoder",)),
    "voxtral": Known(skip=("lm_head",)),
    "wav2vec2": Known(dense=("objective",)),
    "wav2vec2-bert": Known(dense=("objective",)),
    "wav2vec2-conformer": Known(dense=("objective",)),
    "wavlm": Known(dense=("objective",)),
    "whisper": Known(skip=("proj_out",)),
    "xlm": Known(skip=("pred_layer",)),
    "xlm-roberta": Known(skip=("decoder",)),
    "xlm-roberta-xl": Known(skip=("decoder",)),
    "xlnet": Known(skip=("lm_loss",)),
    "xmod": Known(skip=("decoder",)),
    "zamba": Known(
        dense=("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
        skip=("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
    ),
    "zamba2": Known(
        dense=("down_proj", "feed_forward", "k_proj", "o_proj", "q_proj", "v_proj"),
        skip=(
            ".*feed_forward",
            "down_proj",
            "gate_up_proj",
            "k_proj",
            "o_proj",
            "q_proj",
            "v_proj",
        ),
    ),
}
