"""The text inside of models that also see images: its settings, and its tensors by their own names.

A config.json has its settings under `text_config`, files have its tensors under `language_model`.
Of a model that also hears and speaks (Qwen3-Omni) both are those of the part that thinks. What sees
the images, hears or speaks is left out, and a line says so: what is read, trained and written is a
model of texts. Texts without images have one position each, whatever directions an image has beside
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mb_train.convert.hugging_face.architecture import Architecture
from mb_train.convert.hugging_face.config_json import Json

_TEXT = "text_config"
_THINKER = {"qwen3_omni_moe": "thinker_config"}
# What each is a model of if its file does not say so, and whether its head is tied then.
INSIDE = {
    "glm4v_moe": ("glm4v_moe_text", False), "kimi_k25": ("deepseek_v3", True),
    "lfm2_vl": ("lfm2", True), "llama4": ("llama4_text", False),
    "minimax_m3_vl": ("minimax_m3_vl_text", False), "mistral3": ("mistral", True),
    "qwen3_5_moe": ("qwen3_5_moe_text", False),
    "qwen3_omni_moe": ("qwen3_omni_moe_text", False), "qwen3_vl_moe": ("qwen3_vl_moe_text", False),
}  # fmt: skip
_NAMES = {
    r"^thinker\.(model|lm_head)\.": r"\1.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
    r"^model\.lm_head\.": "lm_head.",
    r"^model\.blocks\.": "model.layers.",  # as transformers 5.23 writes Kimi's
}
_EYES = (
    r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|mm_projector|"
    r"patch_merge_mlp)\..*"
)
_VOICE = r"(model\.)?(thinker\.(visual|audio_tower)|talker|code2wav)\..*"


def text_settings(config: Json) -> Json:
    """Of a config.json: the text's, where it is inside of another model; else what is given.

    Raises:
        ValueError: they are no settings.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in INSIDE:
        return config
    part = config.get(_THINKER[kind]) if kind in _THINKER else config
    text = part.get(_TEXT) if isinstance(part, Mapping) else None
    if part is None or not isinstance(text, dict):
        raise ValueError(
            f"Expected {_TEXT} of config.json, settings of the text inside of {kind}, got {text!r}."
        )
    model_type, tied = INSIDE[kind]
    # Said of the whole model, and of no part of it.
    whole = {
        "tie_word_embeddings": part.get("tie_word_embeddings", tied),
        "quantization_config": config.get("quantization_config", text.get("quantization_config")),
    }
    return {"model_type": model_type, **text, **whole}


def with_text_inside(found: Architecture) -> Architecture:
    """The same whose tensors are those of the text, beside others."""
    return replace(
        found,
        renamed={**_NAMES, **found.renamed},
        beside={
            **found.beside,
            _EYES: "it sees images, ours read texts alone",
            _VOICE: "it sees, hears or speaks, ours read texts alone",
        },
    )
