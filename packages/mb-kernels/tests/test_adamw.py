"""adamw_step on the CPU against torch.optim.AdamW, and the arguments it refuses."""

import contextlib
import math
import os
from functools import partial

import mb_kernels
import pytest
import torch
from mb_kernels.targets import TARGETS
from mb_kernels.targets.record import recorded_cases

SHAPES = [(5, 7), (3,), (2, 4, 6), (0, 2), ()]


def _run(steps, *, moment=torch.float32, beta2=0.999, scale=1.0, found_inf=(), seed=0):
    """Weights after `steps` of ours and of torch's, gradients given times `scale`."""
    generator = torch.Generator().manual_seed(seed)
    ours = [torch.randn(shape, generator=generator) for shape in SHAPES]
    theirs = [torch.nn.Parameter(w.clone()) for w in ours]
    # An eps that shows: 1e-8 could be subtracted, or left out.
    options = {"betas": (0.9, beta2), "eps": 1e-2, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(theirs, lr=0.0, **options)
    m, v = ([torch.zeros_like(w, dtype=moment) for w in ours] for _ in range(2))
    copies = [torch.empty_like(w, dtype=torch.bfloat16) for w in ours]
    t = [torch.zeros(()) for _ in ours]
    for step in range(steps):
        lr = 0.1 / (step + 1)
        grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
        # Another in each step: of gradients that are all as much too large the steps are the same.
        scale_now = scale ** (step % 3)
        flags = {
            "grad_scale": torch.tensor(scale_now),
            "found_inf": torch.tensor(2.0 if step in found_inf else 0.0),  # a sum over ranks
        }
        scaled = [g * scale_now for g in grads]
        mb_kernels.adamw_step(ours, scaled, m, v, copies, t, lr=lr, **options, **flags)
        if step in found_inf:
            continue
        for weight, grad in zip(theirs, grads, strict=True):
            weight.grad = grad
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return ours, theirs, copies, t


def test_twenty_steps_match_torch():
    ours, theirs, copies, t = _run(20)
    for a, b, copy in zip(ours, theirs, copies, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(copy, a.bfloat16())
    assert {float(x) for x in t} == {20.0}


def test_scaled_gradients_and_skipped_steps_match_torch():
    ours, theirs, _, t = _run(9, scale=2.0**15, found_inf=(0, 1, 5))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-6)
    assert {float(x) for x in t} == {6.0}


def test_bf16_moments_follow_fp32_ones():
    ours, theirs, *_ = _run(40, moment=torch.bfloat16)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0.02, atol=0.02)


