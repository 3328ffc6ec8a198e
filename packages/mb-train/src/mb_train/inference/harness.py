"""A trained run as a model of EleutherAI's lm-evaluation-harness, if that is installed.

    mb-train eval RUN --task lm_eval:hellaswag,arc_easy
    mb-train eval RUN --task lm_eval:mine --include folder/of/my/tasks

The harness knows hundreds of tasks and fetches their data by itself; what it asks of a model are
the three methods here. It brings some 40 packages, so it is no dependency: `pip install lm_eval`.
Tried with lm_eval 0.4.13 (2026-11-22): multiple choice, rolling perplexity, generation.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mb_train.data.tokenizers import beginning, preceding
from mb_train.inference.decoding import Sampling
from mb_train.inference.generate import Generator
from mb_train.inference.scoring import continuation, rolling, score
from mb_train.loading import Trained
from mb_train.words import missing_package

# Tasks know the length of a continuation by any of these, the first that is there counts.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_k", "top_p")


def harness_model(trained: Trained, *, batch_size: int = 8) -> Any:
    """An `lm_eval.api.model.LM` around a trained run.

    Raises:
        ValueError: lm_eval is not installed.
    """
    return _class()(trained, batch_size)


def tasks_of(
    names: Sequence[str], *, include: Path | None = None
) -> Callable[..., dict[str, float]]:
    """The harness's tasks of these names, which take a model and `batch_size` and return metrics.

    Args:
        names: of tasks and groups, or patterns of them, as "arc_*".
        include: folder of further tasks, one YAML file each.

    Raises:
        ValueError: lm_eval is not installed, or does not know a task.
    """
    _class()
    manager = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=None if include is None else str(include)
    )
    known = {name: manager.match_tasks([name]) for name in names}
    unknown = [name for name, tasks in known.items() if not tasks]
    if unknown:
        raise ValueError(
            f"Expected tasks that lm_eval knows, got {', '.join(unknown)}. See `lm_eval ls tasks`, "
            "or name the folder of your own with --include."
        )

    def measure(trained: Trained, *, batch_size: int) -> dict[str, float]:
        model = harness_model(trained, batch_size=batch_size)
        simple_evaluate = importlib.import_module("lm_eval").simple_evaluate
        tasks = [task for each in known.values() for task in each]
        found = simple_evaluate(model=model, tasks=tasks, task_manager=manager) or {}
        return {
            f"{task} {metric.removesuffix(',none')}": value
            for task, metrics in found.get("results", {}).items()
            for metric, value in metrics.items()
            if isinstance(value, (int, float))
        }

    return measure


def _class() -> type:
    try:
        base: Any = importlib.import_module("lm_eval.api.model").LM
    except ImportError:
        raise missing_package("lm_eval", "for this task", "lm_eval") from None

    class MBTrainLM(base):
        """Log-likelihoods and continuations by a GPT of this package."""

        def __init__(self, trained: Trained, batch_size: int) -> None:
            super().__init__()
            self._trained, self._batch_size = trained, batch_size
            self._tokenizer, self._context = trained.tokenizer, trained.config.positions

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            """Of each continuation after its context; whether greedy decoding gives it."""
            windows = []
            for request in requests:
                before, after = request.args
                # Spaces belong to the word that follows them, in byte-level vocabularies.
                stripped = before.rstrip()
                before, after = stripped, before[len(stripped) :] + after
                whole = self._tokenizer.encode(before + after)
                prefix = self._tokenizer.encode(before) if before else []
                tokens = whole[len(prefix) :] or self._tokenizer.encode(after)
                start = [*beginning(self._tokenizer), *prefix] or preceding(self._tokenizer)
                # Of what is longer than the context its end is scored, behind the token before.
                most = self._context
                windows.append(continuation([*start, *tokens[:-most]], tokens[-most:], most))
            scores = score(self._trained.model, windows, batch_size=self._batch_size)
            return [(found.log_prob, found.greedy) for found in scores]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            """Of each whole text, from the token that documents begin with or end with on."""
            totals = []
            for request in requests:
                text = self._tokenizer.encode(request.args[0])
                tokens = [*preceding(self._tokenizer), *text]
                windows = rolling(tokens, self._context, self._context)
                scores = score(self._trained.model, windows, batch_size=self._batch_size)
                totals.append(sum(found.log_prob for found in scores))
            return totals

        def generate_until(self, requests: list[Any]) -> list[str]:
            """A continuation of each context, until one of its stop words."""
            generator, texts = Generator(self._trained), []
            # A task with `repeats` asks the same several times, for answers that differ.
            asked: Counter[str] = Counter()
            for request in requests:
                before, options = request.args
                until = options.get("until") or []
                words = [until] if isinstance(until, str) else until
                (found,) = generator.complete(
                    [before], _sampling(options, seed=asked[before]),
                    max_new_tokens=next((int(options[n]) for n in _LENGTHS if n in options), 256),
                    stop=[word for word in words if word],  # an empty one ends no text there
                )  # fmt: skip
                asked[before] += 1
                texts.append(found.text)
            return texts

    return MBTrainLM


def _sampling(options: Mapping[str, Any], *, seed: int) -> Sampling:
    """How a task's generation_kwargs choose; greedily, unless they have a temperature above 0.

    Raises:
        ValueError: they have something that there is not here.
    """
    known = ("until", "do_sample", *_LENGTHS, *_SAMPLING)
    # One beam is no beam search.
    other = [n for n in options if n not in known and (n, options[n]) != ("num_beams", 1)]
    if other:
        raise ValueError(
            f"Expected generation_kwargs of {', '.join(known)}, got {', '.join(other)}. Take it "
            "out of the task's file."
        )
    if options.get("do_sample") is False:
        return Sampling(temperature=0.0, seed=seed)
    given: dict[str, Any] = {n: options[n] for n in _SAMPLING if options.get(n) is not None}
    return Sampling(seed=seed, **{"temperature": given.pop("temperature", 0.0), **given})
