"""What a transformer is built from: one frozen dataclass, shared by GPT, BERT and T5.

It knows nothing of a training run: `mb_train.tasks` derives it from one.

Letters: D hidden, H query heads, G key-value heads, C width of a head, F ffn width, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mb_layers import MoEConfig

_CHOICES = {
    "norm": ("layernorm", "rmsnorm", "layernorm-without-bias"),
    "norms": ("before", "kept", "sum", "output", "both"),
    "qk_norm": ("none", "head", "turned-head", "width", "latent", "l2"),
    "positions": ("learned", "rope", "relative", "none"),
    "softmax": ("vanilla", "off-by-one", "learnable"),
    "router": ("topk", "noisy_topk", "sinkhorn", "sparsemixer", "expert_choice"),
}


# Fields with a flag, or a letter, for each layer.
FLAGS_OF_LAYERS = ("delta_layers", "moe_layers", "rope_layers", "window_layers", "pattern")


class RopeScaling(NamedTuple):
    """Rotations that are slower by `factor`, for texts longer than those trained on.

    kind: "linear" slows all alike (arXiv 2306.15595); "llama3" those that do not turn often within
        8192 tokens, as Llama 3.1 (arXiv 2407.21783); "yarn" those that do not turn often within
        `trained_on` tokens, and makes attention sharper (arXiv 2309.00071); "longrope" each by one
        of `factors`, a pair's own, and multiplies what turns by `mscale` (arXiv 2402.13753).

    The others are YaRN's, by the names of DeepSeek and Megatron Core where they have one:
        beta_fast, beta_slow: turns within `trained_on` tokens from which on a rotation is not
            slowed at all, and up to which it is slowed by the whole factor.
        mscale, mscale_all_dim: by how much attention gets sharper, see `rotary.sharpening`.
        truncate: the two bounds are moved to whole pairs of channels; GPT-OSS leaves them between.
    """

    kind: str
    factor: float
    trained_on: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


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


class DeltaSizes(NamedTuple):
    """Sizes of layers with a state (`models.delta_net`).

    key_heads, value_heads: of queries and keys, and a multiple of them of values and states.
    key, value: widths of a head's key and of its value.
    taps: tokens that the short convolution sums up, a token's own among them.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int


