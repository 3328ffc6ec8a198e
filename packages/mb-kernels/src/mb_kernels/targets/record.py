"""Gate cases recorded from real launches: an op runs on meta tensors, which launches nothing.

    cases = recorded_cases(TARGETS["gfx942"], {"K8": lambda: gather(x_on_meta, ...)})

Nothing about a case is written by hand, so a case is what a user's call compiles: tile, constants,
which integers are multiples of 16, which pointers reach beyond 2 GiB.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mb_kernels.runtime.plan import assume, gluon_serves, plan_for
from mb_kernels.runtime.recording import Launch, record
from mb_kernels.targets.gate_case import GateCase
from mb_kernels.targets.table import Target

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
}
_UNITS = 304  # of an MI300X: a multiple of every number of chiplets


def recorded_cases(target: Target, calls: Mapping[str, Callable[[], object]]) -> list[GateCase]:
    """A case for each kernel that ``calls`` would compile and launch on ``target``."""
    hopper = target.name == "sm90" and gluon_serves()
    cases: dict[str, GateCase] = {}
    seen = set()
    with assume(lambda dtype: plan_for(target, dtype, _UNITS, hopper)):
        for label, call in calls.items():
            with record() as launches:
                call()
            for launch in launches:
                case = _case(launch, label)
                key = repr(replace(case, name=""))
                if key in seen:
                    continue
                seen.add(key)
                same = sum(name.startswith(case.name) for name in cases)
                case = replace(case, name=f"{case.name} ({same + 1})") if same else case
                cases[case.name] = case
    return list(cases.values())


def _case(launch: Launch, label: str) -> GateCase:
    kernel, _, args, constants = launch
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    multiples, beyond = [], []
    for parameter, value in zip(kernel.params, args, strict=False):
        name = parameter.name
        if value is None:
            constexprs[name] = None
        elif isinstance(value, Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            if value.untyped_storage().nbytes() >= 2**31:
                beyond.append(name)
        elif isinstance(value, int):
            if value == 1 and not parameter.do_not_specialize:
                constexprs[name] = 1
                continue
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                multiples.append(name)
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = _descriptor_type(value)
    options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
    constexprs |= {name: value for name, value in constants.items() if name in kernel.arg_names}
    products = "PRECISION" in constexprs or kernel.is_gluon()
    values = [getattr(a, "base", a) for a in args]
    sixteen_bit = any(
        isinstance(v, Tensor) and v.dtype.itemsize <= 2 and v.dtype.is_floating_point
        for v in values
    )
    return GateCase(
        name=f"{kernel.__name__.removesuffix('_kernel')}, {label}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=options.pop("num_warps", 4),
        num_stages=options.pop("num_stages", 3),
        options=options,
        multiples_of_16=multiples,
        beyond_2gib=beyond,
        is_gemm=products and sixteen_bit,
    )


def _descriptor_type(descriptor: Any) -> str:
    block = ", ".join(map(str, descriptor.block_shape))
    inner = f"{_TYPES[descriptor.base.dtype]}[{block}]"
    layout = getattr(descriptor, "layout", None)
    return f"tensordesc<{inner}>" if layout is None else f"tensordesc<{inner},{layout!r}>"
