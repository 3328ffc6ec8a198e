"""The compile gate: builds every Triton kernel for every target on a machine without a GPU.

Triton brings its own LLVM, ptxas and AMD linker, so what would be loaded on the device can be made
and examined anywhere. A case fails when

- it does not compile, or needs more shared memory (LDS) than the target has;
- registers spill to memory: a stack frame in the cubin, spilled VGPRs or scratch on AMD;
- it is a matrix multiplication and holds no matrix instruction (MMA, WGMMA, MFMA, WMMA), or one of
  8-bit floats and none of those (Triton casts what a chip does not multiply, without an error);
- a launched kernel (by its name, `*_kernel`) is in no case.

It builds what a module's `gate_cases(target)` lists. `targets.cases` records that from launches of
nearly every op.
"""

import functools
import importlib
import itertools
import multiprocessing
import pkgutil
import re
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from mb_kernels.targets.gate_case import GateCase
from mb_kernels.targets.table import TARGETS, Target

_NOT_KERNELS = ("mb_kernels.targets.__main__", "mb_kernels.testing")
_MATRIX_INSTRUCTION = re.compile(
    r"(tcgen05\.mma)|wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)|mma\.sync\.aligned\.(m\d+n\d+k\d+)"
    r"|v_(mfma_\w+|smfmac_\w+|wmma_\w+)"
)
_OF_FLOAT8 = re.compile(
    r"mma\S*\.(?:e4m3\.e4m3|kind::f8f6f4)|v_(?:mfma|wmma)_\w+_(?:fp8_fp8|f8f6f4)"
)
_CUOBJDUMP_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")

Job = tuple[str, str, str]  # module, case, target


@dataclass(frozen=True)
class Build:
    """What one case became on one target. registers are per thread, spill and shared in bytes."""

    module: str
    case: str
    target: str
    registers: int = 0
    spill: int = 0
    shared: int = 0
    matrix_instructions: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def job(self) -> Job:
        return self.module, self.case, self.target


def kernel_modules(names: Sequence[str] = ()) -> list[ModuleType]:
    """The modules that list gate cases: those named, or all of this package."""
    import mb_kernels

    found = names or [
        entry.name
        for entry in pkgutil.walk_packages(mb_kernels.__path__, "mb_kernels.")
        if entry.name not in _NOT_KERNELS
    ]
    modules = [importlib.import_module(name) for name in found]
    for module in modules:
        if names and not hasattr(module, "gate_cases"):
            raise ValueError(f"{module.__name__} has no gate_cases(target) function to compile")
    return [module for module in modules if hasattr(module, "gate_cases") or _kernels(module)]


def _kernels(module: ModuleType) -> set[str]:
    """Names of the kernels a module defines for launching, by the convention `*_kernel`."""
    from triton.runtime.jit import JITFunction

    return {
        name
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
        and name.endswith("_kernel")
        and value.__module__ == module.__name__
    }


def uncovered(modules: Sequence[ModuleType]) -> list[str]:
    """Launched kernels of ``modules`` that none of their cases compiles on any target."""
    covered = {
        (case.kernel.__module__, case.kernel.__name__)
        for module in modules
        for target in TARGETS.values()
        for case in _cases(module, target)
    }
    kernels = {(module.__name__, name) for module in modules for name in _kernels(module)}
    return [".".join(kernel) for kernel in sorted(kernels - covered)]


def listed(
    modules: Sequence[ModuleType], targets: Sequence[Target], *, every: bool
) -> dict[Job, tuple[GateCase, Target]]:
    """What there is to build; every: each dtype, activation and size."""
    found: dict[Job, tuple[GateCase, Target]] = {}
    for module, target in itertools.product(modules, targets):
        for case in (_every_case if every else _cases)(module, target):
            job = module.__name__, case.name, target.name
            assert job not in found, f"two gate cases are named {job}"
            found[job] = case, target
    return found


@functools.cache
def _every_case(module: ModuleType, target: Target) -> list[GateCase]:
    """What ``--all`` compiles too: ``every_case(target)``, where a module has it."""
    known = {case.name for case in _cases(module, target)}
    every = module.every_case(target) if hasattr(module, "every_case") else []
    return [*_cases(module, target), *(case for case in every if case.name not in known)]


@functools.cache
def _cases(module: ModuleType, target: Target) -> list[GateCase]:
    return list(module.gate_cases(target)) if hasattr(module, "gate_cases") else []


