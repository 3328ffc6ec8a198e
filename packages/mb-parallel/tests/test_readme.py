"""The pages' examples run as printed; the example of a test is collected with the tests."""

import contextlib
import copy
import inspect
import io
import re
from pathlib import Path

import mb_parallel
import mb_parallel.random
import torch
from mb_kernels.testing import assert_close
from mb_layers import MoEConfig, dMoE
from mb_parallel import (
    ParallelDims,
    context_parallel,
    parallelize_experts,
    recompute,
    tensor_parallel,
    testing,
)
from mb_parallel.testing import run_ranks
from torch import nn

PACKAGE = Path(__file__).parents[1]


def _run_example(page, names):
    (example,) = re.findall(r"```python\n(.*?)```", (PACKAGE / page).read_text(), flags=re.DOTALL)
    exec(compile(example, page, "exec"), names)


def test_readme_example(capsys):
    _run_example("README.md", {})
    chosen, norm = capsys.readouterr().out.splitlines()
    assert chosen.startswith("expert parallelism: ep = 1")
    assert norm.startswith("gradient norm ")


def test_arguments_are_taken_as_the_table_writes_them():
    """Those behind a `*` by their names only, and no others."""
    table = re.findall(r"^\| (`.*)", (PACKAGE / "README.md").read_text(), flags=re.MULTILINE)
    calls = re.findall(r"`(?:mb_parallel\.\w+\.)?(\w+)\(([^`()]*)\)`", "".join(table))
    places = (
        mb_parallel,
        mb_parallel.random,
        context_parallel,
        recompute,
        tensor_parallel,
        testing,
    )
    checked = 0
    for name, written in calls:
        function = next((vars(place)[name] for place in places if name in vars(place)), None)
        if function is not None:
            parameters = inspect.signature(function).parameters.values()
            named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
            before, _, after = written.partition("*, ")
            assert named.isdisjoint(before.split(", ")), name
            assert named >= set(after.split(", ")) - {"", "..."}, name
            checked += 1
    assert checked > 15


def test_layouts_are_as_many_and_as_near_as_the_page_of_figures_has_it():
    """As it was measured; `benchmarks/equality.py` measures again."""
    page = (PACKAGE / "docs" / "equality.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| \d (\|.*\d-?\d) \|$", page, flags=re.MULTILINE)
    most = max(float(figure) for row in rows for figure in re.findall(r"[\d.]+e-\d+", row))
    assert len(rows) == 12
    said = re.search(
        r"of twelve layouts .* within (\S+) in fp32", (PACKAGE / "README.md").read_text()
    )
    assert said is not None
    assert most <= float(said[1]) <= 1e-5


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
    _run_example("docs/tensor-parallel.md", vars(tensor_parallel) | given)
    return sorted(
        {n.split(".")[-2] for n, p in model.named_parameters() if hasattr(p, "placements")}
    )


def _own_units(rank, world_size, dims):
    """Shard as the example does; compare gradients with those of one process."""
    torch.manual_seed(1)
    config = MoEConfig(hidden_size=8, ffn_hidden_size=8, num_experts=4)
    whole = nn.Sequential(nn.Linear(8, 8), dMoE(config))
    model = copy.deepcopy(whole)
    mesh = ParallelDims(**dims).build("cpu")
    parallelize_experts(model, mesh)
    given = {"model": model, "mesh": mesh, "blocks": list(model)}
    _run_example("docs/data-parallel.md", given)
    x = torch.randn(world_size, 6, 8)
    (model(x[rank]).y.square().mean() / mesh.dp_size).backward()
    whole(x).y.square().mean().backward()
    for (name, mine), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert_close(f"d {name}", mine.grad.full_tensor(), expected.grad)


def _parts(rank, world_size):
    """The example of attention over parts, beside the core that it has."""
    mesh = ParallelDims(dp_shard=world_size, cp=world_size).build("cpu")
    whole = torch.randn(3, 1, 4, 2, 4, generator=torch.Generator().manual_seed(0))
    given = {"mesh": mesh} | dict(zip("qkv", whole[:, :, 2 * rank : 2 * rank + 2], strict=True))
    _run_example("docs/context-parallel.md", given)
    expected = given["Core"]()(*whole)
    torch.testing.assert_close(given["y"], expected[:, 2 * rank : 2 * rank + 2])


def _plan_and_units(rank, world_size):
    _parts(rank, world_size)
    _own_units(rank, world_size, {"dp_shard": world_size, "ep": world_size})
    _own_units(rank, world_size, {"dp_replicate": world_size})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        _run_example("README.md", {})
    return _plan(rank, world_size), printed.getvalue()


def test_examples_on_two_ranks():
    results = run_ranks(_plan_and_units, 2)
    (printed,) = {text for _, text in results}  # alike, with one norm of all gradients
    assert printed.startswith("expert parallelism over ep = 2: 1 layer: 4 of 8 experts a rank by ")
    for shared, _ in results:
        assert shared == sorted(
            ["embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj",
             "gate_proj", "up_proj", "down_proj"]
        )  # fmt: skip
