"""Mistral 4: DeepSeek's latent attention, and experts by softmax whose weights add up to 1.

Beyond the length that it was trained on before YaRN its queries grow with their place. It is read
for texts up to that length, in which they do not.
"""

from __future__ import annotations

from typing import Any

from mb_train.config import TrainConfig
from mb_train.convert.hugging_face.config_json import Json, refuse
from mb_train.convert.hugging_face.deepseek import (
    LATENTS,
    expert_config,
    expert_fields,
    group_fields,
    latent_config,
    latent_fields,
)
from mb_train.convert.hugging_face.llama import (
    ORIGINAL,
    decoder_fields,
    llama_config,
    rope_of,
    trained_on,
)

GROWTH = "llama_4_scaling_beta"
_ROPE = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, ORIGINAL: 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, GROWTH: 0.1,
}  # fmt: skip
# What its class has for a setting that a file leaves out, sizes of the model apart.
DEFAULTS: dict[str, Any] = {
    **LATENTS, "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
    "num_key_value_heads": 32, "n_routed_experts": 128, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 4, "first_k_dense_replace": 0,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "rope_parameters": _ROPE,
}  # fmt: skip


def mistral4_fields(config: Json) -> dict[str, Any]:
    """DeepSeek-V3's attention, whose rotated part this class tells as a share of a head.

    Raises:
        ValueError: rotations in another way than YaRN's, which its class does not fit to the part.
    """
    turned, rope = config["qk_rope_head_dim"], rope_of(config)
    head = config["qk_nope_head_dim"] + turned
    kind = {"rope_type": rope.get("rope_type", rope.get("type", "default"))}
    refuse(kind, rope_type=("yarn",))
    refuse({**config, **rope}, partial_rotary_factor=(turned / head, None))
    refuse(config, rope_interleave=(True,))
    positions = config["max_position_embeddings"]
    if rope.get(GROWTH):
        positions = min(positions, trained_on(config, rope))
    routing = {"moe_renormalize": config["norm_topk_prob"], **group_fields(config, score_top=2)}
    return (
        decoder_fields(config)
        | latent_fields(config, head_dim=head)
        | expert_fields(config, config["first_k_dense_replace"], **routing)
        | {"max_position_embeddings": positions, "rotary_percent": 1.0}
    )


def mistral4_config(config: TrainConfig) -> dict[str, Any]:
    """Back."""
    found, turned = llama_config(config), config.qk_pos_emb_head_dim / config.head_size
    if config.rope_scaling is None:  # YaRN that slows by nothing, as its class has no other
        slow = {"rope_type": "yarn", "factor": 1.0, ORIGINAL: config.positions}
        found["rope_parameters"] |= slow
    found["rope_parameters"] |= {GROWTH: 0.0, "partial_rotary_factor": turned}
    return (
        found
        | latent_config(config)
        | expert_config(config)
        | {"head_dim": config.head_size, "rope_interleave": True, "rope_scaling": None}
    )
