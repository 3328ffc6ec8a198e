"""FP8 with a scale for each block, as DeepSeek-V3 and others are published."""

import json

import pytest
import torch
from mb_train.convert import export_model, import_model, read_model
from mb_train.convert.hugging_face.quantized import FP8, SCALES, dequantized
from mb_train.convert.hugging_face.safetensors_files import TensorFolder, write_tensors
from mb_train.loading import load_trained
from their_models import logits_of, ours, theirs, transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

safetensors_torch = pytest.importorskip("safetensors.torch")

BLOCK = (20, 16)  # which divides hardly a matrix of these models
WAY = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK), "scale_fmt": "ue8m0",  # what DeepSeek-V3.1's scales are
}  # fmt: skip


def quantized(weight, block, dtype=torch.float32):
    """Numbers and scales, the largest of each block as large as e4m3 has them."""
    rows, columns = (-(-n // size) for n, size in zip(weight.shape, block, strict=True))
    numbers, scales = torch.empty_like(weight, dtype=FP8), torch.empty(rows, columns, dtype=dtype)
    for i in range(rows):
        for j in range(columns):
            tile = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[tile].abs().max() / 448
            numbers[tile] = (weight[tile] / scales[i, j].float()).to(FP8)
    return numbers, scales


def one_by_one(numbers, scales, block):
    found = torch.empty(numbers.shape)
    for i in range(numbers.shape[0]):
        for j in range(numbers.shape[1]):
            found[i, j] = numbers[i, j].float() * scales[i // block[0], j // block[1]].float()
    return found


def published(folder, kind, block=BLOCK, dtype=torch.float32, **also):
    """A model in FP8, and the same as it is meant, in fp32."""
    model = theirs(kind, **also)
    model.save_pretrained(folder)
    tensors = dict(TensorFolder(folder))
    exact = {}
    for name in [n for n in tensors if n.endswith(("_proj.weight", ".w1.weight", ".w2.weight"))]:
        numbers, scales = quantized(tensors[name], block, dtype)
        tensors |= {name: numbers, name + SCALES: scales}
        exact[name] = one_by_one(numbers, scales, block)
    about = json.loads((folder / "config.json").read_text())
    plain = folder.parent / "plain"
    model.config.save_pretrained(plain)
    write_tensors(plain, {n: exact.get(n, t) for n, t in tensors.items() if SCALES not in n})
    (folder / "model.safetensors").unlink()
    write_tensors(folder, tensors, shard_bytes=20_000)  # scales in other files than their numbers
    way = WAY | {"weight_block_size": list(block)}
    (folder / "config.json").write_text(json.dumps(about | {"quantization_config": way}))
    return type(model).from_pretrained(plain, dtype=torch.float32).eval()


@pytest.mark.parametrize("shape", [(1, 1), (20, 16), (20, 17), (41, 15), (64, 48), (7, 100)])
def test_every_number_has_the_scale_of_its_block(shape):
    generator = torch.Generator().manual_seed(0)
    numbers, scales = quantized(torch.randn(shape, generator=generator), BLOCK)
    found = dequantized(numbers, scales, BLOCK)
    assert found.dtype == torch.float32
    assert torch.equal(found, one_by_one(numbers, scales, BLOCK))
    stacks = [t.repeat(3, *(1,) * t.ndim) for t in (numbers.view(torch.uint8), scales)]
    stacks[1][2] *= 2
    stack = dequantized(stacks[0].view(FP8), stacks[1], BLOCK)
    assert torch.equal(stack, torch.stack([found, found, 2 * found]))


def test_whole_blocks_are_as_transformers_has_them():
    """Which has no blocks that are cut off."""
    every_byte = torch.arange(256, dtype=torch.uint8).repeat(2, 256).view(FP8)
    scales = torch.rand(1, 4, generator=torch.Generator().manual_seed(0))
    parts = {"weight": every_byte[:, :512].repeat(64, 1), "weight_scale_inv": scales}
    (want,) = Fp8Dequantize(None).convert(parts).values()
    found = dequantized(*parts.values(), (128, 128))
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    assert found.isnan().sum() == 128 * 4  # two bytes of e4m3 are none


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("kind", "also"),
    [
        ("deepseek_v3", {"n_group": 4, "topk_group": 2}),
        ("qwen3_moe", {}),
        ("qwen3", {}),
        ("minimax_m2", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_files_are_read(tmp_path, kind, also, dtype):
    model = published(tmp_path / "hf", kind, dtype=dtype, **also)
    torch.testing.assert_close(
        logits_of(ours(tmp_path / "hf")), logits_of(model), rtol=1e-4, atol=1e-5
    )
    import_model(tmp_path / "hf", tmp_path / "run", tokenizer="null:76", say=lambda line: None)
    export_model(tmp_path / "run", tmp_path / "back", say=lambda line: None)
    first, second = TensorFolder(tmp_path / "plain"), TensorFolder(tmp_path / "back")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    assert logits_of(load_trained(tmp_path / "run").model).isfinite().all()


def test_transformers_reads_the_same(tmp_path):
    """Its own way with such files, of blocks that divide the matrices."""
    pytest.importorskip("accelerate")
    published(tmp_path / "hf", "qwen3", block=(16, 16))
    way = transformers.FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, quantization_config=way
    ).eval()
    found = logits_of(ours(tmp_path / "hf"))
    torch.testing.assert_close(found, logits_of(model), rtol=1e-4, atol=1e-5)


def raw(folder):
    """The tensors of a folder as they lie there; its files are gone."""
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= safetensors_torch.load_file(shard)
        shard.unlink()
    return tensors


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({NAME + SCALES: None}, rf"Expected {NAME}{SCALES} beside {NAME} in .*, found none"),
        ({NAME: None}, f"missing from the source: {NAME}"),
        ({NAME: torch.ones(32, 48)}, rf"{NAME} in .* beside its scales .* got .* torch.float32"),
        ({NAME + SCALES: torch.ones(3, 2)}, r"to be \[2, 3\], one for 20 x 16 of its \[32, 48\]"),
        ({NAME + SCALES: torch.ones(1)}, r"to be \[2, 3\], .* got \[1\]"),
        (
            {NAME + SCALES: torch.ones(2, 3, dtype=torch.float8_e8m0fnu)},
            rf"{NAME}{SCALES} in .* to be in fp32, .* got torch.float8_e8m0fnu",
        ),
        ({f"model.norm.weight{SCALES}": torch.ones(1)}, r"norm\.weight in .* beside its scales"),
        ({f"model.wings{SCALES}": torch.ones(1)}, f"nothing uses: model.wings{SCALES}"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_every_number_and_every_scale_is_used_once(tmp_path, change, says):
    published(tmp_path / "hf", "qwen3")
    tensors = raw(tmp_path / "hf") | change
    write_tensors(tmp_path / "hf", {n: t for n, t in tensors.items() if t is not None})
    with pytest.raises(ValueError, match=says):
        read_model(tmp_path / "hf")


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quant_method": "compressed-tensors"}, "or fp8 with blocks, got compressed-tensors"),
        ({"quant_method": "gptq"}, "got gptq"),
        ({"weight_block_size": None}, "weight_block_size of .* got None"),
        ({"weight_block_size": [128]}, "weight_block_size of .* got .128"),
        ({"weight_block_size": [0, 16]}, "weight_block_size of .* got .0, 16"),
        ({"activation_scheme": "static"}, "activation_scheme of"),
        ({"fmt": "e5m2"}, "fmt of"),
        ({"expert_dtype": "fp4"}, "expert_dtype of"),
    ],
    ids=str,
)
def test_other_ways_are_refused_by_name(tmp_path, change, says):
    published(tmp_path / "hf", "qwen3")
    about = json.loads((tmp_path / "hf/config.json").read_text())
    about["quantization_config"] |= change
    (tmp_path / "hf/config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=says):
        read_model(tmp_path / "hf")
