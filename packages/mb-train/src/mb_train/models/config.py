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
    "qk_norm": ("none", "head", "width", "latent"),
    "positions": ("learned", "rope", "relative", "none"),
}


class RopeScaling(NamedTuple):
    """Rotations that are slower by `factor`, for texts longer than those trained on.

    kind: "linear" slows all alike (arXiv 2306.15595); "llama3" those that do not turn often within
        8192 tokens, as Llama 3.1 (arXiv 2407.21783); "yarn" those that do not turn often within
        `trained_on` tokens, and makes attention sharper (arXiv 2309.00071).

    The others are YaRN's, by the names of DeepSeek and Megatron Core where they have one:
        beta_fast, beta_slow: turns within `trained_on` tokens from which on a rotation is not
            slowed at all, and up to which it is slowed by the whole factor.
        mscale, mscale_all_dim: by how much attention gets sharper, see `rotary.sharpening`.
    """

    kind: str
    factor: float
    trained_on: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


class LatentSizes(NamedTuple):
    """Widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    q_rank: of the latent that queries are made of; None: they are made of the hidden state.
    kv_rank: of the latent that keys and values are made of.
    content, rotated: of a head's query and key, the parts without and with positions; all heads
        share the rotated part of a key.
    value: of a head's value.
    """

    q_rank: int | None
    kv_rank: int
    content: int
    rotated: int
    value: int


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What a transformer is built from.

    Sizes:
        num_layers: L; hidden_size: D; ffn_size: F of dense layers; vocab_size: padded.
        num_heads: H; num_kv_heads: G, a divisor of H; head_size: C, of queries and keys.
        latent: widths of latent attention, for which G is H and C content + rotated; None: queries,
            keys and values are maps of the hidden state.
        max_positions: longest sequence; learned positions have as many rows.

    Choices:
        activation: of dense feed-forwards, a name of `mb_kernels.activation`.
        norm, norm_eps: kind of the norms, and their epsilon; qk_norm_eps: of those of queries and
            keys (None: the same).
        post_norm: normalise behind each residual sum (the first BERT) instead of before each half
            of a block; no norm then ends the model, one follows the embedding.
        residual_after_norm: a block adds to what its norms put out, not to what went in (Megatron's
            --apply-residual-connection-post-layernorm).
        fp32_residual: the residual stream stays in fp32 whatever blocks compute in.
        qk_norm: normalise queries and keys per "head" (Qwen3) or over their whole "width" (OLMoE);
            with latent attention what they are made of ("latent").
        positions: "learned", "rope", "relative" (T5's bias by distance), or "none".
        rope_base, rope_fraction: base of the rotary frequencies; share of a head that is rotated.
        rope_scaling: how rotations are slowed; None: not at all.
        attention_scale: scores are multiplied by it; None means 1 / sqrt(head_size), in latent
            attention times what YaRN asks for.
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
    latent: LatentSizes | None = None
    activation: str = "gelu_tanh"
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    qk_norm_eps: float | None = None
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

        if self.latent is not None:
            self._check_latent(self.latent)
        elif self.qk_norm == "latent":
            raise ValueError("Expected latent sizes with qk_norm latent, got none.")

    @property
    def value_size(self) -> int:
        """Width of a head's value."""
        return self.head_size if self.latent is None else self.latent.value

    @property
    def rotated_size(self) -> int:
        """How many channels of a head's query and key are rotated, if positions are rotary."""
        if self.latent is not None:
            return self.latent.rotated
        return int(self.head_size * self.rope_fraction) // 2 * 2

    def _check_latent(self, latent: LatentSizes) -> None:
        wanted = {
            "head_size": latent.content + latent.rotated,
            "num_kv_heads": self.num_heads,
            "positions": "rope",
            "rope_fraction": 1.0,
        }
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"Expected {name} {value} with latent attention, got {getattr(self, name)}."
                )
        if self.qk_norm not in ("none", "latent"):
            raise ValueError(
                f"Expected qk_norm none or latent with latent attention, got {self.qk_norm!r}."
            )
        if latent.rotated % 2:
            raise ValueError(
                f"Expected an even rotated part of a head, which turns in pairs, got "
                f"{latent.rotated}."
            )

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer`'s feed-forward is a Mixture-of-Experts."""
        return self.moe is not None and (self.moe_layers is None or self.moe_layers[layer])
