"""What follows from the fields of a model, and what does not go together of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mb_train.config.attention import AttentionFields
from mb_train.config.field import flag_name, whole
from mb_train.config.hybrid import HybridFields
from mb_train.config.layers import told
from mb_train.config.model import ModelFields
from mb_train.config.positions import PositionFields
from mb_train.config.width import WidthFields

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
# As `mb_kernels.activation` has them, which would bring torch into every --help.
_GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "swigluoai")


@dataclass(frozen=True, kw_only=True)
class Network(ModelFields, AttentionFields, HybridFields, PositionFields, WidthFields):
    """A model without its experts."""

    @property
    def decoder_layers(self) -> int:
        """Layers of a decoder beside an encoder."""
        return self.decoder_num_layers or whole(self.num_layers)

    @property
    def ffn_size(self) -> int:
        """F, the width inside a dense feed-forward."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        wide = 4 * whole(self.hidden_size)
        return max(wide * 2 // 3 // 64, 1) * 64 if self.swiglu else wide

    @property
    def mtp_pattern(self) -> str | None:
        """Letters of the layers of a module for further tokens; None for one like the last."""
        there = self.mtp_num_layers and self.hybrid_layer_pattern is not None
        return self.mtp_hybrid_override_pattern if there else None

    @property
    def activation_name(self) -> str:
        """The activation by mb_kernels' name."""
        if self.activation is not None:
            return self.activation
        if self.swiglu:
            return "swiglu"
        if self.squared_relu:
            return "squared_relu"
        return "geglu_tanh" if self.glu else "gelu_tanh"

    @property
    def is_glu(self) -> bool:
        """Whether the feed-forward has a gate."""
        return self.activation_name.partition("(")[0] in _GATED

    @property
    def norms(self) -> str:
        """Where norms stand, as `models.config.TransformerConfig` has it."""
        if self.norm_placement is not None:
            return self.norm_placement
        if self.post_layernorm:
            return "sum"
        return "kept" if self.apply_residual_connection_post_layernorm else "before"

    @property
    def head_size(self) -> int:
        """Width of one attention head's query and key."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim
        return self.kv_channels or whole(self.hidden_size) // whole(self.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        grouped = self.group_query_attention
        return self.num_query_groups if grouped else whole(self.num_attention_heads)

    @property
    def latent_sizes(self) -> list[int | None] | None:
        """Of latent attention, as `models.config.LatentSizes` has them; a list, as in JSON."""
        if not self.multi_latent_attention:
            return None
        heads = [self.qk_head_dim, self.qk_pos_emb_head_dim, self.v_head_dim]
        return [self.q_lora_rank, self.kv_lora_rank, *heads]

    @property
    def qk_epsilon(self) -> float | None:
        """Epsilon of the norms of queries and keys, if there are any."""
        if not self.qk_layernorm:
            return None
        return self.qk_layernorm_epsilon or self.layernorm_epsilon

    @property
    def windows(self) -> tuple[int, int | list[int] | None] | None:
        """Of layers with one: its size, and n if every n-th layer has none, or 1 for each layer
        with one and 0 for the others, or None if all have it; None without."""
        near = list(map(self.has_window, range(whole(self.num_layers))))
        if self.window_size is None or not any(near):
            return None
        return self.window_size, None if all(near) else told(near)

    @property
    def gates(self) -> bool | None:
        """True if what attention returns has gates, and None if not, as in runs of before."""
        return self.attention_output_gate or None

    @property
    def scores_bias(self) -> bool | None:
        """True if tokens have a bias on their score, and None if not, as in runs of before."""
        return self.head_bias or None

    @property
    def delta_sizes(self) -> list[int | None] | None:
        """Of layers with a state, as `models.config.DeltaSizes` has them, and n if every n-th layer
        attends; None without."""
        every = self.linear_attention_freq
        if self.experimental_attention_variant is None or every == 1:
            return None
        heads = [self.linear_num_key_heads, self.linear_num_value_heads]
        widths = [self.linear_key_head_dim, self.linear_value_head_dim]
        every = every if every is not None and every <= whole(self.num_layers) else None
        return [*heads, *widths, self.linear_conv_kernel_dim, every]

    def has_state(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has a state, if there are such layers."""
        every = self.linear_attention_freq
        return every is None or (layer + 1) % every != 0

    @property
    def mamba_sizes(self) -> list[int] | None:
        """Of layers of Mamba-2, as `models.config.MambaSizes` has them; None without."""
        if "M" not in (self.hybrid_layer_pattern or ""):
            return None
        heads = self.mamba_num_heads or 2 * whole(self.hidden_size) // self.mamba_head_dim
        sizes = [self.mamba_head_dim, self.mamba_num_groups, self.mamba_state_dim]
        return [heads, *sizes, self.mamba_conv_kernel_dim]

    @property
    def conv_taps(self) -> int | None:
        """Tokens that a layer of a short convolution sums up; None without such layers."""
        return self.short_conv_kernel_dim if "S" in (self.hybrid_layer_pattern or "") else None

    @property
    def sinks(self) -> str | None:
        """Kind of the score more in each sum of attention's softmax, if there is one."""
        return None if self.softmax_type == "vanilla" else self.softmax_type

    def has_window(self, layer: int) -> bool:
        """Whether a token of layer `layer`, counted from 0, sees those near before it alone."""
        every = self.window_attn_skip_freq
        if self.window_size is None or self.window_layers is None:
            return self.window_size is not None and (every is None or (layer + 1) % every != 0)
        return self.window_layers[layer] == 1

    @property
    def unrotated(self) -> int | list[int] | None:
        """n if every n-th layer has no rotary positions, or 1 for each layer that has them and 0
        for the others; None if all have them, or have others."""
        turned = list(map(self.has_rope, range(whole(self.num_layers))))
        return None if self.position_embedding_type != "rope" or all(turned) else told(turned)

    def has_rope(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has rotary positions, if there are any."""
        if self.rope_layers is not None:
            return self.rope_layers[layer] == 1
        return self.no_rope_freq is None or (layer + 1) % self.no_rope_freq != 0

    @property
    def wider(self) -> float:
        """How many times as wide as the model that rates were found for; 1 without μP."""
        base = self.mup_base_hidden_size
        return whole(self.hidden_size) / base if self.use_mup and base is not None else 1.0

    @property
    def multipliers(self) -> list[float] | None:
        """Of embeddings and of what joins the residual, and the divisor of tokens' scores, as in
        JSON; None if all are 1, as in runs of before."""
        divisor = self.wider if self.logits_scaling is None else self.logits_scaling
        found = [self.embedding_multiplier, self.residual_multiplier, divisor]
        return None if found == [1, 1, 1] else found

    @property
    def mup(self) -> list[float] | None:
        """What rates, weights at the start and attention follow from; None without μP."""
        if not self.use_mup:
            return None
        return [self.wider, self.mup_base_head_dim or 1.0, self.mup_attn_scale_power]

    @property
    def scale_of_scores(self) -> float | None:
        """What attention's scores are multiplied by; None: one over the root of a head's width."""
        if self.attention_scale is not None or self.mup is None:
            return self.attention_scale
        _, base, power = self.mup
        return base**0.5 / self.head_size**power

    @property
    def rope_scaling(self) -> tuple[Any, ...] | None:
        """How rotations are slowed, and by how much, as `models.config.RopeScaling` has it."""
        if self.use_rope_scaling:
            return "llama3", self.rope_scaling_factor
        if self.rope_type == "longrope":
            return "longrope", 1.0, *self._yarn_numbers, tuple(self.rotary_factors or ())
        factor = self.rotary_scaling_factor
        if self.rope_type == "yarn" or (self.rope_type is None and self.multi_latent_attention):
            # The whole of YaRN grows with the factor's logarithm.
            return None if factor == 1 else ("yarn", factor, *self._yarn_numbers)
        factor = self.rotary_seq_len_interpolation_factor
        return None if factor is None else ("linear", factor)

    @property
    def local_base(self) -> float | None:
        """Base of the rotations of layers with a window; None if they turn as the others."""
        base, turned = self.rotary_base_local, self.position_embedding_type == "rope"
        alike = self.rope_scaling is None and base == self.rotary_base
        return base if turned and self.windows is not None and not alike else None

    @property
    def _yarn_numbers(self) -> tuple[float, ...]:
        trained_on, turns = self.original_max_position_embeddings, (self.beta_fast, self.beta_slow)
        return trained_on, *turns, self.mscale, self.mscale_all_dim, self.yarn_truncate

    def check_model(self) -> None:
        """Raise ValueError for sizes and options that do not go together."""
        _check_layers(self)
        hidden, heads = whole(self.hidden_size), whole(self.num_attention_heads)
        if self.kv_channels is None and not self.multi_latent_attention and hidden % heads:
            raise ValueError(
                f"Expected --hidden-size to be divisible by --num-attention-heads, got {hidden} "
                f"and {heads}. Change one, or give --kv-channels."
            )
        if heads % self.kv_heads:
            raise ValueError(
                f"Expected --num-query-groups to divide --num-attention-heads, got "
                f"{self.kv_heads} and {heads}."
            )
        if self.model == "bert" and self.untie_embeddings_and_output_weights:
            raise ValueError(
                "Expected --model gpt or t5 with --untie-embeddings-and-output-weights, got bert, "
                "whose head is tied to its embedding. Leave it out."
            )
        places = ("norm_placement", "post_layernorm", "apply_residual_connection_post_layernorm")
        if len(named := [flag_name(name) for name in places if getattr(self, name)]) > 1:
            raise ValueError(f"Expected one place of norms, got {' and '.join(named)}.")
        if self.mtp_num_layers and (self.model != "gpt" or self.norms == "sum"):
            got = f"norms behind the sums, {named[0]}" if self.model == "gpt" else self.model
            raise ValueError(
                "Expected --model gpt, and a norm that ends it, with --mtp-num-layers "
                f"{self.mtp_num_layers}, got {got}. Leave one of the two out."
            )
        _check_norms(self)
        _check_latent(self)
        _check_rotated(self)
        _check_delta(self)
        _check_pattern(self)
        _check_slowing(self)
        _check_softmax(self)
        _check_width(self)
        _check_two_stacks(self)
        if self.activation is not None and self.glu and not self.is_glu:
            raise ValueError(
                f"Expected a gated --activation with --glu, got {self.activation!r}. "
                f"Leave one of the two out, or take {', '.join(_GATED)}."
            )
        names = ("glu", "swiglu", "squared_relu", "activation")
        named = [flag_name(name) for name in names if getattr(self, name)]
        # "glu" beside "swiglu" or a gated --activation says the same once more.
        if len(set(named) - {"--glu"}) > 1 or (self.squared_relu and self.glu):
            raise ValueError(f"Expected one activation, got {' and '.join(named)}.")


def _check_layers(config: Network) -> None:
    """Raise ValueError for what is said of other layers than there are, or in two ways."""
    by_layer = {"window_layers": "window_attn_skip_freq", "rope_layers": "no_rope_freq"}
    for listed, every in by_layer.items():
        said = getattr(config, listed)
        if said is not None and len(said) != config.num_layers:
            raise ValueError(
                f"Expected {flag_name(listed)} to have a number for each of --num-layers "
                f"{config.num_layers}, got {len(said)}."
            )
        if said is not None and getattr(config, every) is not None:
            raise ValueError(f"Expected {flag_name(listed)} or {flag_name(every)}, got both.")


def _check_norms(config: Network) -> None:
    """Raise ValueError for norms of queries and keys in two ways."""
    if config.qk_l2_norm and config.qk_layernorm:
        raise ValueError("Expected --qk-l2-norm or --qk-layernorm, got both.")


def _check_latent(config: Network) -> None:
    """Raise ValueError for what has no meaning beside --multi-latent-attention."""
    if not config.multi_latent_attention:
        return
    of_rotated = config.qk_pos_emb_head_dim
    settings = {
        "--model gpt": (config.model == "gpt", config.model),
        "no --group-query-attention": (
            not config.group_query_attention,
            "both: every head has a key and a value of its own",
        ),
        "--position-embedding-type rope": (
            config.position_embedding_type == "rope",
            config.position_embedding_type,
        ),
        "--rotary-percent 1": (
            config.rotary_percent == 1,
            f"{config.rotary_percent}: --qk-pos-emb-head-dim says how much is rotated",
        ),
        "an even --qk-pos-emb-head-dim": (
            of_rotated % 2 == 0,
            f"{of_rotated}: rotations are of pairs",
        ),
        "no --add-qkv-bias": (
            not config.add_qkv_bias,
            "both: of its maps only the last can have a bias, see --add-bias-linear",
        ),
        "no --qk-layernorm-over": (
            config.qk_layernorm_over == "head",
            f"{config.qk_layernorm_over}: its --qk-layernorm is over the latents",
        ),
        "no --window-size": (config.window_size is None, f"both: {config.window_size}"),
        "--softmax-type vanilla": (config.softmax_type == "vanilla", config.softmax_type),
        "no --qk-l2-norm": (not config.qk_l2_norm, "both"),
        "no --clip-qkv": (config.clip_qkv is None, f"both: {config.clip_qkv}"),
        "no --attention-output-gate": (not config.attention_output_gate, "both"),
        "no --no-rope-freq": (config.no_rope_freq is None, f"both: {config.no_rope_freq}"),
        "no --rope-layers": (config.rope_layers is None, "both"),
    }
    for wanted, (fits, found) in settings.items():
        if not fits:
            raise ValueError(
                f"Expected {wanted} with --multi-latent-attention, got {found}. Change one, or "
                "leave one out."
            )


def _check_rotated(config: Network) -> None:
    """Raise ValueError if what turns of a head is no number of pairs."""
    if config.position_embedding_type != "rope" or config.multi_latent_attention:
        return
    turned = int(config.head_size * config.rotary_percent)
    if turned % 2 or not turned:
        raise ValueError(
            "Expected an even number of a head's channels to turn, 2 or more, got "
            f"{turned} of {config.head_size} with --rotary-percent {config.rotary_percent}: "
            "rotations are of pairs. Change it, or --kv-channels."
        )


def _check_delta(config: Network) -> None:
    """Raise ValueError for heads of layers with a state that do not share their keys evenly."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if config.delta_sizes is not None and values % keys:
        raise ValueError(
            "Expected --linear-num-key-heads to divide --linear-num-value-heads, got "
            f"{keys} and {values}."
        )


def _check_pattern(config: Network) -> None:
    """Raise ValueError for a pattern that is none, or beside what has no meaning for halves."""
    pattern, layers = config.hybrid_layer_pattern, whole(config.num_layers)
    if pattern is None:
        return
    flag = "--hybrid-layer-pattern"
    if set(pattern) - set("MS*-E"):
        raise ValueError(
            f"Expected {flag} to be of M (Mamba-2), S (a short convolution), * (attention), - (a "
            f"dense feed-forward) and E (experts), got {pattern!r}."
        )
    if len(pattern) != layers:
        raise ValueError(
            f"Expected {flag} to have a letter for each of --num-layers {layers}, got "
            f"{len(pattern)}: {pattern}."
        )
    whole_blocks = {
        "--experimental-attention-variant": config.experimental_attention_variant,
        "--window-attn-skip-freq": config.window_attn_skip_freq,
        "--no-rope-freq": config.no_rope_freq,
        "--model": None if config.model == "gpt" else config.model,
    }
    for words, value in whole_blocks.items():
        if value:
            raise ValueError(
                f"Expected {words} to be left out with {flag}, whose layers are halves of a GPT's "
                f"blocks, got {value}."
            )
    if config.position_embedding_type == "learned":
        raise ValueError(
            f"Expected --position-embedding-type none or rope with {flag}, got learned."
        )
    behind = config.mtp_pattern
    if config.mtp_num_layers and (not behind or set(behind) - set(pattern)):
        got = f"got {behind}" if behind else "got none"
        raise ValueError(
            "Expected --mtp-hybrid-override-pattern, the layers of a module of --mtp-num-layers, "
            f"of letters that {flag} {pattern} has, {got}. Or write them behind it, once for each "
            f"module: {pattern}/*E."
        )
    hidden, heads = whole(config.hidden_size), whole(config.num_attention_heads)
    if config.conv_taps is not None and hidden % heads:
        raise ValueError(
            "Expected --num-attention-heads to divide --hidden-size, whose channels a short "
            f"convolution (S) has, got {heads} and {hidden}."
        )
    sizes, wide = config.mamba_sizes, 2 * hidden
    if sizes is None:
        return
    if config.mamba_num_heads is None and wide % config.mamba_head_dim:
        raise ValueError(
            f"Expected --mamba-head-dim to divide 2 x --hidden-size, {wide}, got "
            f"{config.mamba_head_dim}. Change one, or give --mamba-num-heads."
        )
    if sizes[0] % config.mamba_num_groups:
        raise ValueError(
            "Expected --mamba-num-groups to divide --mamba-num-heads, got "
            f"{config.mamba_num_groups} and {sizes[0]}."
        )


def _check_softmax(config: Network) -> None:
    """Raise ValueError for windows, sinks or states in a model that also sees tokens to come."""
    settings = {
        f"--window-size {config.window_size}": config.window_size is not None,
        f"--softmax-type {config.softmax_type}": config.softmax_type != "vanilla",
        f"--experimental-attention-variant {config.experimental_attention_variant}": (
            config.experimental_attention_variant is not None
        ),
    }
    for words in (words for words, given in settings.items() if given and config.model != "gpt"):
        raise ValueError(f"Expected --model gpt with {words}, got {config.model}.")


def _check_width(config: Network) -> None:
    """Raise ValueError for multipliers in a model that does not multiply by them."""
    given = ["use_mup"] if config.use_mup else []
    given += [name for name in _MULTIPLIERS if getattr(config, name) not in (None, 1)]
    if given and config.model != "gpt":
        raise ValueError(
            f"Expected --model gpt with {', '.join(map(flag_name, given))}, got {config.model}."
        )
    if config.use_mup and config.multi_latent_attention:
        raise ValueError(
            "Expected no --multi-latent-attention with --use-mup, which divides the scores of "
            "other attention alone, got both. Leave one of the two out."
        )


def _check_two_stacks(config: Network) -> None:
    """Raise ValueError for what attention to an encoder, or layers of two stacks, have not."""
    settings = {
        "--attention-output-gate": config.attention_output_gate,
        f"--no-rope-freq {config.no_rope_freq}": config.no_rope_freq is not None,
        "--rope-layers": config.rope_layers is not None,
    }
    for words in (words for words, given in settings.items() if given and config.model == "t5"):
        raise ValueError(
            f"Expected another --model than t5 with {words}. Leave one of the two out."
        )


def _check_slowing(config: Network) -> None:
    """Raise ValueError for rotations that are slowed in two ways, or in none that works."""
    linear, by_yarn = config.rotary_seq_len_interpolation_factor, config.rotary_scaling_factor
    if config.use_rope_scaling and linear is not None:
        raise ValueError(
            "Expected --use-rope-scaling or --rotary-seq-len-interpolation-factor, got both."
        )
    others = {
        "--use-rope-scaling": config.use_rope_scaling,
        # One of 1 is what scripts have that slow nothing.
        f"--rotary-seq-len-interpolation-factor {linear}": linear not in (None, 1),
    }
    if by_factors := config.rope_type == "longrope":
        _check_factors(config)
    own = {
        f"--rope-type {config.rope_type}": config.rope_type in ("yarn", "longrope"),
        # Core's own latent attention passes over the other ways.
        "--multi-latent-attention": config.multi_latent_attention,
    }
    for other in (words for words, given in others.items() if given):
        for words in (words for words, given in own.items() if given):
            flag = "--rotary-factors" if by_factors else "--rotary-scaling-factor"
            raise ValueError(f"Expected {flag} to slow rotations with {words}, got {other}.")
    if config.rope_type in ("rope", "longrope") and by_yarn != 1:
        raise ValueError(
            f"Expected --rope-type yarn with --rotary-scaling-factor {by_yarn}, got "
            f"{config.rope_type}, whose rotations it does not slow. Leave one of the two out."
        )
    if config.rope_scaling in (None, ("linear", 1)):
        return
    if config.position_embedding_type != "rope":
        raise ValueError(
            "Expected --position-embedding-type rope with slowed rotations, got "
            f"{config.position_embedding_type}."
        )
    if config.rope_scaling[0] != "yarn":
        return
    if config.beta_fast < config.beta_slow:  # Kimi-K2 has 1 and 1
        raise ValueError(
            f"Expected --beta-fast of at least --beta-slow, got {config.beta_fast} and "
            f"{config.beta_slow}."
        )
    if config.rotary_base <= 1:
        raise ValueError(f"Expected --rotary-base above 1 with YaRN, got {config.rotary_base}.")


def _check_factors(config: Network) -> None:
    """Raise ValueError for another number of factors than of pairs of channels that turn."""
    width = int(config.head_size * config.rotary_percent)
    pairs = (config.qk_pos_emb_head_dim if config.multi_latent_attention else width) // 2
    if len(found := config.rotary_factors or []) != pairs:
        raise ValueError(
            f"Expected --rotary-factors for each of the {pairs} pairs of a head's channels that "
            f"turn, got {len(found)}."
        )
