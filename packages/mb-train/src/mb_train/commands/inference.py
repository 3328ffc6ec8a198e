"""`mb-train generate`, `eval` and `serve`: what a trained model of texts is asked to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mb_train.flags.parser import Parser, add_run, named, refuse_idle
from mb_train.untrusted import printable
from mb_train.words import missing_package, spelled


def generate(parser: Parser, arguments: Sequence[str]) -> int:
    """Text from a checkpoint."""
    parser.of_a_word = "A text to continue stands behind --prompt."
    add_run(parser)
    parser.add_argument(
        "--prompt", action="append", help="text to continue; several times for several texts"
    )
    parser.add_argument(
        "--chat", action="store_true",
        help="each prompt is what a user says, put into the model's chat template",
    )  # fmt: skip
    parser.add_argument("--system", help="what a system message says first, with --chat")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default 64")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy; default 1")
    parser.add_argument("--top-k", type=int, default=0, help="choose among this many; 0 among all")
    parser.add_argument(
        "--top-p", type=float, default=1.0,
        help="choose among the likeliest with this much probability; default 1, all",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the choice; default 0")
    options = parser.parse_args(arguments)
    from mb_train.inference.decoding import Sampling
    from mb_train.inference.generate import Generator, Prompt

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    if options.system is not None and not options.chat:
        raise ValueError("Expected --chat with --system, got none.")
    if options.chat and not options.prompt:
        raise ValueError("Expected a --prompt with --chat, got none.")
    generator = Generator.of_run(Path(options.run), options.device)
    said, limit = options.prompt or [""], options.max_new_tokens
    prompts: list[Prompt] = [*said]
    if options.chat:
        first = [] if options.system is None else [{"role": "system", "content": options.system}]
        prompts = [generator.asked([*first, {"role": "user", "content": text}]) for text in said]
        said = [""] * len(prompts)  # answers are shown alone
    # A model may have learnt to write what a terminal obeys; a file gets what it wrote.
    shown = printable if sys.stdout.isatty() else str
    if len(prompts) > 1:
        found = generator.complete(prompts, sampling, max_new_tokens=limit)
        for text, completion in zip(said, found, strict=True):
            print(f"{shown(f'{text}{completion.text}')}\n")
        return 0
    steps = generator.stream(prompts, sampling, max_new_tokens=limit)
    print(shown(said[0]), end="", flush=True)
    written = 0
    for (completion,) in steps:
        print(shown(completion.text[written:]), end="", flush=True)
        written = len(completion.text)
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
    refuse_idle(given, takes, f" with --task {options.task}")
    trained = load_trained(Path(options.run), options.device, held_as_used=True)
    found = measure(trained)
    print(f"{options.task} at iteration {trained.saved.iteration} of {options.run}")
    for name, value in found.items():
        print(f"  {name}: {value:.6g}" if isinstance(value, float) else f"  {name}: {value}")
    print(json.dumps({"task": options.task, "iteration": trained.saved.iteration, **found}))
    return 0


def serve(parser: Parser, arguments: Sequence[str]) -> int:
    """A model behind OpenAI's completions interface."""
    add_run(parser)
    parser.add_argument(
        "--host", type=named, default="127.0.0.1", help="default 127.0.0.1, this machine alone"
    )
    parser.add_argument("--port", type=int, default=8000, help="default 8000")
    parser.add_argument(
        "--served-model-name", type=named, metavar="NAME",
        help="by which clients ask for the model; default the folder's name",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    from mb_train.inference.generate import Generator

    try:
        from mb_train.inference.serve import serve
    except ModuleNotFoundError as missing:
        lacks = missing.name or "starlette"
        raise missing_package(lacks, "to serve with", "'mb-train[serve]'") from None
    run = Path(options.run)
    generator = Generator.of_run(run, options.device)
    name = spelled(options.served_model_name or run.resolve().name)  # which answers in JSON hold
    serve(generator, name, host=options.host, port=options.port)
    return 0
