"""Every experts class and every block class of transformers alone, on our kernels and as `dMoE`.

    python packages/mb-layers/benchmarks/parts.py

`families.py` measures whole causal language models. Here no model is built, so that those with
images, audio or layers of many sizes are covered too: each class that transformers gives an
`experts_implementation` is built from its text config with small sizes, in fp32 on CPU, and
compared with transformers' own eager path; each class of block in
`mb_layers.transformers.block_routing` is compared with the `dMoE` that `moe_from_block` makes of
it, with one expert group and, where it has groups, with four. Differences are relative to the
largest value.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mb_layers.transformers as mb
import torch
import transformers
from families import OWN, SIZES, relative
from mb_layers.transformers.block_routing import BLOCKS
from mb_layers.transformers.experts import fused_activation, recognise_gate
from torch import Tensor, nn

# Sizes that a config has as lists, by modality, or in a check with others.
SIZES_ALONE: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
    },
    "diffusion_gemma": {"num_experts": 8, "moe_intermediate_size": 16},
    "ernie4_5_vl_moe": {"num_experts": 8, "moe_intermediate_size": 16, "use_bias": False},
    "gemma4": {"num_experts": 8, "moe_intermediate_size": 16},
    "glm5_next": {"num_local_experts": 8},
    "hy_v4_vl": {"rope_parameters": {"mrope_section": [2, 3, 3]}},
    "qwen3_omni_moe": {"shared_expert_intermediate_size": 32},
}


def classes(pattern: str) -> Iterator[tuple[str, str]]:
    """(model, class) of transformers' modelling files whose source matches."""
    root = Path(transformers.__file__).parent / "models"
    for file in sorted(root.glob("*/modeling_*.py")):
        for name in re.findall(pattern, file.read_text(), re.MULTILINE):
            yield file.parent.name, name


def text_config(model: str, **sizes: Any) -> Any:
    """The config of the model's text part, small; a namespace where the class refuses small."""
    module = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    own = [c for c in vars(module).values() if getattr(c, "__module__", "") == module.__name__]
    kinds = [c for c in own if isinstance(c, type) and hasattr(c, "model_type")]
    kinds.sort(key=lambda c: ("Text" not in c.__name__, "Vision" in c.__name__, c.__name__))
    kind = kinds[0]
    default = kind().to_dict()
    known = {n: s for n, s in SIZES.items() if isinstance(default.get(n), (int, float))}
    sizes = known | OWN.get(model, {}) | SIZES_ALONE.get(model, {}) | sizes
    try:
        return kind(**sizes)
    except Exception:  # checks of parts that are not built here
        return SimpleNamespace(**(default | sizes))


def results(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Output and gradients of one call."""
    y = module(*inputs)
    y = y[0] if isinstance(y, tuple) else y
    leaves = {n: p for n, p in module.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(
        y.square().sum(), leaves.values(), allow_unused=True, materialize_grads=True
    )
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def largest(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    errors = {name: relative(got[name], t, 1e-6) for name, t in expected.items()}
    return {"output": errors.pop("y"), "gradients": max(errors.values())}


def build(model: str, name: str, **sizes: Any) -> tuple[nn.Module, Any]:
    config = text_config(model, **sizes)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    files = Path(transformers.__file__).parent.glob(f"models/{model}/modeling_*.py")
    modules = (
        importlib.import_module(f"transformers.models.{model}.{file.stem}") for file in files
    )
    module = next(getattr(m, name) for m in modules if hasattr(m, name))(config).float()
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.3)
    return module, config


def width(experts: nn.Module) -> int:
    return experts.down_proj.shape[2 if experts.is_transposed else 1]


def experts_row(model: str, name: str) -> dict[str, Any]:
    module, config = build(model, name)
    x = torch.randn(11, width(module))
    ids = torch.rand(11, module.num_experts).argsort(dim=1)[:, :2]
    weights = torch.rand(11, 2)
    expected = results(module, x, ids, weights)
    config._experts_implementation = mb.IMPLEMENTATION
    recognise_gate(module)
    path = "steps" if fused_activation(module) is None else "fused"
    return largest(results(module, x, ids, weights), expected) | {"path": path}


def block_row(model: str, name: str, groups: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    if hasattr(text_config(model), "n_group"):
        sizes = {"n_group": groups, "topk_group": min(groups, 2)}
    if groups > 1 and hasattr(text_config(model), "topk_method"):
        sizes["topk_method"] = "group_limited_greedy"
    block, _ = build(model, name, **sizes)
    x = torch.randn(2, 11, width(block.experts))
    layer = mb.moe_from_block(block, load_balancing_loss_weight=0.0)
    got, expected = results(layer, x), results(block, x)
    buffers = dict(layer.named_buffers())
    back = mb.translate_layer(
        {n: t for n, t in got.items() if n != "y"} | buffers, layer.config, block.state_dict()
    )
    return largest(back | {"y": got["y"]}, expected) | {"groups": groups}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one of each, for the tests")
    smoke = parser.parse_args().smoke
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    experts = list(classes(r"@use_experts_implementation[^\n]*\nclass (\w+)\("))
    blocks = [(m, n) for m, n in classes(r"^class (\w+)\(") if n in BLOCKS]
    if smoke:
        experts = [pair for pair in experts if pair[0] == "gemma4"]
        blocks = [b for b in blocks if b[0] in ("mistral4", "mimo_v2_flash", "qwen3_vl_moe")]
    cases = [(experts_row, pair, {}) for pair in experts]
    for pair in blocks:
        each = (1, 4) if hasattr(text_config(pair[0]), "n_group") else (1,)
        cases += [(block_row, pair, {"groups": groups}) for groups in each]
    rows, failed = [], []
    print("| model | class | output | gradients | path or groups |\n|---|---|---|---|---|")
    for measure, (model, name), options in cases:
        try:
            row = measure(model, name, **options)
        except Exception as error:  # another library's classes: say which cannot be built, go on
            failed.append(f"{model} {name} {options}: {type(error).__name__} {str(error)[:90]}")
            continue
        rows.append({"model": model, "class": name} | row)
        *_, kind = row.values()
        errors = f"{row['output']:.1e} | {row['gradients']:.1e}"
        print(f"| {model} | {name} | {errors} | {kind} |", flush=True)
    print("\n".join(["", *(f"not built: {line}" for line in failed)]))
    print(json.dumps({"transformers": transformers.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
