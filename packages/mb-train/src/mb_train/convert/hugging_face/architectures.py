"""Which of Hugging Face's architectures a model is, and each one's configuration and tensors.

Nothing is left out silently, in either direction: a setting of theirs that our models do not have,
and one of ours that no architecture can express, are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from mb_kernels.activation import parse
from mb_layers.state_dicts import Rule, reversed_rules

from mb_train.config import TrainConfig, whole
from mb_train.config.field import flag_name, spec
from mb_train.config.model import ROWS_OF_VOCABULARY
from mb_train.config.moe import MoEFields
from mb_train.config.network import Network
from mb_train.convert.hugging_face import (
    bert,
    dbrx,
    deepseek,
    experts,
    glm4,
    gpt2,
    gpt_oss,
    granite,
    granite_hybrid,
    hunyuan,
    lfm2,
    llama,
    llama4,
    minimax_m3,
    mistral4,
    nemotron_h,
    olmo,
    phi3,
    phimoe,
    qwen_next,
    relatives,
    t5,
    unrotated,
)
from mb_train.convert.hugging_face.architecture import (
    GUESSES,
    Architecture,
    Modules,
    special_tokens,
)
from mb_train.convert.hugging_face.chosen import INDEXER
from mb_train.convert.hugging_face.config_json import Json
from mb_train.convert.hugging_face.decoder_rules import decoder_rules
from mb_train.convert.hugging_face.experts import ExpertNames, ExpertRules, expert_rules
from mb_train.convert.hugging_face.text_inside import INSIDE
from mb_train.convert.new_run import imported_config
from mb_train.models.config import TransformerConfig


def architecture_of(config: Json) -> Architecture:
    """The architecture of a config.json.

    Raises:
        ValueError: one that is not supported.
    """
    said = config.get("model_type")
    kind = _SAME.get(said, said) if isinstance(said, str) else said
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(
            f"Expected a model of type {', '.join((*ARCHITECTURES, *_SAME))}, or the text inside "
            f"of {', '.join(INSIDE)}, got {said!r} in config.json."
        )
    return ARCHITECTURES[kind]


def architecture_for(config: TrainConfig) -> Architecture:
    """The architecture that a model of ours can be written as.

    Raises:
        ValueError: none has what the model has; says what.
    """
    found = ARCHITECTURES[_nearest(config)]
    assert found.config is not None
    # μP's own fields are of training, but the scale of attention that follows from them is not.
    granites = (*granite.DEFAULTS, *granite_hybrid.DEFAULTS)
    if config.use_mup or found.model_type in granites:
        config = granite.spelled_out(config)
    # A configuration that comes back changed is one that the architecture cannot say.
    back = imported_config(found.read(found.config(config)), vocab_size=1)
    if unsaid := list(_differing(config, back)):
        raise ValueError(
            f"Hugging Face has no architecture for this model: the nearest, {found.name}, cannot "
            f"say its {', '.join(unsaid)}."
        )
    return found


def _differing(config: TrainConfig, back: TrainConfig) -> Iterator[str]:
    """The flags of what a model computes that came back changed, with their values in force."""
    # Of experts that it cannot have their number says it all.
    told = {*_settings(back), "moe_num_experts"}
    for name, behind in _settings(config).items():
        here, there = getattr(config, name), getattr(back, name)
        if name not in told or _meaning(name, here) == _meaning(name, there):
            continue
        said = {field: getattr(config, field) for field in behind}
        moved = [field for field in behind if said[field] not in (None, getattr(back, field))]
        if moved and isinstance(here or there, (list, tuple)):
            # What several flags say together is not what any of them says.
            yield from (f"{flag_name(field)} {said[field]}" for field in moved)
        else:
            yield f"{flag_name(behind[-1])} {here}"


def _meaning(name: str, value: Any) -> Any:
    """A value in force; an activation has several names, and all of them mean its numbers."""
    return parse(value) if name == "activation_name" else value


def _nearest(config: TrainConfig) -> str:
    if config.model == "bert":
        return "bert" if config.norms == "sum" else "megatron-bert"
    if config.model == "t5":
        return "t5"
    if config.moe_num_experts is not None and config.moe_router_type == "sparsemixer":
        return "phimoe"
    if config.softmax_type == "learnable":
        return _nearest_with_sinks(config)
    by_bias = config.moe_router_enable_expert_bias or config.moe_router_score_function == "sigmoid"
    on_input = config.moe_num_experts is not None and config.moe_weights_on_input
    if config.qk_l2_norm or (on_input and config.moe_router_score_function == "sigmoid"):
        return "llama4_text"
    if config.multi_latent_attention:
        if by_bias or config.moe_num_experts is None:
            return "deepseek_v3"
        return "mistral4" if config.moe_renormalize else "deepseek_v2"
    if config.hybrid_layer_pattern is not None:
        return _nearest_of_halves(config)
    if config.delta_sizes is not None:
        return "qwen3_next"
    if config.normalization == "LayerNorm-without-bias":
        return "dbrx"
    if config.qk_layernorm and config.qk_layernorm_over == "turned-head":
        return "hunyuan_v1_dense" if config.moe_num_experts is None else "hunyuan_v1_moe"
    if config.attention_output_gate:
        return "afmoe"
    if config.norms == "both":
        return "glm4"
    if config.norms == "output":
        return _nearest_olmo(config)
    if config.multipliers is not None or config.scale_of_scores is not None:
        return _nearest_granite(config)
    if config.moe_num_experts is None:
        return _nearest_llama(config)
    if by_bias:
        return _nearest_by_bias(config)
    if config.unrotated is not None:
        return "exaone_moe"
    if config.qk_layernorm:
        if config.qk_layernorm_over == "width":
            return "olmoe"
        some = config.windows is not None and config.windows[1] is not None
        return "mellum" if some or config.local_base is not None else "qwen3_moe"
    return "mixtral" if config.moe_shared_expert_intermediate_size is None else "qwen2_moe"


def _nearest_llama(config: TrainConfig) -> str:
    """Without experts, and with what most of these models have."""
    if config.unrotated is not None:
        return "exaone_moe" if config.qk_layernorm else "smollm3"
    if config.position_embedding_type == "learned":
        return "gpt2"
    if config.qk_layernorm:
        return "qwen3"
    if config.add_qkv_bias:
        return "qwen2"
    # Llama's class insists that the heads divide the width, Mistral's is the same model, but for
    # windows.
    divides = whole(config.hidden_size) % whole(config.num_attention_heads) == 0
    return "llama" if divides and config.windows is None else "mistral"


def _nearest_by_bias(config: TrainConfig) -> str:
    """With experts whose load a bias balances, or that are chosen by sigmoids."""
    if config.moe_router_score_function == "softmax":
        return "ernie4_5_moe"
    if parse(config.activation_name).offset:
        return "minimax_m3_vl_text"
    over_width = config.qk_layernorm and config.qk_layernorm_over == "width"
    near = config.windows is not None and config.qk_layernorm and not over_width
    if config.unrotated is not None or near:
        return "exaone_moe"
    return "minimax_m2" if over_width else "glm4_moe"


def _nearest_of_halves(config: TrainConfig) -> str:
    if config.conv_taps is not None:
        return "lfm2" if config.moe_num_experts is None else "lfm2_moe"
    return "granitemoehybrid" if config.is_glu else "nemotron_h"


def _nearest_with_sinks(config: TrainConfig) -> str:
    if config.qk_layernorm:
        return "flint"
    if config.multipliers is None and config.scale_of_scores is None:
        return "gpt_oss"
    return "granite_swa" if config.moe_num_experts is None else "granitemoe_swa"


def _nearest_olmo(config: TrainConfig) -> str:
    if config.moe_num_experts is not None:
        return "flex_olmo"
    if config.qk_layernorm_over == "head":
        return "exaone4"
    return "olmo2" if config.windows is None else "olmo3"


def _nearest_granite(config: TrainConfig) -> str:
    if config.moe_num_experts is None:
        return "granite"
    shared = config.moe_shared_expert_intermediate_size is not None
    return "granitemoeshared" if shared else "granitemoe"


# How many rows tables have: the weights say so themselves.
_ROWS = {*ROWS_OF_VOCABULARY, "position_rows"}


def _settings(config: TrainConfig) -> dict[str, list[str]]:
    """What says what a model computes: of each value in force its name, and the fields behind."""
    groups = (Network,) if config.moe_num_experts is None else (Network, MoEFields)
    behind: dict[str, list[str]] = {}
    for field in (f for group in groups for f in fields(group) if not spec(f).in_training):
        behind.setdefault(spec(field).in_force or field.name, []).append(field.name)
    if not config.has_dense_layers:
        del behind["ffn_size"]  # of dense feed-forwards
    return {name: found for name, found in behind.items() if name not in _ROWS}


_DEFAULTS = {
    **llama.DEFAULTS, **deepseek.DEFAULTS, **relatives.DEFAULTS, **olmo.DEFAULTS,
    **unrotated.DEFAULTS, **qwen_next.DEFAULTS, **granite.DEFAULTS,
    **granite_hybrid.DEFAULTS, **hunyuan.DEFAULTS, **nemotron_h.DEFAULTS,
    **lfm2.DEFAULTS,
    "glm4": glm4.DEFAULTS,
    "gpt_oss": gpt_oss.DEFAULTS, "mistral4": mistral4.DEFAULTS, "phi3": phi3.DEFAULTS,
    "phimoe": phimoe.DEFAULTS, "llama4_text": llama4.DEFAULTS,
    "minimax_m3_vl_text": minimax_m3.DEFAULTS,
}  # fmt: skip


def _llama_like(
    kind: str,
    name: str,
    fields_of: Callable[[Json], dict[str, Any]],
    config_of: Callable[[TrainConfig], dict[str, Any]] | None,
    names: ExpertNames = experts.LLAMA,
    aliases: Mapping[str, str] | None = None,
    modules: Modules | None = None,
    beside: Mapping[str, str] | None = None,
    rules_of: Callable[[TransformerConfig, ExpertRules], list[Rule]] = decoder_rules,
) -> Architecture:
    return Architecture(
        kind,
        name,
        fields_of,
        config_of,
        rules=lambda _, c: rules_of(c, partial(expert_rules, names)),
        stacked=lambda _, c: rules_of(c, partial(expert_rules, names.stacked())),
        defaults=_DEFAULTS[kind],
        aliases=aliases or {},
        modules=modules,
        beside=beside or {},
        # Frequencies that old files hold as if they were weights.
        left_out=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        # Files of the model without a head have no prefix.
        renamed={r"^(?!model\.|lm_head\.)": "model."},
    )


def _written_stacked(found: Architecture) -> Architecture:
    """The same whose class knows the experts of a layer as one tensor alone."""
    stacked = found.stacked
    assert stacked is not None
    return replace(found, back=lambda *of: reversed_rules(stacked(*of)))


def _named_too(found: Architecture, names: Mapping[str, str]) -> Architecture:
    """The same whose tensors may have other names, too."""
    return replace(found, renamed={**found.renamed, **names})


def _granite_moe(kind: str, name: str, *of: Any) -> Architecture:
    return replace(
        _named_too(_llama_like(kind, name, *of, aliases=granite.ALIASES), granite.RENAMED),
        rules=lambda _, c: decoder_rules(c, granite.expert_rules),
        stacked=lambda _, c: decoder_rules(c, partial(granite.expert_rules, today=True)),
    )


def _granite_hybrid() -> Architecture:
    found = _llama_like(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", granite_hybrid.granite_hybrid_fields,
        granite_hybrid.granite_hybrid_config, aliases=granite_hybrid.ALIASES,
    )  # fmt: skip
    rules_of = granite_hybrid.granite_hybrid_rules
    return replace(
        found,
        rules=lambda _, c: rules_of(c),
        stacked=lambda _, c: rules_of(c, today=True),
        back=granite_hybrid.granite_hybrid_back,
        shared=True,
        renamed={**found.renamed, **granite.RENAMED},
    )


def _gpt_oss_rules(_: TrainConfig, config: TransformerConfig) -> list[Rule]:
    return decoder_rules(config, gpt_oss.expert_rules)


# Names of models whose code comes with their files, and whose class they are all the same.
_SAME = {"kimi_k2": "deepseek_v3"}
ARCHITECTURES = {
    found.model_type: found
    for found in (
        Architecture(
            "gpt2", "GPT2LMHeadModel", gpt2.fields_of, gpt2.config_of,
            lambda _, c: gpt2.rules_of(c),
            defaults=gpt2.DEFAULTS, aliases=gpt2.ALIASES, prefix="transformer.",
            # Causal masks, which old files hold as if they were weights.
            left_out=(r"h\.\d+\.attn\.(masked_)?bias",),
            special=lambda t: {**special_tokens(t), "bos_token_id": t.special.get("eod")},
        ),
        Architecture(
            "bert", "BertForPreTraining", partial(bert.fields_of, post_norm=True), bert.config_of,
            partial(bert.rules_of, names=bert.BERT),
            defaults=bert.DEFAULTS, left_out=bert.LEFT_OUT, copies=bert.COPIES,
            renamed=bert.RENAMED, special=lambda t: {"pad_token_id": t.pad},
        ),
        Architecture(
            "megatron-bert", "MegatronBertForPreTraining",
            partial(bert.fields_of, post_norm=False), bert.config_of,
            partial(bert.rules_of, names=bert.MEGATRON_BERT),
            defaults=bert.DEFAULTS, left_out=bert.LEFT_OUT, copies=bert.COPIES,
            renamed=bert.PREFIXED, special=lambda t: {"pad_token_id": t.pad},
        ),
        Architecture(
            "t5", "T5ForConditionalGeneration", t5.fields_of, t5.config_of, t5.rules_of,
            defaults=t5.DEFAULTS, aliases=t5.ALIASES,
            # A table of the first files that no layer ever used.
            left_out=(
                r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
            ),
            copies={
                f"{side}.embed_tokens.weight": "shared.weight" for side in ("encoder", "decoder")
            },
            # As samples begin without a [BOS], which T5's own tokenizer has not.
            special=lambda t: {
                "eos_token_id": t.eos, "pad_token_id": t.pad,
                "decoder_start_token_id": t.special.get("bos", t.pad),
            },
        ),
        Architecture(
            "dbrx", "DbrxForCausalLM", dbrx.dbrx_fields, dbrx.dbrx_config,
            lambda _, c: dbrx.dbrx_rules(c), lambda _, c: dbrx.dbrx_rules(c),
            defaults=dbrx.DEFAULTS, aliases=dbrx.ALIASES, inside=dbrx.INSIDE,
            # Files of the model without a head have no prefix.
            renamed={r"^(?!transformer\.|lm_head\.)": "transformer."},
        ),
        _llama_like("llama", "LlamaForCausalLM", llama.llama_fields, llama.llama_config),
        _llama_like("mistral", "MistralForCausalLM", llama.mistral_fields, llama.llama_config),
        _llama_like("qwen2", "Qwen2ForCausalLM", llama.qwen2_fields, llama.llama_config),
        _llama_like("qwen3", "Qwen3ForCausalLM", llama.qwen3_fields, llama.llama_config),
        _llama_like(
            "mixtral", "MixtralForCausalLM", llama.mixtral_fields, llama.mixtral_config,
            experts.MIXTRAL, {"num_experts": "num_local_experts"},
        ),
        replace(
            _llama_like(
                "llama4_text", "Llama4ForCausalLM", llama4.llama4_fields, llama4.llama4_config,
                aliases={"num_experts": "num_local_experts"},
            ),
            rules=lambda _, c: llama4.llama4_rules(c),
            stacked=lambda _, c: llama4.llama4_rules(c),
        ),
        _llama_like(
            "phimoe", "PhimoeForCausalLM", phimoe.phimoe_fields, phimoe.phimoe_config,
            experts.PHIMOE, {"num_experts": "num_local_experts"},
        ),
        _llama_like(
            "olmoe", "OlmoeForCausalLM", llama.olmoe_fields, llama.olmoe_config,
            aliases={"num_local_experts": "num_experts"},
        ),
        _llama_like(
            "qwen2_moe", "Qwen2MoeForCausalLM", llama.qwen2_moe_fields, llama.qwen2_moe_config
        ),
        _llama_like(
            "qwen3_moe", "Qwen3MoeForCausalLM", llama.qwen3_moe_fields, llama.qwen3_moe_config,
            aliases={"num_experts": "num_local_experts"},
        ),
        _llama_like(
            "glm4_moe", "Glm4MoeForCausalLM", deepseek.glm4_moe_fields, deepseek.glm4_moe_config,
            experts.DEEPSEEK, deepseek.ALIASES, deepseek.MODULES,
        ),
        _llama_like(
            "deepseek_v2", "DeepseekV2ForCausalLM", deepseek.deepseek_v2_fields,
            deepseek.deepseek_v2_config, experts.DEEPSEEK, deepseek.V2_ALIASES,
        ),
        _llama_like(
            "deepseek_v3", "DeepseekV3ForCausalLM", deepseek.deepseek_v3_fields,
            deepseek.deepseek_v3_config, experts.DEEPSEEK, deepseek.ALIASES, deepseek.MODULES,
        ),
        _written_stacked(
            _llama_like(
                "mistral4", "Mistral4ForCausalLM", mistral4.mistral4_fields,
                mistral4.mistral4_config, experts.DEEPSEEK, deepseek.ALIASES,
            )
        ),
        _llama_like(
            "dots1", "Dots1ForCausalLM", relatives.dots1_fields, None,
            experts.DEEPSEEK, deepseek.ALIASES,
        ),
        _llama_like(
            "solar_open", "SolarOpenForCausalLM", relatives.solar_open_fields, None,
            experts.DEEPSEEK, deepseek.ALIASES,
        ),
        _llama_like(
            "glm4_moe_lite", "Glm4MoeLiteForCausalLM", relatives.glm4_moe_lite_fields, None,
            experts.DEEPSEEK, deepseek.ALIASES, deepseek.MODULES,
        ),
        _llama_like(
            "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", hunyuan.dense_fields,
            llama.llama_config, rules_of=hunyuan.hunyuan_rules,
        ),
        _llama_like(
            "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", hunyuan.moe_fields, hunyuan.moe_config,
            experts.HUNYUAN_V1, hunyuan.ALIASES, rules_of=hunyuan.hunyuan_rules,
        ),
        _llama_like(
            "hy_v3", "HYV3ForCausalLM", relatives.hy_v3_fields, None,
            experts.HUNYUAN, relatives.HUNYUAN_ALIASES,
            # Their norm has another name, and their head may be their own.
            deepseek.MODULES._replace(read=False),
        ),
        _llama_like(
            "minimax_m2", "MiniMaxM2ForCausalLM", relatives.minimax_m2_fields,
            relatives.minimax_m2_config, experts.MINIMAX, {"num_experts": "num_local_experts"},
        ),
        replace(
            _llama_like(
                "minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", minimax_m3.minimax_m3_fields,
                minimax_m3.minimax_m3_config, aliases={"num_experts": "num_local_experts"},
                beside=INDEXER,
            ),
            rules=lambda _, c: minimax_m3.file_rules(c),
            stacked=lambda _, c: minimax_m3.today_rules(c),
            back=lambda _, c: minimax_m3.today_back(c),
            shared=True,
        ),
        replace(
            _llama_like(
                "glm4", "Glm4ForCausalLM", glm4.glm4_fields, glm4.glm4_config,
                rules_of=glm4.glm4_rules,
            ),
            shared=True,
            back=glm4.glm4_back,
        ),
        _llama_like("olmo2", "Olmo2ForCausalLM", olmo.olmo2_fields, llama.llama_config),
        _llama_like("olmo3", "Olmo3ForCausalLM", olmo.olmo3_fields, olmo.olmo3_config),
        _llama_like(
            "flex_olmo", "FlexOlmoForCausalLM", olmo.flex_olmo_fields, olmo.flex_olmo_config,
            aliases={"num_local_experts": "num_experts"},
        ),
        _llama_like(
            "smollm3", "SmolLM3ForCausalLM", unrotated.smollm3_fields, unrotated.smollm3_config
        ),
        _llama_like(
            "exaone4", "Exaone4ForCausalLM", unrotated.exaone4_fields, unrotated.exaone4_config
        ),
        _llama_like(
            "exaone_moe", "ExaoneMoeForCausalLM", unrotated.exaone_moe_fields,
            unrotated.exaone_moe_config, experts.EXAONE, unrotated.ALIASES,
            beside={r"model\.mtp\..*": GUESSES},
        ),
        _llama_like(
            "afmoe", "AfmoeForCausalLM", unrotated.afmoe_fields, unrotated.afmoe_config,
            experts.AFMOE, unrotated.AFMOE_ALIASES, rules_of=unrotated.afmoe_rules,
        ),
        _llama_like(
            "granite", "GraniteForCausalLM", granite.granite_fields, granite.granite_config
        ),
        _granite_moe(
            "granitemoe", "GraniteMoeForCausalLM", granite.granite_moe_fields,
            granite.granite_moe_config,
        ),
        _granite_moe(
            "granitemoeshared", "GraniteMoeSharedForCausalLM", granite.granite_moe_shared_fields,
            granite.granite_moe_shared_config,
        ),
        _granite_hybrid(),
        Architecture(
            "nemotron_h", "NemotronHForCausalLM", nemotron_h.nemotron_h_fields,
            nemotron_h.nemotron_h_config, lambda _, c: nemotron_h.nemotron_h_rules(c),
            stacked=lambda _, c: nemotron_h.nemotron_h_rules(c, today=True),
            back=nemotron_h.nemotron_h_back, shared=True,
            defaults=_DEFAULTS["nemotron_h"], aliases=nemotron_h.ALIASES,
            modules=nemotron_h.MODULES, renamed={r"^backbone\.": "model."},
            beside={r"mtp\..*": GUESSES},
        ),
        _llama_like(
            "lfm2", "Lfm2ForCausalLM", lfm2.lfm2_fields, lfm2.lfm2_config,
            aliases=lfm2.DENSE_ALIASES, rules_of=lfm2.lfm2_rules,
        ),
        _llama_like(
            "lfm2_moe", "Lfm2MoeForCausalLM", lfm2.lfm2_moe_fields, lfm2.lfm2_moe_config,
            experts.LFM2, lfm2.ALIASES, rules_of=lfm2.lfm2_rules,
        ),
        _llama_like(
            "granite_swa", "GraniteSWAForCausalLM", granite.swa_fields, granite.swa_config
        ),
        _written_stacked(
            _granite_moe(
                "granitemoe_swa", "GraniteMoeSWAForCausalLM", granite.moe_swa_fields,
                granite.moe_swa_config,
            )
        ),
        replace(
            _named_too(
                _llama_like(
                    "flint", "FlintForCausalLM", unrotated.flint_fields, unrotated.flint_config
                ),
                unrotated.FLINT_RENAMED,
            ),
            back=lambda _, c: unrotated.flint_back(c, partial(expert_rules, experts.LLAMA)),
        ),
        replace(
            _llama_like(
                "qwen3_next", "Qwen3NextForCausalLM", qwen_next.qwen3_next_fields,
                qwen_next.qwen3_next_config, modules=qwen_next.MODULES,
                beside={r"mtp\..*": GUESSES}, rules_of=qwen_next.qwen_next_rules,
            ),
            renamed=qwen_next.RENAMED,
        ),
        replace(
            _llama_like(
                "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", qwen_next.qwen3_5_fields, None,
                aliases=qwen_next.ALIASES, modules=qwen_next.MODULES,
                beside={r"mtp\..*": GUESSES},
                rules_of=partial(qwen_next.qwen_next_rules, apart=True),
            ),
            renamed=qwen_next.RENAMED,
        ),
        _llama_like(
            "qwen3_vl_moe_text", "Qwen3VLMoeTextModel", relatives.qwen3_vl_moe_fields, None,
            aliases={"num_experts": "num_local_experts"}, rules_of=relatives.qwen3_vl_moe_rules,
        ),
        _llama_like(
            "qwen3_omni_moe_text", "Qwen3OmniMoeThinkerTextModel", llama.qwen3_moe_fields, None,
            aliases={"num_experts": "num_local_experts"},
        ),
        _llama_like(
            "mellum", "MellumForCausalLM", relatives.mellum_fields, relatives.mellum_config,
            aliases={"num_experts": "num_local_experts"}, beside={r"model\.mtp\..*": GUESSES},
        ),
        _llama_like(
            "glm4v_moe_text", "Glm4vMoeTextModel", relatives.glm4v_moe_fields, None,
            experts.DEEPSEEK, deepseek.ALIASES, deepseek.MODULES,
        ),
        _llama_like(
            "deepseek_v32", "DeepseekV32ForCausalLM", relatives.sparse_fields, None,
            experts.DEEPSEEK, deepseek.ALIASES, deepseek.MODULES, INDEXER,
        ),
        _llama_like(
            "glm_moe_dsa", "GlmMoeDsaForCausalLM", relatives.sparse_fields, None,
            experts.DEEPSEEK, deepseek.ALIASES, deepseek.MODULES, INDEXER,
        ),
        _llama_like("seed_oss", "SeedOssForCausalLM", relatives.seed_oss_fields, None),
        _llama_like(
            "ernie4_5", "Ernie4_5ForCausalLM", relatives.ernie4_5_fields, None,
            rules_of=relatives.ernie_rules,
        ),
        _llama_like(
            "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", relatives.ernie4_5_moe_fields,
            relatives.ernie4_5_moe_config, experts.ERNIE, relatives.ERNIE_ALIASES,
            beside={r"model\.mtp_.*": GUESSES}, rules_of=relatives.ernie_rules,
        ),
        replace(
            _llama_like(
                "phi3", "Phi3ForCausalLM", phi3.phi3_fields, None, rules_of=phi3.phi3_rules
            ),
            shared=True,
        ),
        replace(
            _llama_like(
                "gpt_oss", "GptOssForCausalLM", gpt_oss.gpt_oss_fields, gpt_oss.gpt_oss_config,
                aliases=gpt_oss.ALIASES,
            ),
            rules=_gpt_oss_rules,
            stacked=_gpt_oss_rules,
            packed=lambda _, c: decoder_rules(c, partial(gpt_oss.expert_rules, packed=True)),
        ),
    )
}  # fmt: skip
