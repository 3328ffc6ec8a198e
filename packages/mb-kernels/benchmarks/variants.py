"""What a plan could do otherwise, and what biases cost: a layer's forward and backward, in turns.

    python packages/mb-kernels/benchmarks/run.py variants

"as it is" is the plan of this GPU, another name a field of it that is changed. "no biases" leaves
out those of GPT-OSS's experts.

Letters: T tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from layer import SHAPES, make_inputs
from mb_kernels import bin_tokens, expert_mlp, topk_softmax
from mb_kernels.runtime.plan import assume, plan_of
from timing import eight_of_ten, in_turns, median

_SHAPES = ("gpt-oss", "olmoe", "qwen3-30b", "fine", "dsv3")
_CHANGES: dict[str, dict[str, Any]] = {"as it is": {}, "beside": {"beside": True}}


def _step(name: str, *, bias: bool) -> Callable[[dict[str, Any]], object]:
    shape = SHAPES[name]
    inputs = make_inputs(shape, "uniform")
    leaves = [inputs[n] for n in ("x", "logits", "w1", "w2")]
    if bias:
        sizes = (shape.columns, shape.hidden)
        leaves += [torch.randn(shape.experts, n, device="cuda", requires_grad=True) for n in sizes]
    dy = torch.randn_like(inputs["x"])
    plan = plan_of(inputs["x"])

    def run(changes: dict[str, Any]) -> object:
        changed = replace(plan, **changes)
        with assume(lambda dtype: replace(changed, dtype=dtype)):
            x, logits, w1, w2, *biases = leaves
            weights, ids, _ = topk_softmax(logits, shape.top_k)
            bins = bin_tokens(ids, shape.experts)
            b1, b2 = biases or (None, None)
            options = {"activation": shape.activation, "b1_EF": b1, "b2_ED": b2}
            y = expert_mlp(x, w1, w2, bins, weights, **options)
            return torch.autograd.grad(y, leaves, dy)

    return run


def run(*, quick: bool = False) -> Iterator[list[dict[str, Any]]]:
    for name in [name for name in _SHAPES if name in SHAPES]:
        step = _step(name, bias=name == "gpt-oss")
        calls = {what: partial(step, changes) for what, changes in _CHANGES.items()}
        if name == "gpt-oss":
            calls["no biases"] = partial(_step(name, bias=False), {})
        times = in_turns(calls, seconds=4)
        base = median(times["as it is"])
        yield [
            {
                "benchmark": "variants",
                "shape": name,
                "what": what,
                "both_ms": f"{median(times[what]):.4g}",
                "8_of_10": eight_of_ten(times[what]),
                "of_as_it_is": round(median(times[what]) / base, 3),
            }
            for what in calls
        ]
        del step, calls
        torch.cuda.empty_cache()
