"""For tests of MoE code: tolerances by dtype, difficult routings, random inputs.

Letters: T tokens, E experts, K top-k.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from mb_kernels import reference
from mb_kernels.activation import is_glu, parse
from mb_kernels.expert_mlp import expert_mlp

# Bounds of the relative Frobenius error against float64, by the dtype computed in. Rounding a
# result to bfloat16 makes 1e-3; the reference on a CPU, which rounds after every step, 4.8e-3.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 5e-3,
}

# Together these use every parameter of a gate. With a limit, tests make pre-activations whole
# numbers, see ``make_inputs``.
GPT_OSS = "swiglu(alpha=1.702, limit=4.5, offset=1, interleaved)"
NUMBERED = (
    "swiglu(limit=3.5)",
    "swiglu(alpha=0.5, limit=2.5, offset=1)",
    "swiglu(alpha=0.5, interleaved)",
    GPT_OSS,
    "swiglu(gate_cap=1.5, up_cap=2)",
    "geglu(limit=2.5, offset=-0.5)",
    "geglu_tanh(limit=1.5, interleaved)",
    "reglu(offset=1)",
)

ROUTINGS = ("uniform", "skewed", "one_expert", "empty_experts")


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got - want‖ / ‖want‖ in float64, on the CPU; NaN if either holds one."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    scale = want.norm().item()
    return (got - want).norm().item() / (scale if scale > 0 else 1.0)


# No row of a 16-bit result may be off by more than this many tolerances. A lost store of 32 bytes
# does not show in the error of a whole matrix, but is 12 tolerances of a row of 4096.
ROW_TOLERANCES = 6


def worst_row_error(got: Tensor, want: Tensor) -> float:
    """The largest ‖got - want‖ of a row over ‖want‖ of that row, or of a mean row if larger."""
    got, want = (t.detach().double().cpu().flatten(0, -2) for t in (got, want))
    norms = want.norm(dim=-1)
    scale = norms.clamp(min=norms.square().mean().sqrt().clamp(min=1e-30))
    return ((got - want).norm(dim=-1) / scale).max().item()


def error(got: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    """The error that ``TOLERANCES`` bounds: of the whole and, in 16 bits, of the worst row."""
    whole = relative_error(got, want)
    if dtype.itemsize > 2 or got.ndim < 2 or got.numel() == 0:
        return whole
    return max(whole, worst_row_error(got, want) / ROW_TOLERANCES, key=lambda e: (e != e, e))


def assert_close(name: str, got: Tensor, want: Tensor, *, dtype: torch.dtype | None = None) -> None:
    """Fail unless ``got`` is ``want`` within the tolerance of ``dtype`` (default: got's)."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    tolerance = TOLERANCES[dtype or got.dtype]
    found = error(got, want, dtype or got.dtype)
    assert found <= tolerance, f"{name}: relative error {found:.2e} above {tolerance:.0e}"


@contextlib.contextmanager
def bf16_interpreted() -> Generator[None]:
    """Have Triton's interpreter compute with bfloat16 and with 8-bit floats as a GPU does.

    The interpreter (Triton 3.6 to 3.9) holds bfloat16 numbers as 16-bit integers. Left alone,
    ``tl.dot`` multiplies these integers, and a cast to bfloat16 or E4M3 cuts bits off where a GPU
    rounds to nearest. MI300's E4M3 it does not know at all before 3.9. Here all go through fp32.
    Sums and products of two bfloat16 tiles stay wrong, which no kernel of this package computes:
    all of them cast to fp32 first.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    convert = InterpreterBuilder.create_fp_to_fp  # the cast to 8 bits, with a rounding mode
    patch_core = interpreter._patch_lang_core
    formats = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e4b8: torch.float8_e4m3fnuz}

    def cast_and_round(self: Any, x: Any, kind: Any) -> Any:
        if kind.scalar is not tl.bfloat16:
            return cast(self, x, kind)
        rounded = torch.tensor(x.data).bfloat16().view(torch.uint16)
        return TensorHandle(rounded.numpy(), tl.bfloat16)

    def convert_and_round(self: Any, x: Any, kind: Any, rounding: Any) -> Any:
        if kind.scalar not in formats:
            return convert(self, x, kind, rounding)
        codes = torch.tensor(cast(self, x, tl.float32).data).to(formats[kind.scalar])
        return TensorHandle(codes.view(torch.uint8).numpy(), kind.scalar)

    def values(self: Any, x: Any) -> Any:
        if x.dtype.scalar in formats:
            codes = torch.tensor(x.data).view(formats[x.dtype.scalar])
            return TensorHandle(codes.float().numpy(), tl.float32)
        return cast(self, x, tl.float32)

    def dot_of_values(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar in (tl.bfloat16, *formats):
            a, b = values(self, a), values(self, b)
        return dot(self, a, b, *rest)

    def patch_core_and_dtypes(lang: Any, scope: Any) -> None:
        patch_core(lang, scope)
        known = lang.dtype.to_ir

        def to_ir(self: Any, builder: Any) -> Any:
            return self if self in formats else known(self, builder)

        scope.set_attr(lang.dtype, "to_ir", to_ir)

    with (
        mock.patch.object(interpreter, "_patch_lang_core", patch_core_and_dtypes),
        mock.patch.object(InterpreterBuilder, "cast_impl", cast_and_round),
        mock.patch.object(InterpreterBuilder, "create_fp_to_fp", convert_and_round),
        mock.patch.object(InterpreterBuilder, "create_dot", dot_of_values),
    ):
        yield


@contextlib.contextmanager
def interpreted_quickly() -> Generator[None]:
    """Leave out work of Triton's interpreter (3.6 to 3.9) that changes no result.

    The interpreter patches the language at each call of a device function: once for each module and
    launch is enough, because the launch undoes it at its end. To look up a dtype it builds a table
    of all dtypes. And it computes sums and products of integers in 64 bits too, to find overflows
    of 32 bits, which tensors as small as tests' do not have.
    """
    from triton.runtime import interpreter

    replaced: set[int] = set()
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    dtypes: dict[str, Any] = {}
    look_up = interpreter._get_np_dtype

    def replace_once(fn: Any) -> Any:
        if id(fn.__globals__) in replaced:
            return None
        replaced.add(id(fn.__globals__))
        return replace(fn)

    def launch_anew(self: Any, *args: Any, **keywords: Any) -> Any:
        replaced.clear()
        return launch(self, *args, **keywords)

    def known(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(kind)
        return dtypes[name]

    builder: Any = interpreter.interpreter_builder
    unchecked = dataclasses.replace(builder.options, sanitize_overflow=False)
    with (
        mock.patch.object(builder, "options", unchecked),
        mock.patch.object(interpreter, "_patch_lang", replace_once),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch_anew),
        mock.patch.object(interpreter, "_get_np_dtype", known),
    ):
        yield


def make_expert_ids(
    routing: str,
    tokens: int,
    num_experts: int,
    top_k: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Expert ids [T, K] int32, distinct within a token.

    "uniform" draws experts evenly; "skewed" by Zipf's law with exponent 1; "one_expert" sends each
    token's first choice to the last expert; "empty_experts" leaves every expert with an odd id idle
    (as far as top_k allows).
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing: expected one of {', '.join(ROUTINGS)}; got {routing!r}.")
    score_TE = torch.rand(tokens, num_experts, generator=generator).log_().neg_().log_().neg_()
    ids = torch.arange(num_experts)
    if routing == "skewed":
        score_TE -= torch.log1p(ids.float())  # Gumbel top-k draws in proportion to 1 / (id + 1)
    elif routing == "one_expert":
        score_TE[:, -1] += 1e6
    elif routing == "empty_experts":
        score_TE[:, ids % 2 == 1] -= 1e6
    return score_TE.topk(top_k, dim=1).indices.to(device=device, dtype=torch.int32)


class Case(NamedTuple):
    """Sizes of an expert MLP and what its routing looks like."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    routing: str = "uniform"
    capacity: int | None = None
    activation: str = "swiglu"
    bias: torch.dtype | None = None  # of the biases, if the experts have some
    transposed: tuple[bool, bool] = (False, False)  # whether w1 and w2 lie transposed in memory

    def __str__(self) -> str:
        tail = "" if self.capacity is None else f"-C{self.capacity}"
        tail += "" if self.bias is None else f"-bias {self.bias}"
        tail += "".join(f"-{w}.mT" for w, t in zip(("w1", "w2"), self.transposed, strict=True) if t)
        return (
            f"T{self.tokens}-D{self.hidden}-F{self.ffn}-E{self.experts}-K{self.top_k}-"
            f"{self.activation}-{self.routing}{tail}"
        )


def make_inputs(
    case: Case, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Arguments of ``expert_mlp`` as leaves that require gradients, and ``d_y`` for the backward.

    Values are exact in bfloat16, so that every dtype sees the same numbers. If the activation has a
    limit, pre-activations are whole numbers: otherwise rounding would decide on which side of the
    limit they are, and so their gradients.
    """
    whole = parse(case.activation).limit < math.inf
    generator = torch.Generator().manual_seed(seed)
    ids = make_expert_ids(
        case.routing, case.tokens, case.experts, case.top_k, generator=generator, device=device
    )

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.bfloat16().to(device=device, dtype=dtype)

    def first(values: Tensor) -> Tensor:
        return values.round() if whole else values

    def stored(values: Tensor, transposed: bool) -> Tensor:
        return (values.mT.contiguous().mT if transposed else values).requires_grad_()

    columns = case.ffn * (2 if is_glu(case.activation) else 1)
    weights_dtype = torch.promote_types(dtype, torch.float32)
    scale = 0.6 if whole else case.hidden**-0.5
    x = normal(case.tokens, case.hidden)
    w1 = normal(case.experts, columns, case.hidden, scale=scale)
    w2 = normal(case.experts, case.hidden, case.ffn, scale=case.ffn**-0.5)
    inputs = {
        "x": first(x).requires_grad_(),
        "w1": stored(first(w1), case.transposed[0]),
        "w2": stored(w2, case.transposed[1]),
        "bins": reference.bin_tokens(ids, case.experts, capacity=case.capacity),
        "weights": normal(case.tokens, case.top_k).abs().to(weights_dtype).requires_grad_(),
        "d_y": normal(case.tokens, case.hidden),
    }
    if case.bias is not None:
        bias = torch.promote_types(dtype, case.bias) if dtype is torch.float64 else case.bias
        inputs["b1"] = first(normal(case.experts, columns)).to(bias).requires_grad_()
        inputs["b2"] = normal(case.experts, case.hidden).to(bias).requires_grad_()
    return inputs


def run_expert_mlp(
    op: Callable[..., Tensor], inputs: Mapping[str, Any], **options: Any
) -> dict[str, Tensor]:
    """Output of ``op`` on ``inputs`` and the gradients of its differentiable arguments."""
    leaves = {n: inputs[n] for n in ("x", "w1", "w2", "weights", "b1", "b2") if n in inputs}
    biases = {n: inputs[key] for n, key in (("b1_EF", "b1"), ("b2_ED", "b2")) if key in inputs}
    arguments = (inputs[n] for n in ("x", "w1", "w2", "bins", "weights"))
    y = op(*arguments, **biases, **options)
    grads = torch.autograd.grad(y, list(leaves.values()), inputs["d_y"])
    return {"y": y.detach(), **{f"d_{n}": g for n, g in zip(leaves, grads, strict=True)}}


def expert_mlp_errors(
    case: Case, *, dtype: torch.dtype, device: torch.device | str, **options: Any
) -> dict[str, float]:
    """Relative error of ``expert_mlp`` and its gradients against the float64 reference.

    Those of biases in a dtype with another tolerance are scaled to that of ``dtype``.
    """
    inputs = make_inputs(case, dtype=dtype, device=device)
    got = run_expert_mlp(expert_mlp, inputs, activation=case.activation, **options)
    exact = make_inputs(case, dtype=torch.float64, device=device)
    want = run_expert_mlp(reference.expert_mlp, exact, activation=case.activation)
    errors = {name: error(got[name], want[name], dtype) for name in want}
    for name in errors.keys() & {"d_b1", "d_b2"}:
        errors[name] *= min(TOLERANCES[dtype] / TOLERANCES[got[name].dtype], 1.0)
    return errors
