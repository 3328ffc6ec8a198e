"""Quantized models: which of them are read, and FP8 with a scale for each block.

DeepSeek-V3 and its relatives, Qwen3 and MiniMax-M2 are published so (arXiv 2412.19437, section
3.3): a matrix in e4m3 beside another that holds a number for each tile of 128 x 128. At the lower
and the right end tiles may be cut off.

Letters: R rows, C columns; r, c tiles of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mb_train.convert.hugging_face.config_json import Json, refuse

SCALES = "_scale_inv"  # end of the name beside the matrix's
FP8 = torch.float8_e4m3fn
_SETTINGS = "quantization_config"
_BLOCK = "weight_block_size"


def check_quantization(config: Json, *, mxfp4: bool) -> None:
    """Raise ValueError for a way of quantizing that is not read.

    Args:
        mxfp4: these models are read if they are in MXFP4.
    """
    settings = _settings(config)
    kind = settings.get("quant_method")
    if not settings or (mxfp4 and kind == "mxfp4"):
        return
    if kind != "fp8":
        raise ValueError(
            f"Expected no {_SETTINGS} of config.json, or fp8 with blocks, got {kind}. Other "
            "quantized weights are not read, but GPT-OSS's in mxfp4: take the model that they were "
            "made of, or write it in bf16 with what its authors give for that."
        )
    refuse(settings, fmt=("e4m3", "float8_e4m3fn", None), activation_scheme=("dynamic", None),
           expert_dtype=("fp8", None))  # fmt: skip
    sizes = settings.get(_BLOCK)
    if not (isinstance(sizes, list) and len(sizes) == 2 and all(_is_size(n) for n in sizes)):
        raise ValueError(
            f"Expected {_BLOCK} of config.json's {_SETTINGS} to be the rows and the columns of a "
            f"block, got {sizes!r}: weights with one scale for a tensor or a row are not read."
        )


def block_of(config: Json) -> tuple[int, int] | None:
    """Rows and columns that share a scale of FP8, in a checked config.json; None without any."""
    settings = _settings(config)
    if settings.get("quant_method") != "fp8":
        return None
    rows, columns = settings[_BLOCK]
    return rows, columns


def _settings(config: Json) -> Json:
    found = config.get(_SETTINGS) or {}
    return found if isinstance(found, dict) else {"quant_method": found}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def check_scales(
    shape: Sequence[int],
    dtype: torch.dtype | str,
    of_scales: Sequence[int],
    block: tuple[int, int],
    what: str,
) -> None:
    """Raise ValueError unless a tensor, called `what`, and scales of these shapes fit together.

    Args:
        shape: of a matrix or a stack of them.
        dtype: of it.
        of_scales: their shape.
        block: its rows and columns.
    """
    if dtype != FP8 or len(shape) < 2:
        raise ValueError(
            f"Expected {what} beside its scales to be matrices in {FP8}, got {list(shape)} in "
            f"{dtype}."
        )
    *stack, R, C = shape
    rows, columns = block
    wanted = [*stack, -(-R // rows), -(-C // columns)]
    if list(of_scales) != wanted:
        raise ValueError(
            f"Expected the scales of {what} to be {wanted}, one for {rows} x {columns} of its "
            f"{list(shape)} numbers, got {list(of_scales)}."
        )


def dequantized(weight_RC: Tensor, scales_rc: Tensor, block: tuple[int, int]) -> Tensor:
    """The matrix, or a stack of them, in fp32: each number times the scale of its block.

    Args:
        weight_RC: e4m3.
        scales_rc: of blocks, any dtype of plain numbers, see `check_scales`.
        block: its rows and columns.
    """
    R, C = weight_RC.shape[-2:]
    rows, columns = block
    found_RC = weight_RC.float()
    tiles = scales_rc.float().reshape(-1, *scales_rc.shape[-2:])
    for matrix, of_matrix in zip(found_RC.view(-1, R, C), tiles, strict=True):
        for some, of_some in zip(matrix.split(rows), of_matrix, strict=True):  # for the memory
            some *= of_some.repeat_interleave(columns)[:C]
    return found_RC
