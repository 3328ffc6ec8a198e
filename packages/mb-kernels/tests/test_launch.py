"""A launch is given the compiled kernel that Triton would give it, and Triton is asked once."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import threading
import types
from inspect import signature

import pytest
import torch

pytest.importorskip("triton")
from mb_kernels import compile_ahead, sum_of_squares, warm_up
from mb_kernels.runtime import direct, plan, tables
from mb_kernels.runtime import launch as launching
from mb_kernels.runtime.descriptors import matrices
from mb_kernels.runtime.recording import record
from mb_kernels.targets.gate import kernel_modules
from triton import knobs
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction


class Kernel:
    """A Triton kernel of (x_ptr, n, E: tl.constexpr) that records who launched what."""

    arg_names = ("x_ptr", "n", "E")

    def __init__(self):
        self.fn, self.log = object(), []
        self.pre_run_hooks, self.used_global_vals = [], {}

    def __getitem__(self, grid):
        def compile_and_launch(*args, **constants):
            self.log.append(("triton", grid))
            return Compiled(self.log, constants["E"])

        return compile_and_launch


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, log, experts):
        self.log, self.experts = log, experts

    def run(self, *args):
        *grid, stream, function, metadata, told, enter, leave, x, n, experts = args
        assert (stream, function, metadata) == ("stream of -1", "function", "metadata")
        assert told is enter is leave is None
        assert experts == self.experts
        self.log.append(("kept", tuple(grid), x, n))


@pytest.fixture
def launches(monkeypatch):
    """Who served each of a list of launches (x, n, constants) of one kernel, and with what."""
    streams = types.SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(direct, "driver", types.SimpleNamespace(active=streams))
    monkeypatch.setattr(direct, "_compiled", {})
    monkeypatch.setattr(direct, "_on", True)

    def run(*calls, kernel=None):
        kernel = kernel or Kernel()
        for x, n, constants in calls:
            launching.launch(kernel, (3, 2), x, n, **constants)
        return kernel.log

    return run


def who(log):
    return [entry[0] for entry in log]


X = torch.zeros(64)
ELSEWHERE = torch.ones(32)


def test_the_second_launch_is_not_triton_s(launches):
    log = launches((X, 17, {"E": 4}), (ELSEWHERE, 33, {"E": 4}), (X, 5, {"E": 4}))
    assert log == [
        ("triton", (3, 2)),
        ("kept", (3, 2, 1), ELSEWHERE.data_ptr(), 33),
        ("kept", (3, 2, 1), X.data_ptr(), 5),
    ]


@pytest.mark.parametrize(
    ("x", "n", "constants"),
    [
        (X, 17, {"E": 5}),
        (X, 17, {"E": 4, "num_warps": 8}),
        (X.double(), 17, {"E": 4}),
        (None, 17, {"E": 4}),
        (X, 1, {"E": 4}),
        (X, 32, {"E": 4}),
        (X, 2**31 + 1, {"E": 4}),
        (matrices(X.view(1, 8, 8), (1, 8, 8)), 17, {"E": 4}),
    ],
    ids=["constexpr", "option", "dtype", "none", "one", "multiple-of-16", "64-bit", "descriptor"],
)
def test_what_triton_compiles_for_is_told_apart(x, n, constants, launches):
    first, other = (X, 17, {"E": 4}), (x, n, constants)
    assert who(launches(first, other, first, other)) == ["triton"] * 2 + ["kept"] * 2


def test_descriptors_of_other_blocks_are_told_apart(launches):
    def call(*block):
        return matrices(X.view(1, 8, 8), block), 17, {"E": 4}

    log = launches(call(1, 8, 8), call(1, 4, 8), call(1, 8, 8))
    assert who(log) == ["triton", "triton", "kept"]


@pytest.mark.parametrize("x", [X[1:], object()], ids=["unaligned", "of another kind"])
def test_other_arguments_are_left_to_triton(x, launches):
    assert who(launches(*[(x, 17, {"E": 4})] * 3)) == ["triton"] * 3


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_that_hooks_launches_sees_all_of_them(hook, chained, launches, monkeypatch):
    call = X, 17, {"E": 4}
    assert who(launches(call, call)) == ["triton", "kept"]
    if chained:
        monkeypatch.setattr(getattr(knobs.runtime, hook), "calls", [print])
    else:
        monkeypatch.setattr(knobs.runtime, hook, print)
    assert who(launches(call, call)) == ["triton", "triton"]


@pytest.mark.parametrize(
    ("group", "knob", "value"),
    [("runtime", "debug", True), ("compilation", "instrumentation_mode", "fpsan")],
)
def test_what_else_triton_compiles_for_is_told_apart(group, knob, value, launches, monkeypatch):
    kernel, call = Kernel(), (X, 17, {"E": 4})
    launches(call, call, kernel=kernel)
    monkeypatch.setattr(getattr(knobs, group), knob, value)
    assert who(launches(call, call, kernel=kernel)) == ["triton", "kept"] * 2


def test_who_inspects_compilations_or_launches_sees_them(launches, monkeypatch):
    kernel, call = Kernel(), (X, 17, {"E": 4})
    launches(call, call, kernel=kernel)
    kernel.pre_run_hooks.append(print)
    assert who(launches(call, kernel=kernel))[2:] == ["triton"]
    kernel.pre_run_hooks.clear()
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *a: ("", ""))
    assert who(launches(call, kernel=kernel))[3:] == ["triton"]


def test_a_changed_global_of_the_kernel_is_for_triton_to_judge(launches):
    kernel, call, names = Kernel(), (X, 17, {"E": 4}), {"SIZE": 4}
    kernel.used_global_vals["SIZE", id(names)] = 4, names
    launches(call, call, kernel=kernel)
    names["SIZE"] = 5
    assert who(launches(call, call, kernel=kernel)) == ["triton", "kept", "triton", "triton"]


def test_another_private_call_falls_back_to_the_public_one(launches, monkeypatch):
    def changed(self, *args):
        raise TypeError("function takes exactly 14 arguments (12 given)")

    monkeypatch.setattr(Compiled, "run", changed)
    call = X, 17, {"E": 4}
    with pytest.warns(UserWarning, match="MB_DIRECT_LAUNCH=0"):
        assert who(launches(call, call, call)) == ["triton"] * 3
    assert not direct._on


class Later(Kernel):
    """A kernel whose compilation waits for ``go``; its log has the thread of each stage."""

    def __init__(self):
        super().__init__()
        self.go, self.src, self.metadata, self.compiled = threading.Event(), "src", "metadata", []

    def warmup(self, x, n, *, grid, **constants):
        def build():
            assert self.go.wait(60)
            self.log.append(("build", threading.current_thread()))
            return self

        mode = active_mode.get()
        # From Triton 3.9 on it also takes what cleans up after a failure.
        after = [self.compiled.append, lambda kernel: None]
        return mode.submit(self, build, *after[: len(signature(mode.submit).parameters) - 2])

    def launcher(self, src, metadata):
        assert (src, metadata) == ("src", "metadata")
        self.log.append(("launcher", threading.current_thread()))


@pytest.fixture
def later(launches, monkeypatch):
    """A kernel being compiled for ``X``, 17 and ``{"E": 4}``, and the thread that is at it."""
    kernel = Later()
    monkeypatch.setattr(direct.driver.active, "launcher_cls", kernel.launcher, raising=False)
    with record() as listed:
        launching.launch(kernel, (3, 2), X.to("meta"), 17, E=4)
    ahead = threading.Thread(target=direct.compile_beside, args=(listed, 2))
    ahead.start()
    while not direct._under_way:
        assert ahead.is_alive()
        ahead.join(0.001)
    yield kernel, ahead
    kernel.go.set()
    ahead.join()
    assert not direct._under_way


def test_what_is_compiled_ahead_is_compiled_in_threads(later):
    kernel, ahead = later
    kernel.go.set()
    ahead.join()
    assert who(kernel.log) == ["build", "launcher"]
    assert not {t for _, t in kernel.log} & {ahead, threading.current_thread()}
    assert kernel.compiled == [kernel]


def test_a_launch_waits_for_what_is_compiled_ahead(later, launches):
    kernel, _ = later
    launches((X, 16, {"E": 4}), kernel=kernel)  # another, which nobody is at
    threading.Timer(0.05, kernel.go.set).start()
    launches((X, 17, {"E": 4}), kernel=kernel)
    assert who(kernel.log) == ["triton", "build", "launcher", "triton"]


def test_a_cpu_has_nothing_to_warm_up():
    sizes = {"tokens": 64, "hidden_size": 32, "ffn_hidden_size": 32, "num_experts": 4, "top_k": 2}
    assert warm_up(**sizes, device="cpu").result() == 0
    assert compile_ahead(lambda: pytest.fail("was called"), device="cpu").result() == 0
    with pytest.raises(ValueError, match=r"activation: expected one of .* got 'swigloo'"):
        warm_up(**sizes, activation="swigloo")
    with pytest.raises(ValueError, match="ranks: expected to divide 4 experts; got 3"):
        warm_up(**sizes, ranks=3)


def test_meta_tensors_launch_only_in_a_rehearsal():
    x = torch.empty(40, device="meta")
    assert sum_of_squares([x]).shape == ()
    with record() as launches:
        assert sum_of_squares([x, x.double()]).is_meta
        assert not torch.ones(3).sum().is_meta
    assert [launch.kernel.fn.__name__ for launch in launches] == ["sum_of_squares_kernel"]
    with pytest.raises(RuntimeError), record():
        raise RuntimeError
    assert sum_of_squares([x]).shape == ()


def test_what_is_assumed_is_a_threads_own():
    """Of two threads that rehearsed, the one that ended last put back the other's, for ever."""
    mine = plan.plan_of(torch.empty(0))
    other = plan.plan_for(plan.TARGETS["sm90"], torch.float32, 132, False)
    seen = []
    with plan.assume(lambda dtype: other):
        assert plan.plan_of(torch.empty(0)) == other
        thread = threading.Thread(target=lambda: seen.append(plan.plan_of(torch.empty(0))))
        thread.start()
        thread.join()
    assert [*seen, plan.plan_of(torch.empty(0))] == [mine, mine]


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True)])
def test_the_switch_turns_direct_launches_off(value, expected, monkeypatch):
    monkeypatch.setenv("MB_DIRECT_LAUNCH", value)
    spec = importlib.util.find_spec(direct.__name__)
    afresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(afresh)
    assert afresh._on is expected


