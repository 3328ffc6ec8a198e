"""The README's example runs as printed; the example of a test is collected with the tests."""

import re
from pathlib import Path

from mb_parallel import ParallelDims, tensor_parallel
from mb_parallel.testing import run_ranks
from torch import nn

PACKAGE = Path(__file__).parents[1]


def _examples():
    text = (PACKAGE / "README.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def test_readme_example(capsys):
    exec(compile(_examples()[0], "README.md", "exec"), {})
    chosen, norm = capsys.readouterr().out.splitlines()
    assert chosen.startswith("expert parallelism: ep = 1")
    assert norm.startswith("gradient norm ")


def _plan(rank, world_size):
    """Apply the plan to a model of these names; the parameters that are shared out."""
    maps = {name: nn.Linear(4, 4) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    mlp = {name: nn.Linear(4, 4) for name in ("gate_proj", "up_proj", "down_proj")}
    block = {"first_norm": nn.LayerNorm(4), "second_norm": nn.LayerNorm(4)}
    block |= {"attention": nn.ModuleDict(maps), "mlp": nn.ModuleDict(mlp)}
    ends = {"embed_tokens": nn.Embedding(4, 4), "norm": nn.LayerNorm(4), "lm_head": nn.Linear(4, 4)}
    model = nn.ModuleDict({**ends, "layers": nn.ModuleList([nn.ModuleDict(block)])})
    mesh = ParallelDims(tp=world_size).build("cpu")
    given = {"model": model, "mesh": mesh, "kv_heads": 2}
    exec(compile(_examples()[1], "README.md", "exec"), vars(tensor_parallel) | given)
    return sorted(
        {n.split(".")[-2] for n, p in model.named_parameters() if hasattr(p, "placements")}
    )


def test_readme_plan():
    for shared in run_ranks(_plan, 2):
        assert shared == sorted(
            ["embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj",
             "gate_proj", "up_proj", "down_proj"]
        )  # fmt: skip
