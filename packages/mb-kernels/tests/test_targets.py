"""The compile gate refuses bad kernels, and the target table serves neighbouring chips."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mb_kernels.activation import Activation, parse
from mb_kernels.bins import SMALLEST_BLOCK_M
from mb_kernels.targets import TARGETS, TILES, GateCase, command, gate, ledger
from mb_kernels.targets.command import main
from mb_kernels.targets.cover import cover
from mb_kernels.targets.gate import kernel_modules
from mb_kernels.targets.record import recorded_cases
from mb_kernels.targets.table import _amd_target, _nvidia_target


@pytest.fixture(scope="module")
def gate_run() -> subprocess.CompletedProcess[str]:
    """The command on gate_kernels.py; a process of its own, for kernels must not be interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parent), *sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "mb_kernels.targets", "--module", "gate_kernels", "--json"]
    command += ["--target", "sm90", "--target", "gfx942", "--workers", "2"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def problems(run: subprocess.CompletedProcess[str], case: str, target: str) -> list[str]:
    assert run.stdout, run.stderr
    builds = {(b["case"], b["target"]): b for b in json.loads(run.stdout)}
    return builds[case, target]["problems"]


def test_the_gate_takes_the_cores_that_it_may_use(monkeypatch, capsys, tmp_path) -> None:
    """Of a host's 128 a container often has four, and memory for as many compilers."""
    taken = []
    monkeypatch.setattr("mb_kernels.runtime.host.QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 127}, raising=False)
    monkeypatch.setattr(command, "build_all", lambda jobs, *, workers: taken.append(workers) or [])
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr(command, "kernel_modules", lambda names: [])
    main(["--target", "sm90"])
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    main(["--target", "sm90"])
    assert taken == [3, 2]
    with pytest.raises(SystemExit):
        main(["--workers", "0"])
    assert "--workers: expected 1 or more, got 0" in capsys.readouterr().err


def test_an_interrupted_gate_says_how_far_it_came(monkeypatch, capsys) -> None:
    def build_all(jobs, *, workers):
        yield gate.Build(*jobs[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "build_all", build_all)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    assert main(["--target", "sm90", "--module", "gate_kernels"]) == 130
    assert re.fullmatch(r"Stopped after 1 of \d+ builds, .*\n", capsys.readouterr().err)


def test_a_ledger_leaves_out_what_was_sound(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    path, built = tmp_path / "gate.txt", []

    def build_all(jobs, *, workers):
        built[:] = [job[1:] for job in jobs]
        for job in jobs:
            yield gate.Build(*job, problems=("spills",) if job[1] == "spilling" else ())

    def run(*options: str) -> tuple[list[tuple[str, str]], str]:
        built.clear()
        with monkeypatch.context() as patched:
            patched.setattr(command, "build_all", build_all)
            main(["--module", "gate_kernels", "--ledger", str(path), *options])
        return list(built), capsys.readouterr().err

    cases = {
        case.name for case in importlib.import_module("gate_kernels").gate_cases(TARGETS["sm90"])
    }
    assert {case for case, _ in run("--target", "sm90")[0]} == cases
    again, said = run("--target", "sm90")
    assert again == [("spilling", "sm90")]
    assert f"; {len(cases) - 1} more are in {path}" in said
    others, _ = run()
    assert ("sound", "sm80") in others
    assert ("sound", "sm90") not in others
    assert {case for case, _ in run()[0]} == {"spilling"}  # of other targets nothing is lost
    with monkeypatch.context() as patched:
        patched.setattr("triton.__version__", "0.0")
        assert len(run()[0]) == len(cases) * len(TARGETS)
    path.write_text(path.read_text() + "<<<<<<< HEAD\n")
    with pytest.raises(SystemExit):
        run()
    assert re.search(
        r"gate.txt:\d+: expected 16 hexadecimal digits, got '<<<<<<< HEAD'", capsys.readouterr().err
    )


def test_a_ledger_that_cannot_be_written_is_named_first_and_leaves_nothing(
    monkeypatch, capsys, tmp_path
) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr(command, "build_all", lambda *_, **__: pytest.fail("builds came first"))
    with pytest.raises(SystemExit):
        main(["--target", "sm90", "--ledger", str(tmp_path / "none" / "gate.txt")])
    assert "Expected a ledger in a folder that exists, got " in capsys.readouterr().err

    def full(path: Path, text: str) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        ledger.write(tmp_path / "gate.txt", ["0" * 16])
    assert list(tmp_path.iterdir()) == []


def test_a_whole_run_forgets_builds_that_are_no_more(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    own = [importlib.import_module("gate_kernels")]
    monkeypatch.setattr(command, "kernel_modules", lambda names: own)
    sound = lambda jobs, *, workers: (gate.Build(*job) for job in jobs)  # noqa: E731
    monkeypatch.setattr(command, "build_all", sound)
    path, stale = tmp_path / "gate.txt", "0" * 16
    path.write_text(stale + "\n")
    main(["--target", "sm90", "--ledger", str(path)])
    assert stale in ledger.read(path)
    main(["--ledger", str(path)])
    assert stale not in ledger.read(path)
    assert len(ledger.read(path)) == len(gate.listed(own, list(TARGETS.values()), every=False))


def test_a_fingerprint_is_of_all_that_a_build_depends_on(monkeypatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    kernels, sm90 = importlib.import_module("gate_kernels"), TARGETS["sm90"]
    case = next(case for case in kernels.gate_cases(sm90) if case.name == "sound")
    others = [
        replace(case, kernel=kernels.spilling_kernel),
        replace(case, signature=dict(case.signature, a_ptr="*bf16")),
        replace(case, constexprs={"SIZE": 32}),
        *(replace(case, num_warps=8), replace(case, num_stages=3)),
        *(replace(case, options={"maxnreg": 64}), replace(case, multiples_of_16=())),
        *(replace(case, beyond_2gib=("a_ptr",)), replace(case, is_gemm=False)),
    ]
    hashes = [ledger.fingerprint(one, sm90) for one in (case, *others)]
    hashes += [
        ledger.fingerprint(case, replace(sm90, **{what: value}))
        for what, value in (("arch", 91), ("shared_bytes", 1), ("name", "sm91"))
    ]
    assert len(set(hashes)) == len(hashes)
    assert ledger.fingerprint(replace(case, name="another"), sm90) == hashes[0]


def test_the_ledger_is_of_the_triton_that_the_lock_names() -> None:
    """Else every run compiles all of them: `make gate` writes it anew."""
    root, triton = Path(__file__).parents[3], importlib.import_module("triton").__version__
    packages = tomllib.loads((root / "uv.lock").read_text())["package"]
    if triton not in [p["version"] for p in packages if p["name"] == "triton"]:
        pytest.skip(f"Triton {triton} is not the lock's")
    here = gate.listed(kernel_modules(), [TARGETS["sm90"], TARGETS["gfx942"]], every=False)
    sound = ledger.read(Path(__file__).parents[1] / "gate.txt")
    missing = [job for job, of in here.items() if ledger.fingerprint(*of) not in sound]
    assert len(missing) < len(here) / 2, "run `make gate`"


def test_the_gate_compiles_the_case_that_needs_more_registers():
    plain, gated = (
        GateCase(name=name, kernel=None, signature={"x": "*bf16"}, constexprs={"ACTIVATION": kind})
        for name, kind in (("gelu", parse("gelu")), ("swiglu", parse("swiglu")))
    )
    biased = GateCase(name="bias", kernel=None, signature={"x": "*bf16", "b": "*bf16"})
    assert cover([plain, gated], depth=0) == [gated]
    assert cover([plain, biased], depth=0) == [biased]


def test_kernels_read_fields_of_an_activation_alone() -> None:
    """Of a named tuple Triton 3.9 shows a kernel its fields, not what it computes from them."""
    read = {
        name
        for module in kernel_modules()
        for name in re.findall(r"\b(?:ACTIVATION|KIND)\.(\w+)", inspect.getsource(module))
    }
    assert "gated" in read
    assert read <= set(Activation._fields)


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("spilling", "spills"),
        ("too_much_shared", "bytes of shared memory"),
        ("no_matrix_instruction", "without matrix instructions"),
        ("other_float8", "8-bit floats by instructions of other numbers"),
        ("wrong_argument", "wrong: SIZE, SIZES"),
    ],
)
def test_gate_refuses(
    gate_run: subprocess.CompletedProcess[str], case: str, expected: str, target: str
) -> None:
    (problem,) = problems(gate_run, case, target)
    assert expected in problem


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_gate_passes_a_sound_gemm(gate_run: subprocess.CompletedProcess[str], target: str) -> None:
    assert problems(gate_run, "sound", target) == []
    builds = {(b["case"], b["target"]): b for b in json.loads(gate_run.stdout)}
    build = builds["sound", target]
    assert build["registers"] > 16
    assert build["shared"] > 0
    (instruction,) = build["matrix_instructions"]
    assert instruction.startswith("m64n" if target == "sm90" else "mfma_f32")


def test_gate_fails_on_findings_and_on_a_kernel_in_no_case(
    gate_run: subprocess.CompletedProcess[str],
) -> None:
    assert gate_run.returncode == 1
    assert "gate_kernels.forgotten_kernel is in no gate case" in gate_run.stderr
    assert "12 builds of 1 modules for 2 targets, 11 failed" in gate_run.stderr


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
@pytest.mark.parametrize("file", ["json", "binary"])
def test_gate_says_that_the_cache_is_damaged(monkeypatch, tmp_path, target, file) -> None:
    """As a full disk leaves it: of a file that Triton finds it reads whatever is there."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    # By its variable: a knob that is set does not look there any more, in later tests too.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert gate.build("gate_kernels", "sound", target).problems == ()
    binary = "cubin" if target == "sm90" else "amdgcn"
    (damaged,) = tmp_path.glob(f"*/sound_kernel.{binary if file == 'binary' else file}")
    damaged.write_bytes(damaged.read_bytes()[:100])
    (problem,) = gate.build("gate_kernels", "sound", target).problems
    assert str(tmp_path) in problem or "no registers in assembly" in problem


def test_gate_refuses_a_module_without_cases() -> None:
    with pytest.raises(ValueError, match=r"json has no gate_cases\(target\)"):
        kernel_modules(["json"])


def test_gate_says_that_triton_is_missing(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SystemExit):
        main([])
    assert "Triton is not installed" in capsys.readouterr().err


def test_gate_finds_the_package_modules() -> None:
    names = {module.__name__.removeprefix("mb_kernels.") for module in kernel_modules()}
    files = Path(gate.__file__).parents[1].rglob("*.py")
    with_kernels = {
        ".".join(file.relative_to(Path(gate.__file__).parents[1]).with_suffix("").parts)
        for file in files
        if re.search(r"^def \w+_kernel\(", file.read_text(), re.MULTILINE)
    }
    assert len(with_kernels) > 10
    assert names >= with_kernels
    assert "targets.gate" not in names


def test_no_tile_is_lower_than_a_list_of_tiles_has_room_for() -> None:
    heights = {tile.block_m for by_target in TILES.values() for tile in by_target.values()}
    assert min(heights) >= SMALLEST_BLOCK_M


@pytest.mark.sweep(2)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")
@pytest.mark.parametrize(
    "name",
    [
        "sdd_tma, sparse bfloat16 D2048",
        "dsd_tma, sparse bfloat16 D2048",
        "dsd_tma, sparse bfloat16 D2048 (4)",
        "grouped_outer, swiglu bfloat16 D2048 F1024 K8",
    ],
)
def test_loads_run_ahead_of_products_on_hopper(name: str) -> None:
    # Where Triton cannot pipeline a loop it says nothing, and the kernel takes a third longer.
    cases = importlib.import_module("mb_kernels.targets.cases").gate_cases(TARGETS["sm90"])
    (case,) = [case for case in cases if case.name == name]
    ptx = gate._compile(case, TARGETS["sm90"]).asm["ptx"]
    loads = ptx.count("cp.async.bulk.tensor") - ptx.count(".global.shared::cta.bulk_group")
    assert loads >= 2 * case.num_stages  # both operands in each stage before the last, and the loop


@pytest.mark.sweep(2)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("fp8", ["", " fp8"])
def test_loads_on_amd_take_several_numbers_at_a_time(target: str, fp8: str) -> None:
    # In a flattened loop Triton loads each number of a token by itself, and says nothing.
    cases = importlib.import_module("mb_kernels.targets.cases").gate_cases(TARGETS[target])
    layers = [case for case in cases if case.is_gemm and f"bfloat16{fp8} D" in case.name]
    up = next(case for case in layers if case.name.startswith("up_fwd"))
    for case in (up, next(case for case in layers if case.name.startswith("dact_bwd"))):
        code = gate._compile(case, TARGETS[target]).asm["amdgcn"]
        assert "buffer_load_dwordx4" in code
        assert not re.search(r"(?:global|buffer)_load_\w*(?:byte|short|d16)", code), case.name


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")
def test_what_is_no_number_passes_clamps_and_relu() -> None:
    # The plain instructions take the other operand, and a diverged run would look sound.
    elementwise = importlib.import_module("mb_kernels.elementwise.kernels")
    h, d_a = torch.empty(64, 64, device="meta"), torch.empty(64, 32, device="meta")
    calls = {
        "forward": lambda: elementwise.activation(h, "reglu(limit=3)"),
        "backward": lambda: elementwise.activation_backward(d_a, h, "reglu(limit=3)"),
    }
    for case in recorded_cases(TARGETS["sm90"], calls):
        ptx = gate._compile(case, TARGETS["sm90"]).asm["ptx"]
        assert {"min.NaN.f32", "max.NaN.f32"} == set(re.findall(r"\b(?:min|max)\.[\w.]*", ptx))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")
def test_a_hook_of_triton_is_told_every_constant() -> None:
    # In JSON, once somebody has set triton.knobs.runtime.jit_cache_hook.
    told = importlib.import_module("triton.runtime.jit").serialize_specialization_data
    for case in (c for m in kernel_modules() for c in gate._cases(m, TARGETS["sm90"])):
        names = case.kernel.arg_names
        given = {
            "name": case.kernel.__name__,
            "signature": case.signature,
            "constants": {(names.index(name),): value for name, value in case.constexprs.items()},
            "attrs": {},
            "options": types.SimpleNamespace(**case.options),
            "key": case.name,
            "target": types.SimpleNamespace(arch=90),
        }
        given = {name: given[name] for name in inspect.signature(told).parameters}
        assert json.loads(told(**given))["key"] == case.name


@pytest.mark.parametrize(
    ("arch_name", "expected"),
    [
        ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx941", "gfx942"),
        ("gfx908", "gfx90a"),
        ("gfx1101", "gfx1101"),
        ("gfx1151", "gfx1100"),
        ("gfx1200", "gfx1201"),
    ],
)
def test_amd_neighbours(arch_name: str, expected: str) -> None:
    assert _amd_target(arch_name) is TARGETS[expected]


def test_the_format_of_8_bit_floats_is_the_chips() -> None:
    ocp, fnuz = torch.float8_e4m3fn, torch.float8_e4m3fnuz
    formats = {name: target.float8 for name, target in TARGETS.items() if target.float8}
    all_ocp = ("sm89", "sm90", "sm100", "sm120", "gfx950", "gfx1201")
    assert formats == {**dict.fromkeys(all_ocp, ocp), "gfx942": fnuz}
    # RTX 30 and Orin have the tiles of RTX 40, and not its matrix units.
    capabilities = ((8, 0), (8, 6), (8, 7), (8, 9), (10, 3), (12, 1))
    assert [_nvidia_target(*c).float8 for c in capabilities] == [None] * 3 + [ocp] * 3
    chips = ("gfx90a", "gfx908", "gfx942:sramecc+:xnack-", "gfx950", "gfx1101", "gfx1201")
    assert [_amd_target(name).float8 for name in chips] == [None, None, fnuz, ocp, None, ocp]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        *(((8, 0), "sm80"), ((8, 6), "sm89"), ((8, 7), "sm89"), ((8, 9), "sm89")),
        *(((9, 0), "sm90"), ((10, 0), "sm100"), ((10, 3), "sm100"), ((11, 0), "sm100")),
        *(((12, 0), "sm120"), ((12, 1), "sm120"), ((13, 0), "sm120")),
    ],
)
def test_nvidia_neighbours(capability: tuple[int, int], expected: str) -> None:
    assert _nvidia_target(*capability).name == expected