def test_multiprocessors_and_time_are_left_to_collectives_as_the_variables_say(monkeypatch):
    sizes = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
    monkeypatch.setattr(plan, "current_target", lambda device: plan.TARGETS["sm90"])
    monkeypatch.setattr(plan, "_hopper", lambda device: False)

    def found(**variables):
        for name in ("MB_FREE_SMS", "MB_TILES_PER_PROGRAM"):
            monkeypatch.setenv(name, variables.get(name, ""))
        return plan.plan_on.__wrapped__(torch.device("cuda"), torch.bfloat16)

    alone, tile = found(), plan.INTERPRETER_TILE
    assert alone.programs(1000, tile) == alone.parts == 132
    beside = found(MB_FREE_SMS="16")
    assert (beside.programs(1000, tile), beside.parts) == (116, 132)
    assert found(MB_FREE_SMS="500").programs(1000, tile) == 1
    assert found(MB_TILES_PER_PROGRAM="5").programs(1000, tile) == 2 * 132
    for name, wrong in (("MB_FREE_SMS", "-16"), ("MB_TILES_PER_PROGRAM", "few")):
        with pytest.raises(ValueError, match=f"{name}: expected a whole number from 0 on; got"):
            found(**{name: wrong})


def test_a_private_name_that_is_gone_falls_back_to_the_public_call(launches, monkeypatch):
    call = X, 17, {"E": 4}
    monkeypatch.setattr(direct, "knobs", types.SimpleNamespace())
    with pytest.warns(UserWarning, match=r"has no attribute 'runtime'.*MB_DIRECT_LAUNCH=0"):
        assert who(launches(call, call)) == ["triton"] * 2


