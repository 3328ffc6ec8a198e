"""`mb-train convert` and `mb-train upcycle`: one folder with a model in it becomes another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mb_train.flags.command_line import parse
from mb_train.flags.parser import Parser, named, refuse_idle
from mb_train.machine.signals import interrupting

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def convert(parser: Parser, arguments: Sequence[str]) -> int:
    """Hugging Face or Megatron folders to a run folder, and back to Hugging Face.

    Of Hugging Face: GPT-2, Llama, Mistral, Qwen, OLMo, GLM, Granite, Mixtral, DeepSeek, GPT-OSS,
    Nemotron 3 and many relatives, BERT, MegatronBert and T5; of Megatron: GPTs of its MegaBlocks
    fork and of Megatron Core. docs/convert.md lists them all, and so does the error on any other.
    """
    parser.add_argument(
        "source", type=named, help="Hugging Face folder, Megatron checkpoint, or run folder"
    )
    parser.add_argument("target", type=named, help="folder to write, new or empty")
    parser.add_argument("--tokenizer", help="of the source, if it brings none: name or file")
    parser.add_argument("--dtype", choices=_DTYPES, help="of weights to export; default fp32")
    parser.add_argument(
        "--make-vocab-size-divisible-by", type=int, metavar="N", dest="divisible_by",
        help="rows of a vocabulary from Hugging Face come in a multiple of it; default as they are",
    )  # fmt: skip
    parser.add_argument(
        "--mtp-num-layers", type=int, metavar="N",
        help="take the first N of the modules for further tokens; default all, 0 leaves them out",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    source, target = Path(options.source), Path(options.target)
    import torch

    from mb_train.convert import export_model, import_megatron, import_model, is_megatron
    from mb_train.folder.run_folder import find_checkpoint

    tokenizer, divisible_by = options.tokenizer, options.divisible_by
    modules = options.mtp_num_layers
    if is_megatron(source):
        what, takes = "a Megatron checkpoint", ["--tokenizer"]
        write = partial(import_megatron, tokenizer=tokenizer, mtp_num_layers=modules)
    elif (source / "config.json").is_file():
        what, takes = "a Hugging Face folder", ["--tokenizer", "--make-vocab-size-divisible-by"]
        multiple = 1 if divisible_by is None else divisible_by
        write = partial(
            import_model, tokenizer=tokenizer, divisible_by=multiple, mtp_num_layers=modules
        )
    elif source.is_dir() and find_checkpoint(source) is not None:
        what, takes = "a run folder", ["--dtype"]
        dtype = getattr(torch, _DTYPES[options.dtype or "fp32"])
        write = partial(export_model, dtype=dtype, mtp_num_layers=modules)
    else:
        raise ValueError(
            "Expected a Hugging Face folder, a Megatron checkpoint or a run folder with a "
            f"checkpoint, got {source}."
        )
    given = {"--tokenizer": tokenizer, "--make-vocab-size-divisible-by": divisible_by}
    refuse_idle({**given, "--dtype": options.dtype}, takes, f": {source} is {what}")
    with interrupting():
        write(source, target)
    return 0


def upcycle(parser: Parser, arguments: Sequence[str]) -> int:
    """A dense model with its feed-forwards copied into experts, as a run folder.

    Takes the flags of experts beside its own: --moe-num-experts 8 --moe-top-k 2.
    """
    parser.add_argument(
        "source", type=named, help="run folder of a dense model, or an iteration folder"
    )
    parser.add_argument("target", type=named, help="folder to write, new or empty")
    command = parse(arguments, own=parser)
    from mb_train.convert.upcycle import upcycle

    with interrupting():
        upcycle(Path(command.own.source), Path(command.own.target), command)
    return 0