class MambaSizes(NamedTuple):
    """Sizes of layers of Mamba-2 (`models.mamba`).

    heads: each with a state; width: of what one writes.
    groups: a divisor of the heads; state: width of the directions in which a group's heads write.
    taps: tokens that the short convolution sums up, a token's own among them.
    """

    heads: int
    width: int
    groups: int
    state: int
    taps: int


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What a transformer is built from.

    Sizes:
        num_layers: L; hidden_size: D; ffn_size: F of dense layers; vocab_size: padded.
        num_heads: H; num_kv_heads: G, a divisor of H; head_size: C, of queries and keys.
        latent: widths of latent attention, for which G is H and C content + rotated; None: queries,
            keys and values are maps of the hidden state.
        delta: of layers that have a state in place of attention; None: all layers attend.
        mamba: of layers of Mamba-2, for a `pattern` with such layers.
        conv_taps: tokens that a layer of a short convolution sums up, for a `pattern` with such.
        max_positions: longest sequence; learned positions have as many rows.

    Choices:
        activation: of dense feed-forwards, a name of `mb_kernels.activation`.
        norm, norm_eps: kind of the norms, and their epsilon; qk_norm_eps: of those of queries and
            keys (None: the same).
        norms: where they stand around f, a half of a block: "before" it, x + f(norm(x)); so, and
            what they put out is "kept", norm(x) + f(norm(x)) (Megatron's
            --apply-residual-connection-post-layernorm); behind the "sum", norm(x + f(x)) (the first
            BERT), and no norm then ends the model, one follows the embedding; behind the "output",
            x + norm(f(x)) (OLMo 2, arXiv 2501.00656); "both" before f and behind its output,
            x + norm(f(norm(x))), with two norms (GLM-4).
        embedding_multiplier, residual_multiplier: of what the embedding gives, and of what
            attention and feed-forward add.
        logits_scaling: the scores of tokens are divided by it.
        fp32_residual: the residual stream stays in fp32 whatever blocks compute in.
        qk_norm: normalise queries and keys per "head" (Qwen3), behind its rotation ("turned-head",
            HunYuan), or over their whole "width" (OLMoE); with latent attention what they are made
            of ("latent"); "l2" is per head without weights, where positions turn it (Llama 4).
        clip_qkv: queries, keys and values are clipped to it and its negative, behind their norms
            and before rotations (DBRX, OLMoE); None: not.
        positions: "learned", "rope", "relative" (T5's bias by distance), or "none".
        rope_base, rope_fraction: base of the rotary frequencies; share of a head that is rotated.
        local_rope_base: base of those of layers with a window, which are not slowed (OLMo 3); None:
            they turn as the others.
        rope_layers: which layers have rotary positions, if there are any, one flag per layer; None
            means all. The others have no positions at all (arXiv 2501.18795).
        rope_scaling: how rotations are slowed; None: not at all.
        attention_scale: scores are multiplied by it; None means 1 / sqrt(head_size), in latent
            attention times what YaRN asks for.
        window: a token sees so many tokens before its own, one less than what is called a window of
            W keys elsewhere; None: all of them.
        window_layers: which layers see no further, one flag per layer; None means all.
        delta_layers: which layers have a state, if `delta` is given, one flag per layer; None means
            all. What is said here of heads, positions and windows is of the others.
        pattern: a letter for each layer, which is then but one half of a block: Mamba-2 ("M"), a
            gated short convolution ("S"), attention ("*"), a dense feed-forward ("-") or experts
            ("E"). None: layers are whole blocks, of attention, or a state, and a feed-forward.
        output_gate: heads' outputs are multiplied by the sigmoid of a further map of the layer's
            input, number by number (arXiv 2505.06708).
        softmax: of the scores: "vanilla"; with a score more in the sum, of what has no value, which
            is 0 ("off-by-one") or learned by each head ("learnable", GPT-OSS's sinks).
        bias: biases in linear maps; qkv_bias: in the fused projection (None: bias).
        tie_embeddings: the head's weight is the token embedding's.
        head_bias: a bias for each token on its score.
        init_std, output_init_std: normal init; the latter for what adds to the residual.
        ends_init_std: that of embeddings and of a head of its own; None: init_std.
        fp8: the linear maps of blocks, and experts, multiply by their weights in 8-bit floats.
        fp8_spares: but not those of so many blocks at the start of a stack, and at its end.

    Further tokens (see `models.mtp`, a GPT's alone):
        mtp_modules: how many modules behind the last layer predict tokens beyond the next.
        mtp_pattern: with `pattern`, that of the layers of a module.
        mtp_loss_weight: of the mean of their losses.

    Experts:
        moe: their configuration; None makes every layer dense.
        moe_layers: which layers have experts, one flag per layer; None means all.
        router: a token's experts are its best by score ("topk"), or chosen as by a class of
            `mb_layers`: `NoisyTopKRouter` ("noisy_topk"), `SinkhornRouter` ("sinkhorn"),
            `SparseMixerRouter` ("sparsemixer"), `ExpertChoiceRouter` ("expert_choice").
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
    delta: DeltaSizes | None = None
    mamba: MambaSizes | None = None
    conv_taps: int | None = None
    activation: str = "gelu_tanh"
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    qk_norm_eps: float | None = None
    norms: str = "before"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    fp32_residual: bool = False
    qk_norm: str = "none"
    clip_qkv: float | None = None
    positions: str = "learned"
    rope_base: float = 10_000.0
    local_rope_base: float | None = None
    rope_fraction: float = 1.0
    rope_layers: tuple[bool, ...] | None = None
    rope_scaling: RopeScaling | None = None
    attention_scale: float | None = None
    window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    delta_layers: tuple[bool, ...] | None = None
    pattern: str | None = None
    output_gate: bool = False
    softmax: str = "vanilla"
    bias: bool = True
    qkv_bias: bool | None = None
    tie_embeddings: bool = True
    head_bias: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_std: float = 0.02
    output_init_std: float = 0.02
    ends_init_std: float | None = None
    fp8: bool = False
    fp8_spares: tuple[int, int] = (0, 0)
    mtp_modules: int = 0
    mtp_pattern: str | None = None
    mtp_loss_weight: float = 0.1
    moe: MoEConfig | None = None
    moe_layers: tuple[bool, ...] | None = None
    router: str = "topk"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"Expected {name} to be one of {', '.join(choices)}, "
                    f"got {getattr(self, name)!r}."
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"Expected the key-value heads to divide the heads, got {self.num_kv_heads} and "
                f"{self.num_heads}."
            )
        for name in FLAGS_OF_LAYERS:
            flags = getattr(self, name)
            if flags is not None and len(flags) != self.num_layers:
                raise ValueError(
                    f"Expected one flag per layer in {name}, {self.num_layers}, got {len(flags)}."
                )
        if self.window is not None and self.window < 0:
            raise ValueError(f"Expected a window of at least 0 tokens, got {self.window}.")
        if self.delta is not None and self.delta.value_heads % self.delta.key_heads:
            raise ValueError(
                "Expected the key heads of layers with a state to divide their value heads, got "
                f"{self.delta.key_heads} and {self.delta.value_heads}."
            )
        if self.mamba is not None and self.mamba.heads % self.mamba.groups:
            raise ValueError(
                "Expected the groups of Mamba layers to divide their heads, got "
                f"{self.mamba.groups} and {self.mamba.heads}."
            )
        if self.mamba is None and "M" in (self.pattern or ""):
            raise ValueError(f"Expected sizes of Mamba layers for {self.pattern}, got none.")
        if self.pattern is not None and self.mtp_modules:
            behind = self.mtp_pattern or ""
            if not behind or set(behind) - set(self.pattern):
                raise ValueError(
                    "Expected mtp_pattern, the layers of a module, of letters that pattern "
                    f"{self.pattern} has, got {self.mtp_pattern}."
                )
        if self.conv_taps is None and "S" in (self.pattern or ""):
            raise ValueError(f"Expected taps of short convolutions for {self.pattern}, got none.")
        if self.conv_taps is not None and self.hidden_size % self.num_heads:
            raise ValueError(
                "Expected the heads to divide the channels of short convolutions, got "
                f"{self.num_heads} and {self.hidden_size}."
            )
        if self.latent is not None:
            self._check_latent(self.latent)
        elif self.qk_norm == "latent":
            raise ValueError("Expected latent sizes with qk_norm latent, got none.")

    @property
    def ends_std(self) -> float:
        """Standard deviation of embeddings, and of a head of its own, at the start."""
        return self.init_std if self.ends_init_std is None else self.ends_init_std

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
            "rope_layers": None,
            "window": None,
            "clip_qkv": None,
            "output_gate": False,
            "softmax": "vanilla",
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

    @property
    def has_states(self) -> bool:
        """Whether there are layers with a state of any kind, tokens of a convolution too."""
        return any(kind is not None for kind in (self.delta, self.mamba, self.conv_taps))

    def has_mixer(self, layer: int) -> bool:
        """Whether tokens meet in layer `layer`: it attends, or has a state."""
        return self.pattern is None or self.pattern[layer] in "MS*"

    def has_mamba(self, layer: int) -> bool:
        """Whether layer `layer` is of Mamba-2."""
        return self.pattern is not None and self.pattern[layer] == "M"

    def has_convolution(self, layer: int) -> bool:
        """Whether layer `layer` is of a gated short convolution."""
        return self.pattern is not None and self.pattern[layer] == "S"

    def has_feed_forward(self, layer: int) -> bool:
        """Whether layer `layer` has a feed-forward, dense or with experts."""
        return self.pattern is None or self.pattern[layer] in "-E"

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer`'s feed-forward is a Mixture-of-Experts."""
        if self.pattern is not None:
            return self.pattern[layer] == "E"
        return self.moe is not None and (self.moe_layers is None or self.moe_layers[layer])

    def has_state(self, layer: int) -> bool:
        """Whether layer `layer` is of Gated DeltaNet in place of attention."""
        return self.delta is not None and (self.delta_layers is None or self.delta_layers[layer])

    def rotates(self, layer: int) -> bool:
        """Whether positions turn layer `layer`'s queries and keys."""
        turned = self.rope_layers is None or self.rope_layers[layer]
        return self.positions == "rope" and turned

    def in_fp8(self, layer: int) -> bool:
        """Whether layer `layer` multiplies by its weights in 8-bit floats."""
        start, end = self.fp8_spares
        return self.fp8 and start <= layer < self.num_layers - end

    def window_of(self, layer: int) -> int | None:
        """How many tokens before its own a token sees in layer `layer`; None: all."""
        return self.window if self.window_layers is None or self.window_layers[layer] else None

    @property
    def windows(self) -> set[int | None]:
        """Those of all layers."""
        return set(map(self.window_of, range(self.num_layers)))

    @property
    def has_sinks(self) -> bool:
        """Whether the softmax of the scores has one more in its sum."""
        return self.softmax != "vanilla"

    @property
    def plain_attention(self) -> bool:
        """Whether no layer has a window or sinks."""
        return self.windows == {None} and not self.has_sinks

    def require_plain(self, model: str) -> None:
        """Raise ValueError for a window, sinks or a state in a model, called `model`, without."""
        if self.delta is not None:
            raise ValueError(f"Expected no layers with a state for {model}, got {self.delta}.")
        if self.pattern is not None:
            raise ValueError(f"Expected whole blocks for {model}, got layers {self.pattern}.")
        if not self.plain_attention:
            raise ValueError(
                f"Expected no window and a vanilla softmax for {model}, got a window of "
                f"{self.window} and {self.softmax}."
            )