def test_what_cannot_be_compiled_ahead_is_compiled_as_it_is_launched(monkeypatch):
    monkeypatch.setattr(direct, "triton", types.SimpleNamespace(__version__="4.0.0"))
    listed = [launching.Launch(Kernel(), (1,), (X, 17), {"E": 4})]
    with pytest.warns(UserWarning, match=r"as they are launched: Triton 4\.0\.0 has changed"):
        assert launching.compile_beside(listed, 1) == 0


WITHOUT_PRIVATE_NAMES = """
import builtins
import sys
import warnings

import torch

HIDDEN = {"triton.knobs", "triton.runtime.driver", "triton.experimental.gluon.language",
          "torch._compile._disable_dynamo"}
ordinary = builtins.__import__


def without(name, globals=None, locals=None, fromlist=(), level=0):
    if (globals or {}).get("__name__", "").startswith("mb_kernels"):
        for gone in HIDDEN & {f"{name}.{part}" for part in fromlist or ()}:
            raise ImportError(f"cannot import {gone}")
    return ordinary(name, globals, locals, fromlist, level)


builtins.__import__ = without
kept = torch._C._AutoDispatchBelowAutograd, torch._C._are_functorch_transforms_active
del torch._C._AutoDispatchBelowAutograd, torch._C._are_functorch_transforms_active
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import mb_kernels
    from mb_kernels.runtime import launch, plan
torch._C._AutoDispatchBelowAutograd, torch._C._are_functorch_transforms_active = kept
assert sum("public call" in str(w.message) for w in said) == 2, [str(w.message) for w in said]
assert launch.direct is None
assert launch.compile_beside([], 1) == 0
assert not plan.gluon_serves()

sys.path.insert(0, sys.argv[1])
import every_op
import test_every_op_derivatives as derivatives
from mb_kernels.testing import assert_close

for name in ("topk_softmax", "router_losses", "expert_mlp_bias", "gmm", "linear_cross_entropy"):
    op = every_op.make_op(name)
    got = every_op.results(op, op.tensors)
    for what, value in every_op.results(op, op.tensors, call=op.twin, double=True).items():
        assert_close(f"{name}: {what}", got[what].float(), value.float())
    derivatives.test_second_derivatives_are_right_or_an_error(name)
    x = op.tensors[op.leaves[0]]
    try:
        torch.func.jvp(lambda x: op.call(**(op.tensors | {op.leaves[0]: x})), (x,), (x,))
    except NotImplementedError as refused:
        assert "forward-mode derivatives (jvp)" in str(refused)
    else:
        raise AssertionError(name)
x = torch.ones(2, 16)
try:
    torch.func.grad(lambda x: mb_kernels.topk_softmax(x, 1)[0].sum())(x)
except RuntimeError:
    print("as it should be")
"""