def test_a_bf16_second_moment_shrinks_as_it_should():
    # Rounded to nearest it would stay where it is for ever.
    weight, zeros = torch.randn(4096), torch.zeros(4096)
    m, v = zeros.bfloat16(), torch.ones(4096, dtype=torch.bfloat16)
    flags = {"grad_scale": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    for t in range(100):
        mb_kernels.adamw_step(
            [weight], [zeros], [m], [v], [None], [torch.tensor(float(t))], **options, **flags
        )
    assert float(v.float().mean()) == pytest.approx(0.999**100, rel=2e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_bf16_moment_of_a_gpus_nan_is_nan(device):
    nan = torch.full((9,), 0x7FFFFFFF, dtype=torch.int32, device=device).view(torch.float32)
    weight, step, zero = (torch.zeros(n, device=device) for n in ((9,), (), ()))
    m, v = torch.zeros_like(weight).bfloat16(), torch.zeros_like(weight).bfloat16()
    options = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    flags = {"grad_scale": zero + 1, "found_inf": zero}
    mb_kernels.adamw_step([weight], [nan], [m], [v], [None], [step], **options, **flags)
    for x in (weight, m, v):
        assert x.isnan().all()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": torch.zeros(4, 6).bfloat16()}, "expected fp32; got torch.bfloat16"),
        ({"grad": torch.zeros(6, 4)}, r"expected \(4, 6\) on cpu"),
        ({"grad": torch.zeros(6, 4).T}, "its weight's strides"),
        ({"m": torch.zeros(4, 6).half()}, "got torch.float16"),
        ({"v": torch.zeros(4, 6).bfloat16()}, "expected torch.float32; got torch.bfloat16"),
        ({"copy": torch.zeros(4, 6)}, "expected torch.bfloat16 or torch.float16"),
        ({"weight": torch.zeros(4, 12)[:, ::2]}, r"if it has gaps .* by weight.contiguous\(\)"),
        ({"grad": None}, r"weights\[0\]: expected a gradient and two moments beside it; got None"),
        ({"v": None}, r"weights\[0\]: expected a gradient and two moments"),
    ],
    ids=[
        "16-bit-weight",
        "shape",
        "order",
        "fp16-moment",
        "unlike-moments",
        "copy",
        "gaps",
        "no-gradient",
        "no-moment",
    ],
)
def test_bad_tensors_are_named(change, says):
    given = {name: torch.zeros(4, 6) for name in ("weight", "grad", "m", "v")}
    given |= {"copy": None, "t": torch.zeros(()), **change}
    flags = {"grad_scale": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}
    with pytest.raises(ValueError, match=says):
        mb_kernels.adamw_step(
            *([tensor] for tensor in given.values()),
            lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, **flags,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"t": torch.zeros((), dtype=torch.int64)}, "steps: expected a float32 scalar .*int64"),
        ({"t": torch.zeros((), device="meta")}, "steps: expected .* on cpu; got .* on meta"),
        ({"grad_scale": torch.ones(4)}, r"grad_scale: expected a float32 scalar .*\(4,\)"),
        ({"grad_scale": 1.0}, "grad_scale: expected a float32 scalar tensor on cpu; got 1.0"),
        ({"found_inf": torch.zeros((), dtype=torch.bool)}, "found_inf: expected .*torch.bool"),
        ({"second": torch.float64}, r"weights\[1\]: expected torch.float32 on cpu, as the first"),
    ],
    ids=str,
)
def test_bad_scalars_and_several_dtypes_are_named(change, says):
    given = {"t": torch.zeros(()), "grad_scale": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}
    given |= change
    kinds = (torch.float32, given.pop("second", torch.float32))
    tensors = ([torch.zeros(4, dtype=dtype) for dtype in kinds] for _ in range(4))
    steps = [torch.zeros(()), given.pop("t")]
    with pytest.raises(ValueError, match=says):
        mb_kernels.adamw_step(
            *tensors, [None, None], steps,
            lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, **given,
        )  # fmt: skip


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="1 weights and 0, 0, 0, 0, 0"):
        mb_kernels.adamw_step(
            [torch.zeros(2)], [], [], [], [], [],
            lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0,
            grad_scale=torch.tensor(1.0), found_inf=torch.tensor(0.0),
        )  # fmt: skip


@pytest.mark.parametrize("shared", range(6), ids=["weight", "grad", "m", "v", "copy", "step"])
def test_only_a_gradient_may_be_shared(shared):
    # A step for all was counted up by each weight, and the correction for it wrong without a word.
    lists = [[torch.ones(4), torch.ones(4)] for _ in range(4)]
    lists += [[t.bfloat16() for t in lists[0]], [torch.zeros(()), torch.zeros(())]]
    lists[shared][1] = lists[shared][0]
    name = ("weights", None, "exp_avgs", "exp_avg_sqs", "copies", "steps")[shared]
    says = rf"{name}\[1\]: expected a tensor of its own.* got the memory of {name}\[0\]"
    with pytest.raises(ValueError, match=says) if name else contextlib.nullcontext():
        mb_kernels.adamw_step(
            *lists, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0,
            grad_scale=torch.tensor(1.0), found_inf=torch.tensor(0.0),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("role", "as_what"),
    [
        ("weights", "weights"),
        ("weights", "exp_avgs"),
        ("weights", "grads"),
        ("exp_avgs", "exp_avg_sqs"),
        ("exp_avgs", "grads"),
    ],
)
def test_one_memory_has_one_role(role, as_what):
    # `weight.data` is another tensor each time, of the same memory.
    names = ("weights", "grads", "exp_avgs", "exp_avg_sqs")
    lists = {name: [torch.ones(4), torch.ones(4)] for name in names}
    lists[as_what][1] = lists[role][0].data
    says = rf"{as_what}\[1\]: expected a tensor of its own; got the memory of {role}\[0\]"
    with pytest.raises(ValueError, match=says):
        mb_kernels.adamw_step(
            *lists.values(), [None, None], [torch.zeros(()), torch.zeros(())],
            lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0,
            grad_scale=torch.tensor(1.0), found_inf=torch.tensor(0.0),
        )  # fmt: skip


