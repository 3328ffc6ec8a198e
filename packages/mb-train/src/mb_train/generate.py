"""Text from a checkpoint: greedy, top-k or top-p sampling, several prompts at once.

The choice of a token needs no key-value cache to be right, and a model of this package sees at most
its training context: each step runs the last `positions` tokens through the model. Prompts of one
call need not be equally long: each is continued for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mb_train.checkpoint import load_checkpoint
from mb_train.config import TrainConfig
from mb_train.models.gpt import GPT
from mb_train.run_folder import find_checkpoint, read_saved_run
from mb_train.tasks.architecture import transformer_config
from mb_train.tokenizers import load_tokenizer

_NO_NUMBERS = (
    "The model's scores are not numbers: the run has diverged. Give an earlier checkpoint, "
    "RUN/iter_N, from before its loss became NaN (mb-train report RUN shows when)."
)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: scores are divided by it; 0 takes the likeliest token (greedy).
        top_k: choose among this many likeliest tokens; 0 among all.
        top_p: choose among the fewest likeliest tokens that hold this much probability.
        seed: of the choice.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"Expected a temperature of at least 0, got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"Expected top-k of at least 0, got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Expected top-p in (0, 1], got {self.top_p}.")


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from scores [V]; top-k is applied before top-p, as in Megatron-LM."""
    if sampling.temperature == 0:
        if not bool(logits_V.isfinite().all()):
            raise ValueError(_NO_NUMBERS)
        return int(logits_V.argmax())
    values, ids = (logits_V.float() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values, ids = values[: sampling.top_k], ids[: sampling.top_k]
    probs = values.softmax(0)
    if not bool(probs[0] >= 0):
        raise ValueError(_NO_NUMBERS)
    # A token stays if those before it do not hold top_p already: at least one always does.
    kept = probs.cumsum(0) - probs < sampling.top_p
    probs = probs * kept
    return int(ids[torch.multinomial(probs.cpu(), 1, generator=generator)])


@torch.no_grad()
def continue_tokens(
    model: GPT, prompt: list[int], sampling: Sampling, *, vocab_size: int, context: int
) -> Iterator[int]:
    """Endless tokens after `prompt` (at least one token).

    Args:
        vocab_size: ids from here on are padding of the head and never chosen.
        context: longest input of the model.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    device = next(model.parameters()).device
    tokens = list(prompt)
    model.eval()
    while True:
        window_BS = torch.tensor([tokens[-context:]], device=device)
        logits_V = model.logits(window_BS, last_only=True)[0, :vocab_size]
        tokens.append(choose(logits_V, sampling, generator))
        yield tokens[-1]


class Generator:
    """A model and its tokenizer from a run.

    Args:
        run: a run folder or an iteration folder.
        device: "cpu" or "cuda".

    Raises:
        ValueError: no checkpoint there, or one that does not load.
    """

    def __init__(self, run: Path, device: str) -> None:
        checkpoint = find_checkpoint(run)
        if checkpoint is None:
            raise ValueError(f"Expected a checkpoint in {run}, found none.")
        saved = read_saved_run(checkpoint)
        config = TrainConfig(**saved.inherited())
        self.tokenizer = load_tokenizer(config)
        self.context = config.positions
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        vocab_size = saved.identity["padded_vocab_size"]
        with torch.device(device):
            self.model = GPT(transformer_config(config, vocab_size), compute_dtype=dtype)
        load_checkpoint(checkpoint, self.model, None)

    def text(self, prompt: str, sampling: Sampling, *, max_new_tokens: int) -> Iterator[str]:
        """Pieces of text after `prompt`, until the end-of-document token or `max_new_tokens`."""
        eod = self.tokenizer.eod
        tokens = self.tokenizer.encode(prompt) or [eod]
        stream = continue_tokens(
            self.model,
            tokens,
            sampling,
            vocab_size=self.tokenizer.vocab_size,
            context=self.context,
        )
        # A character may take several tokens: say only what is decided.
        said, new = "", []
        for token, _ in zip(stream, range(max_new_tokens), strict=False):
            if token == eod:
                break
            new.append(token)
            whole = self.tokenizer.decode(new)
            if not whole.endswith("\N{REPLACEMENT CHARACTER}"):
                yield whole[len(said) :]
                said = whole
        yield self.tokenizer.decode(new)[len(said) :]