def test_without_torchs_and_tritons_private_names():
    """As a release without them would be: slower, said so, and right."""
    command = [sys.executable, "-c", WITHOUT_PRIVATE_NAMES, str(pathlib.Path(__file__).parent)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.endswith("as it should be\n"), run.stdout + run.stderr


def test_constexprs_come_last_in_every_kernel():
    """So that what is passed by position is what the device is given."""
    kernels = {k for m in kernel_modules() for k in vars(m).values() if isinstance(k, JITFunction)}
    entry = [k for k in kernels if k.fn.__name__.endswith("_kernel")]
    assert len(entry) > 20
    for kernel in entry:
        kinds = [p.is_constexpr for p in kernel.params]
        assert kinds == sorted(kinds), kernel.fn.__name__


def test_what_another_thread_launches_is_not_listed_but_runs(launches):
    logs = []
    with record() as listed:
        thread = threading.Thread(target=lambda: logs.append(launches((X, 17, {"E": 4}))))
        thread.start()
        thread.join()
        assert launches((X, 17, {"E": 4})) == []
    assert logs == [[("triton", (3, 2))]]
    assert len(listed) == 1


def test_a_table_is_made_on_the_host_whatever_the_default_device_is():
    with torch.device("meta"):
        made = tables.table([[16, 5], [32, 6], [48, 7]], [1, 2, 3], torch.device("cpu"))
    assert made.tolist() == [[16, 32, 48, 0], [5, 6, 7, 0], [1, 3, 6, 2**62]]


def test_products_and_sums_become_one_instruction_with_any_triton():
    """Of which Triton 3.9 warns that 3.10 does not do it by itself."""
    with record() as listed:
        sum_of_squares([torch.empty(64, device="meta")])
    assert all(launch.constants["enable_fp_fusion"] for launch in listed)
    assert listed


@pytest.mark.parametrize(
    "raised",
    [
        json.JSONDecodeError("Expecting value", "", 0),
        UnicodeDecodeError("utf-8", b"\xb9", 0, 1, "invalid start byte"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        RuntimeError("out of resources"),
    ],
    ids=["cut short", "overwritten", "of a binary", "another"],
)
def test_a_damaged_cache_is_named(monkeypatch, tmp_path, raised):
    class Unreadable(Kernel):
        def __getitem__(self, grid):
            def launch(*args, **constants):
                raise raised

            return launch

    # By its variable: a knob that is set does not look there any more, in later tests too.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        launching.launch(Unreadable(), (1,), 7, E=1)
    if caught.value is raised:
        assert "resources" in str(raised)
    else:
        assert f"remove the folder {tmp_path}." in str(caught.value)
        assert str(raised) in str(caught.value)
