"""Commands beside training: each takes its parser and its words, and returns an exit code.

torch is imported only by those that need it, once their arguments make sense.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mb_train.finetune import finetune
from mb_train.flags.command_line import Command, Parser, add_run, parse
from mb_train.retrieval.commands import index, retrieve

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def doctor(parser: Parser, arguments: Sequence[str]) -> int:
    """What is this machine, and what is wrong with it?"""
    parser.add_argument("--save", default="runs", help="folder that runs would be written to")
    options = parser.parse_args(arguments)
    from mb_train.machine.doctor import diagnose

    facts, problems = diagnose(Path(options.save))
    print("\n".join(facts))
    for problem in problems:
        print(f"problem: {problem}")
    print(f"problems found: {len(problems)}" if problems else "no problem found")
    return 1 if problems else 0


def report(parser: Parser, arguments: Sequence[str]) -> int:
    """Draw the curves of one run or several."""
    parser.add_argument("run", nargs="+", help="run folder; several are drawn side by side")
    parser.add_argument("--output", help="folder for picture and page; default the run's")
    parser.add_argument(
        "--frontier", action="store_true",
        help="loss against training time of finished runs, a curve for each family; "
        "picture and numbers go to --output, default the current folder",
    )  # fmt: skip
    options = parser.parse_intermixed_args(arguments)
    if find_spec("matplotlib") is None:
        raise ValueError(
            "Expected the matplotlib package to draw with, found none. Install it with "
            "pip install matplotlib."
        )
    runs = [Path(run) for run in options.run]
    output = None if options.output is None else Path(options.output)
    if options.frontier:
        from mb_train.report.frontier_picture import report_frontier

        text, picture, numbers = report_frontier(runs, output or Path())
        print(f"{text}\npicture: {picture}\nnumbers: {numbers}")
        return 0
    from mb_train.report.pictures import report

    text, picture, page = report(runs, output)
    print(f"{text}\npicture: {picture}\npage: {page}")
    return 0


def plan(parser: Parser, arguments: Sequence[str]) -> int:
    """What a run will need: parameters, memory per GPU, FLOPs, time of a step.

    Takes the flags of a run beside its own.
    """
    parser.add_argument("--gpus", type=int, help="ranks; default as many GPUs as there are, or 1")
    parser.add_argument("--gpu", help="name of the GPU (H200, MI300X, ...); default the one here")
    command = parse(arguments, own=parser)
    options = command.own
    from mb_train.starting import plan

    planned = plan(command)
    config, start = planned.config, planned.start
    if command.print_config:
        from mb_train.tasks.architecture import checked_toml

        print(checked_toml(config), end="")
        return 0
    import torch

    from mb_train.data.tokenizers import copies_for, load_tokenizer, saved_rows, vocabulary_rows
    from mb_train.plan.sizing import describe, sizes

    there = torch.cuda.device_count()
    ranks = (there or 1) if options.gpus is None else options.gpus
    if ranks < 1:
        raise ValueError(f"Expected --gpus of at least 1, got {ranks}.")
    here = torch.cuda.get_device_name(0) if there and config.device != "cpu" else "CPU"
    device = options.gpu or here
    vocab_size = vocabulary_rows(
        config,
        load_tokenizer(config, copies_for(config, start)).vocab_size,
        ranks=config.tensor_model_parallel_size,
        saved=saved_rows(config, start),
    )
    found = sizes(config, vocab_size, ranks, device)
    print("\n".join(describe(config, found, ranks=ranks, device=device)))
    return 0


def convert(parser: Parser, arguments: Sequence[str]) -> int:
    """Hugging Face or Megatron folders to a run folder, and back to Hugging Face.

    Of Hugging Face: GPT-2, Llama, Mistral, Qwen2, Qwen3, Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE,
    BERT, MegatronBert and T5; of Megatron: GPTs of its MegaBlocks fork and of Megatron Core.
    """
    parser.add_argument("source", help="Hugging Face folder, Megatron checkpoint, or run folder")
    parser.add_argument("target", help="folder to write, new or empty")
    parser.add_argument("--tokenizer", help="of the source, if it brings none: name or file")
    parser.add_argument("--dtype", choices=_DTYPES, help="of weights to export; default fp32")
    parser.add_argument(
        "--make-vocab-size-divisible-by", type=int, metavar="N", dest="divisible_by",
        help="rows of a vocabulary from Hugging Face come in a multiple of it; default as they are",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    source, target = Path(options.source), Path(options.target)
    import torch

    from mb_train.convert import export_model, import_megatron, import_model, is_megatron
    from mb_train.folder.run_folder import find_checkpoint

    tokenizer, divisible_by = options.tokenizer, options.divisible_by
    if is_megatron(source):
        what, takes = "a Megatron checkpoint", ["--tokenizer"]
        write = partial(import_megatron, tokenizer=tokenizer)
    elif (source / "config.json").is_file():
        what, takes = "a Hugging Face folder", ["--tokenizer", "--make-vocab-size-divisible-by"]
        multiple = 1 if divisible_by is None else divisible_by
        write = partial(import_model, tokenizer=tokenizer, divisible_by=multiple)
    elif source.is_dir() and find_checkpoint(source) is not None:
        what, takes = "a run folder", ["--dtype"]
        write = partial(export_model, dtype=getattr(torch, _DTYPES[options.dtype or "fp32"]))
    else:
        raise ValueError(
            f"Expected a Hugging Face folder, a Megatron checkpoint or a run folder, got {source}."
        )
    given = {"--tokenizer": tokenizer, "--make-vocab-size-divisible-by": divisible_by}
    _refuse_idle({**given, "--dtype": options.dtype}, takes, f": {source} is {what}")
    write(source, target)
    return 0


def _refuse_idle(given: Mapping[str, Any], takes: Collection[str], where: str) -> None:
    """Raise ValueError for an argument that was given, not None, and is not among those taken."""
    for name, value in given.items():
        if value is not None and name not in takes:
            raise ValueError(f"Expected no {name}{where}, on which it has no effect.")


def generate(parser: Parser, arguments: Sequence[str]) -> int:
    """Text from a checkpoint."""
    add_run(parser)
    parser.add_argument(
        "--prompt", action="append", help="text to continue; several times for several texts"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default 64")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy; default 1")
    parser.add_argument("--top-k", type=int, default=0, help="choose among this many; 0 among all")
    parser.add_argument("--top-p", type=float, default=1.0, help="choose among this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the choice; default 0")
    options = parser.parse_args(arguments)
    from mb_train.inference.generate import Generator, Sampling

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    generator = Generator.of_run(Path(options.run), options.device)
    prompts, limit = options.prompt or [""], options.max_new_tokens
    if len(prompts) > 1:
        found = generator.complete(prompts, sampling, max_new_tokens=limit)
        for prompt, completion in zip(prompts, found, strict=True):
            print(f"{prompt}{completion.text}\n")
        return 0
    steps = generator.stream(prompts, sampling, max_new_tokens=limit)
    print(prompts[0], end="", flush=True)
    said = 0
    for (completion,) in steps:
        print(completion.text[said:], end="", flush=True)
        said = len(completion.text)
    print()
    return 0


def evaluate(parser: Parser, arguments: Sequence[str]) -> int:
    """Zero-shot tasks on a file."""
    add_run(parser)
    parser.add_argument("file", nargs="?", help="what to evaluate on; lm_eval's tasks need none")
    parser.add_argument(
        "--task", default="perplexity",
        help="lambada, wikitext, perplexity (default), or lm_eval:NAME,NAME if that is installed",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true", help="lambada: the whole last word, not the last token"
    )
    parser.add_argument(
        "--stride", type=int,
        help="wikitext, perplexity: tokens that the window moves by; default 32",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=8, help="windows at a time; default 8")
    parser.add_argument("--include", type=Path, help="lm_eval: folder of further tasks")
    options = parser.parse_intermixed_args(arguments)
    import json

    from mb_train.inference.evaluation import EvalOptions, task_of
    from mb_train.inference.harness import tasks_of
    from mb_train.loading import load_trained

    stride = EvalOptions.stride if options.stride is None else options.stride
    how = EvalOptions(strict=options.strict, stride=stride, batch_size=options.batch_size)
    if options.task.startswith("lm_eval:"):
        takes = ["--include"]
        names = options.task.removeprefix("lm_eval:").split(",")
        measure = partial(tasks_of(names, include=options.include), batch_size=how.batch_size)
    else:
        task = task_of(options.task)
        takes = ["file", "--strict" if options.task == "lambada" else "--stride"]
        if options.file is None:
            raise ValueError(
                f"Expected a file to evaluate on with --task {options.task}, got none."
            )
        path = Path(options.file)
        if not path.is_fifo():  # which can be read once
            path.open("rb").close()  # before a model is loaded for it
        measure = partial(task, path=path, options=how)
    given = {"file": options.file, "--stride": options.stride, "--include": options.include}
    given["--strict"] = options.strict or None
    _refuse_idle(given, takes, f" with --task {options.task}")
    trained = load_trained(Path(options.run), options.device)
    found = measure(trained)
    print(f"{options.task} at iteration {trained.saved.iteration} of {options.run}")
    for name, value in found.items():
        print(f"  {name}: {value:.6g}" if isinstance(value, float) else f"  {name}: {value}")
    print(json.dumps({"task": options.task, "iteration": trained.saved.iteration, **found}))
    return 0


def serve(parser: Parser, arguments: Sequence[str]) -> int:
    """A model behind OpenAI's completions interface."""
    add_run(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1, this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="default 8000")
    options = parser.parse_args(arguments)
    from mb_train.inference.generate import Generator

    try:
        from mb_train.inference.serve import serve
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"Expected starlette and uvicorn to serve with, found no {missing.name}. Install them "
            "with pip install 'mb-train[serve]'."
        ) from None
    run = Path(options.run)
    generator = Generator.of_run(run, options.device)
    serve(generator, run.resolve().name, host=options.host, port=options.port)
    return 0


def upcycle(parser: Parser, arguments: Sequence[str]) -> int:
    """A dense model with its feed-forwards copied into experts, as a run folder.

    Takes the flags of experts beside its own: --moe-num-experts 8 --moe-top-k 2.
    """
    parser.add_argument("source", help="run folder of a dense model, or an iteration folder")
    parser.add_argument("target", help="folder to write, new or empty")
    command = parse(arguments, own=parser)
    from mb_train.convert.upcycle import upcycle

    upcycle(Path(command.own.source), Path(command.own.target), command)
    return 0


COMMANDS: dict[str, Command] = {
    "doctor": doctor,
    "plan": plan,
    "report": report,
    "generate": generate,
    "eval": evaluate,
    "serve": serve,
    "convert": convert,
    "upcycle": upcycle,
    "finetune": finetune,
    "index": index,
    "retrieve": retrieve,
}