def build(module_name: str, case_name: str, target_name: str) -> Build:
    """Compile one case for one target and examine the binary. Never raises for a bad kernel."""
    from mb_kernels.runtime.launch import UNREADABLE, damaged  # which imports Triton

    target = TARGETS[target_name]
    module = importlib.import_module(module_name)
    found = (case for cases in (_cases, _every_case) for case in cases(module, target))
    case = next(case for case in found if case.name == case_name)
    identity = (module_name, case_name, target_name)
    try:
        compiled = _compile(case, target)
        if target.backend == "cuda":
            code, (registers, spill) = compiled.asm["ptx"], _cubin_usage(compiled.asm["cubin"])
        else:
            code = compiled.asm["amdgcn"]
            registers, spill = _amd_usage(code)
    except (*UNREADABLE, subprocess.CalledProcessError) as error:
        return Build(*identity, problems=(damaged(error),))
    except Exception as error:  # whatever the compiler raises is the finding to report
        message = " ".join(str(error).split())
        return Build(*identity, problems=(f"{type(error).__name__}: {message[-300:]}",))

    shared = compiled.metadata.shared
    instructions = Counter(next(filter(None, found)) for found in _MATRIX_INSTRUCTION.findall(code))

    problems = []
    if spill:
        problems.append(f"spills {spill} bytes")
    if shared > target.shared_bytes:
        problems.append(f"needs {shared} bytes of shared memory, {target.shared_bytes} available")
    if case.is_gemm and not instructions:
        problems.append("is a matrix multiplication without matrix instructions")
    elif case.in_float8 and not _OF_FLOAT8.search(code):
        problems.append("multiplies 8-bit floats by instructions of other numbers")
    return Build(
        *identity,
        registers=registers,
        spill=spill,
        shared=shared,
        matrix_instructions=dict(instructions),
        problems=tuple(problems),
    )


def _compile(case: GateCase, target: Target) -> Any:
    """Compile as a launch would: same argument order, same specialisation. A CompiledKernel."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = case.kernel.arg_names
    listed = [*case.signature, *case.constexprs]
    if sorted(listed) != sorted(names):
        wrong = set(listed) ^ set(names) or {n for n in names if listed.count(n) > 1}
        raise ValueError(
            f"signature and constexprs of {case.name!r} together must list each argument of "
            f"{case.kernel.__name__} once; wrong: {', '.join(sorted(wrong))}"
        )
    attributes = {}
    for position, name in enumerate(names):
        kind = case.signature.get(name, "constexpr")
        if kind.startswith("*") or name in case.multiples_of_16:
            attributes[(position,)] = [["tt.divisibility", 16]]
        if kind.startswith("*") and target.backend == "hip" and name not in case.beyond_2gib:
            attributes[(position,)].append(["tt.pointer_range", 32])
    source = (GluonASTSource if case.kernel.is_gluon() else ASTSource)(
        fn=case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs=dict(case.constexprs),
        attrs=attributes,
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    gpu = GPUTarget(target.backend, target.arch, target.wave_size)
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # a seventh of the time, not of the code
        return triton.compile(source, target=gpu, options=options)


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread. Triton kernels keep no arrays: stack means spills."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usages = [(int(regs), int(stack)) for regs, stack in _CUOBJDUMP_USAGE.findall(report)]
    assert usages, f"cuobjdump printed no resource usage: {report!r}"
    return max(regs for regs, _ in usages), max(stack for _, stack in usages)


def _amd_usage(assembly: str) -> tuple[int, int]:
    """VGPRs (accumulation registers included) and spilled bytes per work item.

    Spilled scalar registers move to lanes of a VGPR, not to memory, and are not counted.
    """

    def metadata(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        return int(found.group(1)) if found else 0

    assert ".vgpr_count:" in assembly, f"no registers in assembly that ends {assembly[-40:]!r}"
    spilled = 4 * metadata("vgpr_spill_count")
    return metadata("vgpr_count"), max(spilled, metadata("private_segment_fixed_size"))


def build_all(jobs: Sequence[Job], *, workers: int) -> Iterator[Build]:
    """Build (module, case, target) triples in processes; a job that kills the compiler is a row."""
    unfinished: list[Job] = []
    with _pool(workers) as pool:
        futures: dict[Future[Build], Job] = {pool.submit(build, *job): job for job in jobs}
        try:
            for future in as_completed(futures):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    unfinished.append(futures[future])
        finally:  # whoever is interrupted waits for no more than what is being compiled
            pool.shutdown(wait=False, cancel_futures=True)
    for job in unfinished:  # one process each: the one that dies is the culprit
        with _pool(1) as pool:
            try:
                yield pool.submit(build, *job).result()
            except BrokenProcessPool:
                yield Build(*job, problems=("the compiler crashed",))


def _pool(workers: int) -> ProcessPoolExecutor:
    # spawn: a fork of a process that has loaded LLVM and torch's thread pools may hang.
    context = multiprocessing.get_context("spawn")
    # An interrupt comes to all processes of a terminal. This one's parent says that it ends.
    ignore = signal.SIGINT, signal.SIG_IGN
    return ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=ignore)
