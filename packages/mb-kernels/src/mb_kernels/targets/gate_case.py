"""One kernel to be compiled: what `targets.record` makes of a launch, and `targets.gate` builds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GateCase:
    """One kernel at one set of sizes, to be compiled for a target without running it.

    name: unique within the module; kernel: the `@triton.jit` function; signature: Triton type of
    each run-time argument ("*bf16", "i32", "tensordesc<bf16[128, 64]>"); constexprs: value of each
    remaining argument; options: further compile options; multiples_of_16: integers the launch
    specialises on divisibility; beyond_2gib: pointers to storage that may exceed 2 GiB, for which
    AMD's 32-bit buffer offsets are not available; is_gemm: must contain matrix instructions.
    Pointers count as 16-byte aligned.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    multiples_of_16: Sequence[str] = ()
    beyond_2gib: Sequence[str] = ()
    is_gemm: bool = False

    @property
    def in_float8(self) -> bool:
        """Whether it must multiply 8-bit floats as such.

        Not with tiles of 16 rows, which read weights and little else: the units of Hopper and B200
        want 64 rows, and Triton casts to fp16, which holds every E4M3 number.
        """
        low = self.constexprs.get("BLOCK_M") == 16
        return self.is_gemm and not low and any("fp8" in kind for kind in self.signature.values())