def test_weights_without_elements_share_nothing():
    lists = [[torch.ones(0, 3), torch.ones(0, 3)] for _ in range(4)]
    mb_kernels.adamw_step(
        *lists, [None, None], [torch.zeros(()), torch.zeros(())],
        lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0,
        grad_scale=torch.tensor(1.0), found_inf=torch.tensor(0.0),
    )  # fmt: skip


@pytest.mark.parametrize("betas", [(1.0, 0.999), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan)], ids=str)
def test_betas_that_make_no_step_are_refused(betas):
    lists = [[torch.ones(4)] for _ in range(4)]
    with pytest.raises(ValueError, match="betas: expected two numbers from 0 up to 1"):
        mb_kernels.adamw_step(
            *lists, [None], [torch.zeros(())], lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.0,
            grad_scale=torch.tensor(1.0), found_inf=torch.tensor(0.0),
        )  # fmt: skip
    assert all(torch.equal(tensor, torch.ones(4)) for (tensor,) in lists)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles kernels")
def test_aligned_tensors_move_in_16_bytes():
    # The compiler knows of an address in a table what it is told in the right place, or nothing.
    from mb_kernels.targets import cases, gate

    (case,) = recorded_cases(TARGETS["sm90"], {"": cases._small_ops()["AdamW, fp32, copy"]})
    ptx = gate._compile(case, TARGETS["sm90"]).asm["ptx"]
    # Four tensors in, three and a copy of half the bytes out, 8 elements a thread.
    assert ptx.count("ld.global.v4.b32") == 8
    assert ptx.count("st.global.v4.b32") == 7


@pytest.mark.gpu
@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("on_host", [False, True], ids=["", "moments-on-host"])
def test_kernel_matches_reference_on_a_gpu(moment, grad, shift, on_host):
    from mb_kernels import reference

    generator = torch.Generator("cuda").manual_seed(5)

    def tensors(dtype):
        flat = [torch.randn(torch.Size(s).numel() + shift, generator=generator, device="cuda")
                for s in (*SHAPES, (1000, 777), (70_000,))]  # fmt: skip
        return [x.to(dtype)[shift:] for x in flat]

    weights, grads, m = tensors(torch.float32), tensors(grad), tensors(moment)
    v = [x.square() for x in tensors(moment)]
    copies = tensors(torch.bfloat16)
    flags = {
        "grad_scale": torch.tensor(3.0, device="cuda"),
        "found_inf": torch.tensor(0.0, device="cuda"),
    }
    options = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    results = []
    for step in (mb_kernels.adamw_step, reference.adamw_step):
        lists = [[x.clone() for x in tensors] for tensors in (weights, grads, m, v, copies)]
        if shift:
            lists = [[torch.cat((x[:1], x))[1:] for x in tensors] for tensors in lists]
        if on_host:
            lists[2:4] = [[x.cpu().pin_memory() for x in moments] for moments in lists[2:4]]
        steps = [torch.tensor(4.0, device="cuda") for _ in weights]
        step(*lists, steps, **options, **flags)
        results.append((*lists, steps))
    for ours, theirs in zip(*results, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            tolerance = 1e-6 if a.dtype is torch.float32 else torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-6)


@pytest.mark.gpu
def test_moments_on_the_host_are_whole_when_the_call_returns():
    # The kernel writes them behind the host's back: without a wait these were zeros.
    size = 2**26
    weight, grad = torch.zeros(2, size, device="cuda")
    grad.fill_(2.0)
    m, v = (torch.zeros(size, pin_memory=True) for _ in range(2))
    flags = {"grad_scale": torch.tensor(1.0), "found_inf": torch.tensor(0.0)}
    mb_kernels.adamw_step(
        [weight], [grad], [m], [v], [None], [torch.zeros((), device="cuda")],
        lr=1e-3, betas=(0.5, 0.75), eps=1e-8, weight_decay=0.0,
        **{name: flag.cuda() for name, flag in flags.items()},
    )  # fmt: skip
    assert bool((m == 1.0).all())
    assert bool((v == 1.0).all())


