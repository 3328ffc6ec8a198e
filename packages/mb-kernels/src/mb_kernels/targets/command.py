"""The command `python -m mb_kernels.targets`: runs the compile gate and prints what it found.

    python -m mb_kernels.targets                     # every kernel for every target
    python -m mb_kernels.targets --target gfx942 --module mb_kernels.targets.cases

Triton's cache makes a second run take seconds, and a ledger (`--ledger FILE`, see
`targets.ledger`) the first one on another machine.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mb_kernels.runtime.host import cores
from mb_kernels.targets import ledger
from mb_kernels.targets.gate import Build, Job, build_all, kernel_modules, listed, uncovered
from mb_kernels.targets.table import TARGETS


def table(builds: Sequence[Build]) -> str:
    """One line per build, aligned."""
    header = ("kernel", "target", "registers", "spill B", "shared B", "matrix instructions", "")
    rows = [header]
    for b in builds:
        instructions = ", ".join(f"{name} x{n}" for name, n in b.matrix_instructions.items())
        verdict = "ok" if not b.problems else "FAIL: " + "; ".join(b.problems)
        kernel = f"{b.module.removeprefix('mb_kernels.')}.{b.case}"
        numbers = (str(b.registers), str(b.spill), str(b.shared))
        rows.append((kernel, b.target, *numbers, instructions or "-", verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m mb_kernels.targets`: prints the table, returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m mb_kernels.targets",
        description="Compile every kernel for every target, without a GPU.",
    )
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--module", action="append", default=[], help="default: all of mb_kernels")
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument(
        "--all", action="store_true", help="every dtype, activation and size: hours"
    )
    parser.add_argument("--json", action="store_true", help="print builds as JSON, not a table")
    parser.add_argument(
        "--ledger", type=Path, metavar="FILE", help="leave out builds in FILE, and add sound ones"
    )
    arguments = parser.parse_args(argv)
    if arguments.workers < 1:
        parser.error(f"--workers: expected 1 or more, got {arguments.workers}")

    try:
        from triton import knobs
    except ModuleNotFoundError:
        parser.error("Triton is not installed; it compiles the kernels: pip install triton")
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: kernels are interpreted, unset it to compile them")
    try:
        modules = kernel_modules(arguments.module)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    targets = [TARGETS[name] for name in arguments.target or TARGETS]
    cases = listed(modules, targets, every=arguments.all)
    known, marks = set[str](), dict[Job, str]()
    if arguments.ledger is not None:
        marks = {job: ledger.fingerprint(case, target) for job, (case, target) in cases.items()}
        try:
            known = ledger.read(arguments.ledger)
        except (ValueError, OSError) as error:
            parser.error(str(error))
    jobs = [job for job in cases if marks.get(job) not in known]
    builds, interrupted = list[Build](), False
    try:
        for found in build_all(jobs, workers=arguments.workers):
            builds.append(found)
            if sys.stderr.isatty():
                end = "\n" if len(builds) == len(jobs) else "\r"
                print(f"{len(builds)} of {len(jobs)} builds", end=end, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        interrupted = True
    if arguments.ledger is not None:
        whole = not (interrupted or arguments.target or arguments.module or arguments.all)
        current = known.intersection(marks.values()) if whole else known
        sound = {marks[build.job] for build in builds if not build.problems}
        ledger.write(arguments.ledger, current | sound)
    if interrupted:
        told = f"Stopped after {len(builds)} of {len(jobs)} builds, which Triton's cache keeps."
        print(told, file=sys.stderr)
        return 130
    order = {job: position for position, job in enumerate(cases)}
    builds.sort(key=lambda b: order[b.job])
    missing = uncovered(modules)

    print(json.dumps([asdict(b) for b in builds]) if arguments.json else table(builds))
    for name in missing:
        print(f"FAIL: {name} is in no gate case", file=sys.stderr)
    failures = sum(bool(b.problems) for b in builds) + len(missing)
    as_before = len(cases) - len(jobs)
    print(
        f"{len(builds)} builds of {len(modules)} modules for {len(targets)} targets, "
        f"{failures} failed" + f"; {as_before} more are in {arguments.ledger}" * bool(as_before),
        file=sys.stderr,
    )
    return 1 if failures else 0
