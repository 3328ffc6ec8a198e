"""Texts inside of models that also see images: read without these, with theirs logits of a text."""

import json
import re
from pathlib import Path

import pytest
import torch
from mb_train.convert import export_model, import_model, read_model
from mb_train.convert.hugging_face import text_inside
from mb_train.convert.hugging_face.safetensors_files import TensorFolder, write_tensors
from mb_train.loading import load_trained
from their_models import (
    DEEPSEEK,
    EXPERTS,
    LATENT,
    LFM2,
    LLAMA4,
    MINIMAX_M3,
    MISTRAL4,
    QWEN_NEXT,
    SIZES,
    logits_of,
    transformers,
)

EYES = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 4,
    "temporal_patch_size": 1,
}  # fmt: skip
KIMIS = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
# Settings of the text, of what sees, and what the text is written as.
INSIDE = {
    "qwen3_vl_moe": (
        {**EXPERTS, "moe_intermediate_size": 16, "head_dim": 16, "rope_parameters": ROPE},
        EYES,
        "qwen3_moe",
    ),
    "qwen3_5_moe": (QWEN_NEXT, EYES, "qwen3_next"),
    "glm4v_moe": (
        {
            **DEEPSEEK,
            "head_dim": 32,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        EYES,
        "glm4_moe",
    ),
    "kimi_k25": (
        {**DEEPSEEK, **LATENT, "n_group": 4, "model_type": "deepseek_v3"},
        KIMIS,
        "deepseek_v3",
    ),
    "minimax_m3_vl": (
        {**MINIMAX_M3, "layer_types": ["full_attention"] * 3},
        {**KIMIS, "spatial_merge_size": 2, "temporal_patch_size": 1},
        "minimax_m3_vl_text",
    ),
    "llama4": (
        {**LLAMA4, "attention_chunk_size": 24, "attn_temperature_tuning": False},
        {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "patch_size": 4,
            "image_size": 8,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "pixel_shuffle_ratio": 0.5,
        },
        "llama4_text",
    ),
    "lfm2_vl": (
        {**LFM2, "model_type": "lfm2", "block_multiple_of": 8},
        {**KIMIS, "model_type": "siglip2_vision_model", "num_patches": 4},
        "lfm2",
    ),
    "mistral3": (
        {**DEEPSEEK, **LATENT, "model_type": "mistral4", "rope_parameters": MISTRAL4},
        {**KIMIS, "model_type": "pixtral", "image_size": 16, "head_dim": 8},
        "mistral4",
    ),
}


def seeing(kind):
    """A random model, no norm or bias of it one or zero."""
    text, eyes, _ = INSIDE[kind]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](
        text_config={"initializer_range": 0.2, **SIZES, **text},
        vision_config=eyes,
        tie_word_embeddings=False,
        **({"projection_hidden_size": 16} if kind == "kimi_k25" else {}),
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim == 1 and tensor.is_floating_point():
                tensor.add_(0.3 * torch.randn_like(tensor))
    return model


def test_the_page_names_them():
    page = (Path(__file__).parents[1] / "docs" / "convert.md").read_text("utf-8")
    (line,) = re.findall(r"Of a model that also sees images .*? the part that thinks", page, re.S)
    assert set(re.findall(r"`(\w+)`", line)) == set(text_inside.INSIDE)


@pytest.mark.parametrize("kind", INSIDE)
def test_a_text_inside_is_theirs(tmp_path, kind):
    model, said = seeing(kind), []
    model.save_pretrained(tmp_path / "hf")
    if kind == "qwen3_vl_moe":  # as it is published: by rows of what goes in
        tensors = dict(TensorFolder(tmp_path / "hf"))
        turned = {n: t.mT.contiguous() for n, t in tensors.items() if ".experts." in n}
        write_tensors(tmp_path / "hf", tensors | turned)
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=said.append)
    assert [line for line in said if "sees images" in line] == said[:1]
    # The class around Llama 4 raises an AttributeError on any call in transformers 5.24.
    want = logits_of(model.language_model if kind == "llama4" else model)
    torch.testing.assert_close(
        logits_of(load_trained(tmp_path / "run").model), want, rtol=1e-4, atol=2e-5
    )
    export_model(tmp_path / "run", tmp_path / "back", say=said.append)
    known = transformers.AutoModelForCausalLM
    if kind == "mistral3":  # Mistral 4's class is not among those that the general one knows
        known = transformers.Mistral4ForCausalLM
    back = known.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert back.config.model_type == INSIDE[kind][2]
    torch.testing.assert_close(logits_of(back), want, rtol=1e-4, atol=2e-5)


def test_a_text_inside_of_what_thinks_is_theirs(tmp_path):
    """Qwen3-Omni, whose other parts hear and speak."""
    torch.manual_seed(0)
    text = {
        **SIZES,
        **EXPERTS,
        "moe_intermediate_size": 16,
        "head_dim": 16,
        "rope_parameters": ROPE,
    }
    config = transformers.CONFIG_MAPPING["qwen3_omni_moe_thinker"](
        text_config={"initializer_range": 0.2, **text},
        vision_config=EYES,
        audio_config={"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2,
                      "encoder_ffn_dim": 16, "output_dim": 48, "downsample_hidden_size": 8},
    )  # fmt: skip
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    model.save_pretrained(tmp_path / "hf")
    tensors = {f"thinker.{n}": t for n, t in TensorFolder(tmp_path / "hf").items()}
    write_tensors(
        tmp_path / "hf", tensors | {"talker.a": torch.ones(2), "code2wav.b": torch.ones(2)}
    )
    about = {"model_type": "qwen3_omni_moe", "thinker_config": config.to_dict()}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(about))
    said = []
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=said.append)
    assert "it sees, hears or speaks" in said[0]
    want = logits_of(model)
    torch.testing.assert_close(
        logits_of(load_trained(tmp_path / "run").model), want, rtol=1e-4, atol=2e-5
    )
    export_model(tmp_path / "run", tmp_path / "back", say=said.append)
    known = transformers.AutoModelForCausalLM
    back = known.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert back.config.model_type == "qwen3_moe"
    torch.testing.assert_close(logits_of(back), want, rtol=1e-4, atol=2e-5)
    for wrong, why in (
        ({"quantization_config": {"quant_method": "awq"}}, "got awq"),
        ({"thinker_config": None}, "settings of the text inside of qwen3_omni_moe, got None"),
    ):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(about | wrong))
        with pytest.raises(ValueError, match=why):
            read_model(tmp_path / "hf")


def test_what_is_said_of_the_whole_is_said_of_its_text(tmp_path):
    model = seeing("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert not about["tie_word_embeddings"]
    config, _ = read_model(tmp_path)
    assert config.untie_embeddings_and_output_weights
    for wrong, why in (
        ({"quantization_config": {"quant_method": "awq"}}, "got awq"),
        ({"text_config": None}, "settings of the text inside of qwen3_vl_moe, got None"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(about | wrong))
        with pytest.raises(ValueError, match=why):
            read_model(tmp_path)


def test_tensors_of_no_known_part_are_refused(tmp_path):
    seeing("mistral3").save_pretrained(tmp_path)
    write_tensors(tmp_path, {**TensorFolder(tmp_path), "audio_tower.weight": torch.ones(2)})
    with pytest.raises(ValueError, match=r"nothing uses: model\.audio_tower\.weight"):
        read_model(tmp_path)