@pytest.mark.gpu
def test_moments_on_the_host_are_pinned_and_not_for_graphs():
    weight, m, v = (torch.zeros(4, 6, device=device) for device in ("cuda", "cpu", "cpu"))
    one, zero, step = (torch.full((), value, device="cuda") for value in (1.0, 0.0, 0.0))

    def take_step(m, v):
        mb_kernels.adamw_step(
            [weight], [weight.clone()], [m], [v], [None], [step],
            lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, grad_scale=one, found_inf=zero,
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"exp_avgs\[0\]: .* or in pinned host memory.*got .* cpu"):
        take_step(m, v)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph),
        pytest.raises(ValueError, match="expected moments on the GPU while a CUDA graph"),
    ):
        take_step(m.pin_memory(), v.pin_memory())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"grad": torch.zeros(6, 4)}, r"buffer: expected.*\(6, 4\)"),
        ({"grad": torch.zeros(4, 6).double()}, "grad: expected torch.float32 or"),
        ({"grad": torch.zeros(4, 6).to_sparse()}, "grad: expected a dense tensor"),
        ({"grad": torch.zeros(4, 6), "dtype": torch.int8}, "dtype: expected torch.float32 or"),
        ({"buffer": torch.zeros(4, 6).bfloat16()}, "buffer: expected torch.float32"),
        ({"grad_scale": torch.ones(1)}, "grad_scale: expected a float32 scalar"),
        ({"grad_scale": 1.0}, "grad_scale: expected a float32 scalar tensor on cpu; got 1.0"),
        ({"weight": torch.zeros(4, 6).half()}, "weight: expected torch.float32"),
        ({"update": torch.zeros(4, 5)}, "update: expected.*4, 6"),
        ({"copy": torch.zeros(4, 6)}, "copy: expected torch.bfloat16"),
    ],
)
def test_muons_passes_refuse(change, says):
    x, one = torch.zeros(4, 6), torch.ones(())
    before = {"grad": x, "buffer": x, "grad_scale": one}
    after = {"weight": x, "update": x, "copy": None}
    run = partial(mb_kernels.muon_step, **(after | change), size=0.1, decay=0.0, found_inf=one)
    if change.keys() & before.keys():
        run = partial(mb_kernels.muon_momentum, **(before | change), momentum=0.9, found_inf=one)
    with pytest.raises(ValueError, match=says):
        run()


@pytest.mark.parametrize("momentum", [1.0, -0.1, math.nan])
def test_a_momentum_that_makes_no_step_is_refused(momentum):
    x, one = torch.ones(4, 6), torch.ones(())
    with pytest.raises(ValueError, match="momentum: expected a number from 0 up to 1"):
        mb_kernels.muon_momentum(x, x.clone(), momentum=momentum, grad_scale=one, found_inf=one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_muons_direction_is_contiguous(dtype):
    flags = {"grad_scale": torch.ones(()), "found_inf": torch.zeros(())}
    grad, buffer = torch.randn(6, 4).T, torch.zeros(4, 6)
    got = mb_kernels.muon_momentum(grad, buffer, momentum=0.9, **flags, dtype=dtype)
    assert got.is_contiguous()
    assert torch.equal(
        got,
        mb_kernels.muon_momentum(grad.contiguous(), buffer * 0, momentum=0.9, **flags, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("grad", "says"),
    [
        (torch.zeros(4, 5), r"grad: expected .*\(4, 6\) on cpu; got .*\(4, 5\)"),
        (torch.zeros(4, 6).double(), "grad: expected torch.float32 or"),
        (torch.zeros(4, 6, device="meta"), "grad: expected .* on cpu; got .* on meta"),
        (torch.zeros(4, 6).to_sparse(), "grad: expected a dense tensor"),
    ],
)
def test_accumulate_grad_refuses(grad, says):
    with pytest.raises(ValueError, match=says):
        mb_kernels.accumulate_grad(torch.zeros(4, 6), grad)
    with pytest.raises(ValueError, match=r"total: expected torch.float32 or"):
        mb_kernels.accumulate_grad(torch.zeros(4, 6).long(), torch.zeros(4, 6))
