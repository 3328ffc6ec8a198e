"""Finds faults in the kernels that no test would notice. Run by hand, not by CI.

    TRITON_INTERPRET=1 python packages/mb-kernels/tests/mutants.py [FILE ...] [--sample 20]

One fault at a time is put into the kernels of a file, in memory: a mask dropped, a store left out,
an index shifted, a bound off by one, a sign turned, the first round of a loop skipped, the sides of
a ``where`` swapped. The tests of that op run in a forked process until one fails or the process
dies. A fault that survives is printed with its line: either it changes no result, or a test is
missing.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import importlib.util
import os
import pathlib
import random
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from triton.runtime.interpreter import InterpretedFunction

HERE = pathlib.Path(__file__).parent
SOURCE = HERE.parent / "src" / "mb_kernels"
_EVERY = "test_every_op.py test_every_op_derivatives.py"
_EXPERTS = (f"interpreter/test_kernels.py {_EVERY}", "expert_mlp or grouped_gemm or gmm")
_SPARSE = ("interpreter/test_block_sparse_kernels.py", "")
# Files of kernels -> test files, and which of their tests.
ROOMS = {
    "routing/kernels.py": ("interpreter/test_kernels.py", "topk or bin_tokens"),
    "permute/kernels.py": (
        f"interpreter/test_kernels.py {_EVERY}",
        "gather or combine or padded or expert_mlp",
    ),
    "router_losses/kernels.py": ("interpreter/test_router_losses_kernels.py", ""),
    "quantize/kernels.py": ("interpreter/test_quantize_kernels.py", ""),
    "elementwise/kernels.py": (_EVERY, "grouped_experts"),
    "linear_cross_entropy/kernels.py": ("interpreter/test_linear_cross_entropy_kernels.py", ""),
    "exchange/routing_kernels.py": ("interpreter/test_exchange_routing_kernels.py", ""),
    "exchange/kernels.py": ("interpreter/test_exchange_kernels.py", ""),
    "adamw/kernels.py": ("interpreter/test_adamw_kernels.py", "not muon"),
    "language/tables.py": ("interpreter/test_adamw_kernels.py", "not muon"),
    "accumulate_grad/kernels.py": ("interpreter/test_adamw_kernels.py", "accumulate"),
    "sum_of_squares/kernels.py": ("interpreter/test_adamw_kernels.py", "squares"),
    "muon/kernels.py": ("interpreter/test_adamw_kernels.py", "muon"),
    "symmetric_matmul/kernels.py": ("interpreter/test_symmetric_matmul_kernels.py", ""),
    "relative_attention/kernels.py": ("interpreter/test_relative_attention_kernels.py", ""),
    **dict.fromkeys(
        ("state_space/kernels.py", "state_space/steps.py"),
        ("interpreter/test_state_space_kernels.py", ""),
    ),
    **dict.fromkeys(
        (
            *("grouped_gemm/schedule.py", "grouped_gemm/forward.py", "grouped_gemm/weight_grad.py"),
            *("expert_mlp/up.py", "expert_mlp/dact.py", "expert_mlp/bias.py"),
            *("language/tiles.py", "language/memory.py", "language/activation.py"),
        ),
        _EXPERTS,
    ),
    **dict.fromkeys(
        ("block_sparse/pointers.py", "block_sparse/descriptors.py", "block_sparse/mlp_kernels.py"),
        _SPARSE,
    ),
}
PATIENCE = 300  # seconds for the tests of one mutant, after which it counts as found

_OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
_SWAPPED = {"minimum": "maximum", "maximum": "minimum"}
_SAYS_NOTHING = ("assume", "static_assert", "device_assert", "multiple_of")


def mutate(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What ``node`` could be instead."""
    new = copy.deepcopy(node)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if any(k.arg == "mask" for k in node.keywords):
            new.keywords = [k for k in node.keywords if k.arg not in ("mask", "other")]
            yield "mask dropped", new
        elif name == "arange":
            yield "index shifted", ast.BinOp(new, ast.Add(), ast.Constant(1))
        elif name == "where":
            new.args[1:] = new.args[:0:-1]
            yield "where swapped", new
        elif name in _SWAPPED:
            new.func.attr = _SWAPPED[name]
            yield f"{name} swapped", new
        elif name in ("range", "static_range") and len(node.args) > 1:
            step = node.args[2] if len(node.args) > 2 else ast.Constant(1)
            new.args[0] = ast.BinOp(new.args[0], ast.Add(), step)
            yield "first round skipped", new
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if getattr(node.value.func, "attr", "") not in _SAYS_NOTHING:
            yield "call left out", ast.Pass()
    elif isinstance(node, ast.AugAssign):
        yield "update left out", ast.Pass()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER:
        new.ops[0] = _OTHER[type(node.ops[0])]()
        yield "bound or test changed", new
    elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
        new.op = _OTHER[type(node.op)]()
        yield "operation changed", new


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().generic_visit(node)


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """(what was done where, the file with it done), for every place in every kernel."""
    tree = ast.parse(source)
    kernels = [
        f
        for f in tree.body
        if isinstance(f, ast.FunctionDef)
        and any(ast.unparse(d).split("(")[0].endswith("jit") for d in f.decorator_list)
    ]
    for kernel in kernels:
        for statement in kernel.body:
            for node in ast.walk(statement):
                for what, new in mutate(node):
                    place = f"{kernel.name}:{node.lineno} {what}: {ast.unparse(node)[:90]}"
                    again = copy.deepcopy((tree, node, new))  # one memo: node stays in its tree
                    changed = ast.fix_missing_locations(_Replace(*again[1:]).visit(again[0]))
                    yield place.replace("\n", " "), ast.unparse(changed)


def put_in(file: str, source: str) -> None:
    """Have this process's kernels of ``file`` be those of ``source``."""
    name = "mb_kernels." + file.removesuffix(".py").replace("/", ".")
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as written:
        written.write(source)
    spec = importlib.util.spec_from_file_location(f"{name}_mutant", written.name)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    original = importlib.import_module(name)
    for key, value in vars(mutant).items():
        if isinstance(value, InterpretedFunction) and value.fn.__module__ == mutant.__name__:
            vars(getattr(original, key)).update(vars(value))


def survives(file: str, source: str) -> bool:
    """Whether the tests of the op pass with this source."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    signal.alarm(PATIENCE)
    files, which = ROOMS[file]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            put_in(file, source)
            tests = [str(HERE / name) for name in files.split()]
            options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
            status = pytest.main([*tests, *options, *(["-k", which] if which else [])])
        except BaseException:  # a source that does not even load is found
            status = 1
    os._exit(int(status))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help=f"default: all of {', '.join(ROOMS)}")
    parser.add_argument("--sample", type=int, help="so many mutants of each file, at random")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("set TRITON_INTERPRET=1: mutants are interpreted")
    survivors = tried = 0
    for file in arguments.files or ROOMS:
        source = (SOURCE / file).read_text()
        if not survives(file, source):
            print(f"{file}: its tests fail without any fault in it", flush=True)
            continue
        found = list(mutants(source))
        if arguments.sample and arguments.sample < len(found):
            found = random.Random(0).sample(found, arguments.sample)
        for place, mutant in found:
            tried += 1
            if survives(file, mutant):
                survivors += 1
                print(f"{file} {place}", flush=True)
    print(f"{survivors} of {tried} mutants survive")
    return 0


if __name__ == "__main__":
    sys.exit(main())
