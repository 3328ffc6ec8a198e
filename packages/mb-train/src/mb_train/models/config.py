"""What a transformer is built from: one frozen dataclass, shared by GPT, BERT and T5.

It knows nothing of a training run: `mb_train.tasks` derives it from one.

Letters: D hidden, H query heads, G key-value heads, C width of a head, F ffn width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mb_layers import MoEConfig

_CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "qk_norm": ("none", "head", "width"),
    "positions": ("learned", "rope", "relative", "none"),
}


class RopeScaling(NamedTuple):
    """Rotations that are slower by `factor`, for texts longer than those trained on.

    kind: "linear" slows all alike (arXiv 2306.15595); "llama3" those that do not turn often within
        8192 tokens, as Llama 3.1 (arXiv 2407.21783).
    """

    kind: str
    factor: float


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What a transformer is built from.

    Sizes:
        num_layers: L; hidden_size: D; ffn_size: F of dense layers; vocab_size: padded.
        num_heads: H; num_kv_heads: G, a divisor of H; head_size: C.
        max_positions: longest sequence; learned positions have as many rows.

    Choices:
        activation: of dense feed-forwards, a name of `mb_kernels.activation`.
        norm, norm_eps: kind of the norms, and their epsilon.
        post_norm: normalise behind each residual sum (the first BERT) instead of before each half
            of a block; no norm then ends the model, one follows the embedding.
        residual_after_norm: a block adds to what its norms put out, not to what went in (Megatron's
            --apply-residual-connection-post-layernorm).
        fp32_residual: the residual stream stays in fp32 whatever blocks compute in.
        qk_norm: normalise queries and keys per "head" (Qwen3) or over their whole "width" (OLMoE).
        positions: "learned", "rope", "relative" (T5's bias by distance), or "none".
        rope_base, rope_fraction: base of the rotary frequencies; share of a head that is rotated.
        rope_scaling: how rotations are slowed; None: not at all.
        attention_scale: scores are multiplied by it; None means 1 / sqrt(head_size).
        bias: biases in linear maps; qkv_bias: in the fused projection (None: bias).
        tie_embeddings: the head's weight is the token embedding's.
        init_std, output_init_std: normal init; the latter for what adds to the residual.

    Experts:
        moe: their configuration; None makes every layer dense.
        moe_layers: which layers have experts, one flag per layer; None means all.
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    activation: str = "gelu_tanh"
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    post_norm: bool = False
    residual_after_norm: bool = False
    fp32_residual: bool = False
    qk_norm: str = "none"
    positions: str = "learned"
    rope_base: float = 10_000.0
    rope_fraction: float = 1.0
    rope_scaling: RopeScaling | None = None
    attention_scale: float | None = None
    bias: bool = True
    qkv_bias: bool | None = None
    tie_embeddings: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_std: float = 0.02
    output_init_std: float = 0.02
    moe: MoEConfig | None = None
    moe_layers: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"Expected {name} to be one of {', '.join(choices)}, "
                    f"got {getattr(self, name)!r}."
                )
        if self.post_norm and self.residual_after_norm:
            raise ValueError(
                "Expected post_norm or residual_after_norm, got both: a norm behind the sum leaves "
                "none before it."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Expected the key-value heads to divide the heads, got {self.num_kv_heads} and "
                f"{self.num_heads}."
            )
        if self.moe_layers is not None and len(self.moe_layers) != self.num_layers:
            raise ValueError(
                f"Expected one flag per layer in moe_layers, {self.num_layers}, "
                f"got {len(self.moe_layers)}."
            )

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer`'s feed-forward is a Mixture-of-Experts."""
        return self.moe is not None and (self.moe_layers is None or self.moe_layers[layer])
