"""How long a token takes that a model writes: replayed from a CUDA graph, and launched as it is.

    python packages/mb-train/benchmarks/generate.py [--cases dmoe-46m:1 dmoe-46m:8 olmoe-1b-7b:1]

A case is a recipe and a number of prompts. Models have random weights; each prompt is of five
tokens, and 200 more are drawn by top-k sampling. Prints the median time between two tokens of each
prompt, then one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from unittest import mock

import torch
from mb_train.config import TrainConfig
from mb_train.config.recipes import RECIPES, recipe
from mb_train.inference import going_on
from mb_train.inference.decoding import Sampling, continue_tokens
from mb_train.loading import hold_as_used
from mb_train.models.gpt import GPT
from mb_train.tasks.make import whole_model

VOCABULARY, PADDED, TOKENS = 50257, 50304, 200


def model_of(name: str, device: str) -> GPT:
    """The recipe's model as `mb-train generate` holds it."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = whole_model(TrainConfig(**recipe(name)), vocab_size=PADDED, compute_dtype=dtype)
    hold_as_used(model, dtype)
    return model.eval()


def milliseconds(model: GPT, prompts: int) -> float:
    """Median time of a token, of the second half."""
    steps = continue_tokens(
        model, [[1, 2, 3, 4, 5]] * prompts, Sampling(top_k=20),
        vocab_size=VOCABULARY, context=1024, seeds=range(prompts),
    )  # fmt: skip
    ends = []
    for _, _ in zip(range(TOKENS), steps, strict=False):
        ends.append(time.perf_counter())
    gaps = [b - a for a, b in itertools.pairwise(ends)]
    return 1e3 * statistics.median(gaps[len(gaps) // 2 :])


def case_of(parser: argparse.ArgumentParser, case: str) -> tuple[str, str, int]:
    """The case, its recipe and its prompts; end the program if it is none."""
    name, _, prompts = case.partition(":")
    if name not in RECIPES or not prompts.isdecimal() or not int(prompts):
        parser.error(f"Expected RECIPE:PROMPTS with a recipe of mb-train, got {case!r}.")
    model = TrainConfig(**recipe(name)).model
    if model != "gpt":
        parser.error(f"Expected the recipe of a GPT, which writes texts, got {name}, a {model}.")
    return case, name, int(prompts)


def main() -> None:
    """Measure the cases and print them."""
    parser = argparse.ArgumentParser()
    default = ["dmoe-46m:1", "dmoe-46m:8", "olmoe-1b-7b:1", "olmoe-1b-7b:8"]
    parser.add_argument("--cases", nargs="+", default=default, help="RECIPE:PROMPTS")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [case_of(parser, case) for case in options.cases]
    rows = []
    print(f"{'ms a token':24}{'replayed':>10}{'launched':>10}", flush=True)
    for case, name, prompts in cases:
        model = model_of(name, device)
        milliseconds(model, prompts)  # kernels are built
        replayed = milliseconds(model, prompts)
        with mock.patch.object(going_on, "can_be_captured", return_value=False):
            launched = milliseconds(model, prompts)
        rows.append({"case": case, "replayed": replayed, "launched": launched})
        print(f"{case:24}{replayed:10.2f}{launched:10.2f}", flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
