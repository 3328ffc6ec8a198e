"""Runs the code of the Hopper kernels on a CPU, with a simulation of the chip.

Triton's interpreter cannot run Gluon. Here the Python functions behind the kernels run unchanged,
with threads for groups of warps, and tensors for shared memory. Asynchronous operations finish as
late as the chip may finish them: a copy arrives after a random time and in any order, a product
reads its operands only when it is waited for. So a block that is refilled too early, a barrier with
a wrong count or phase, or a row of another expert gives a wrong number or a deadlock.

Letters: N rows, D hidden, F ffn width, E experts.
"""

import itertools
import random
import threading
import time
import types

import pytest
import torch
from mb_kernels import activation as functions
from mb_kernels.activation import activate, is_glu, parse
from mb_kernels.testing import assert_close

triton = pytest.importorskip("triton")
hopper = pytest.importorskip("mb_kernels.expert_mlp.hopper.core")
from mb_kernels.expert_mlp.hopper import dact as hopper_dact  # noqa: E402
from mb_kernels.expert_mlp.hopper import up as hopper_up  # noqa: E402
from mb_kernels.runtime.plan import Plan, assume  # noqa: E402
from mb_kernels.runtime.scales import Scales  # noqa: E402
from mb_kernels.targets import TARGETS, TILES  # noqa: E402

PATIENCE = 20  # seconds at a barrier before it counts as a deadlock


class Scalar(int):
    """A number that no augmented assignment changes in place, with a tensor's ``to``."""

    def to(self, dtype):
        return self


def _keep_scalar(operation):
    def wrapped(self, other):
        result = operation(self, other)
        return Scalar(result) if isinstance(result, int) else result

    return wrapped


for _name in ("add", "sub", "mul", "floordiv", "mod", "radd", "rsub", "rmul"):
    setattr(Scalar, f"__{_name}__", _keep_scalar(getattr(int, f"__{_name}__")))


class Pointer:
    def __init__(self, storage, offset=0):
        self.storage, self.offset = storage, offset
        self.dtype = types.SimpleNamespace(element_ty=storage.dtype)

    def __add__(self, offset):
        return Pointer(self.storage, self.offset + offset)


class Shared:
    """Shared memory: a tensor, seen through views."""

    def __init__(self, values):
        self.values = values
        self.shape, self.dtype = list(values.shape), values.dtype

    def index(self, i):
        return Shared(self.values[int(i)])

    def reshape(self, shape):
        return Shared(self.values.view(shape))

    def _reinterpret(self, dtype, shape, layout):
        """Of [1, 2, rows, columns]: blocks of 64 columns, all rows of one and then of the next."""
        _, parts, rows, columns = self.shape
        blocks = self.values.view(parts, rows, columns // 64, 64).permute(1, 2, 0, 3)
        return Shared(blocks.reshape(shape))

    reinterpret = _reinterpret  # its name from Triton 3.9 on

    def slice(self, start, length):
        return Shared(self.values[start : start + length])

    def permute(self, order):
        return Shared(self.values.permute(order))

    def load(self, layout):
        return self.values.clone()

    def store(self, values):
        assert values.dtype is self.dtype
        self.values.copy_(values)


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes are in."""

    def __init__(self):
        self.count = self.pending = self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def update(self, *, arrivals=0, announced=0):
        with self.changed:
            assert self.count > 0, "barrier used before it was initialised"
            self.pending -= arrivals
            self.bytes += announced
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase += 1
                self.pending = self.count
                self.changed.notify_all()

    def wait(self, parity):
        with self.changed:
            passed = self.changed.wait_for(lambda: self.phase % 2 != parity, PATIENCE)
        assert passed, "deadlock"


class Barriers:
    def __init__(self, count):
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, i):
        return self.barriers[int(i)]


class Descriptor:
    """A tensor descriptor: blocks read zeros outside ``shape``."""

    def __init__(self, plain):
        self.storage = plain.base.detach().reshape(-1)
        self.shape, self.strides = plain.shape, plain.strides
        self.block_shape, self.dtype, self.layout = plain.block_shape, plain.base.dtype, None
        size = torch.Size(self.block_shape).numel() * self.storage.element_size()
        self.block_type = types.SimpleNamespace(nbytes=size)

    def read(self, coordinates):
        inside, address = torch.tensor(True), torch.tensor(0)
        for axis, (first, size) in enumerate(zip(coordinates, self.block_shape, strict=True)):
            at = torch.arange(size) + int(first)
            shape = [-1 if i == axis else 1 for i in range(len(self.block_shape))]
            inside = inside & ((at >= 0) & (at < self.shape[axis])).view(shape)
            address = address + (at * self.strides[axis]).view(shape)
        return torch.where(inside, self.storage[_within(self.storage, address, inside)], 0)


def _within(storage, at, mask):
    """``at`` where ``mask`` is true, all of it inside the storage, and 0 elsewhere."""
    at = torch.where(mask, at, 0)
    assert ((at >= 0) & (at < len(storage))).all(), "an access outside the tensor"
    return at


class Accumulator:
    def __init__(self, value):
        self.value, self.waiting = value, []

    def finish(self, left):
        while len(self.waiting) > left:
            a, b, use_acc = self.waiting.pop(0)
            product = a.values.float() @ b.values.float()
            self.value = self.value + product if use_acc else product
        return self


class CopyEngine:
    """Copies in any order, each after a while."""

    def __init__(self):
        self.jobs, self.lock, self.running = [], threading.Lock(), True
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def copy(self, descriptor, coordinates, barrier, block):
        assert block.shape == list(descriptor.block_shape)
        with self.lock:
            self.jobs.append((descriptor, coordinates, barrier, block))

    def run(self):
        chance = random.Random(0)
        while self.running or self.jobs:
            time.sleep(chance.random() * 2e-4)
            with self.lock:
                job = self.jobs.pop(chance.randrange(len(self.jobs))) if self.jobs else None
            if job:
                descriptor, coordinates, barrier, block = job
                block.store(descriptor.read(coordinates))
                barrier.update(announced=-descriptor.block_type.nbytes)


class Language:
    """What the kernels use of ``gluon.language`` and, by ``locate``, of ``triton.language``."""

    int64, float32 = torch.int64, torch.float32
    constexpr = None
    where = staticmethod(lambda condition, a, b: a if condition else b)
    sum = staticmethod(lambda x, axis: x.sum(axis))
    zeros = staticmethod(lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype))
    arange = staticmethod(lambda start, end, layout: torch.arange(start, end, dtype=torch.int32))
    static_range = staticmethod(range)
    convert_layout = staticmethod(lambda x, layout: x)
    BlockedLayout = SliceLayout = NVMMADistributedLayout = staticmethod(lambda *a, **k: None)
    NVMMASharedLayout = types.SimpleNamespace(get_default_for=lambda *a: None)

    def __init__(self, program, programs):
        self.program_id = lambda axis: Scalar(program)
        self.num_programs = lambda axis: programs

    @staticmethod
    def minimum(a, b):
        return torch.clamp(a, max=b) if isinstance(a, torch.Tensor) else min(a, b)

    @staticmethod
    def load(pointer, mask=None, other=None):
        at = torch.as_tensor(pointer.offset)
        given = torch.tensor(True) if mask is None else mask
        values = pointer.storage[_within(pointer.storage, at, given)]
        if at.ndim == 0:
            return Scalar(values)
        return values if mask is None else torch.where(mask, values, values.new_tensor(other))

    @staticmethod
    def store(pointer, value, mask=None):
        at, value = torch.broadcast_tensors(pointer.offset, value)
        mask = torch.ones_like(at, dtype=torch.bool) if mask is None else mask.expand_as(at)
        assert value.dtype is pointer.storage.dtype
        pointer.storage[_within(pointer.storage, at[mask], torch.tensor(True))] = value[mask]

    @staticmethod
    def allocate_shared_memory(dtype, shape, layout):
        if layout == "barrier":
            return Barriers(shape[0]) if len(shape) == 2 else Barrier()
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    @staticmethod
    def warp_specialize(partitions, warps, registers):
        failures = []

        def run(function, arguments):
            try:
                function(*arguments)
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=run, args=partition) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


def simulate(kernel, grid, *arguments, **constants):
    """Stands in for ``launch``."""
    del constants["num_warps"], constants["maxnreg"]
    arguments = [
        Pointer(a.detach().view(-1)) if isinstance(a, torch.Tensor) else a for a in arguments
    ]
    for program in range(grid[0]):
        engine = CopyEngine()
        language = Language(program, grid[0])
        names = {
            "gl": language,
            "tl": language,
            "range": lambda *bounds: map(Scalar, range(*bounds)),
            "piece": lambda x, i, pieces: x.value.chunk(pieces, dim=1)[i],
            "activate": lambda z, kind, ptx: functions._plain(z, kind),
            "activate_with_derivative": value_and_slope,
            "up_factor": lambda up, kind, ptx: functions._factor(up, kind),
            "up_gradient": up_gradient,
            "pairs": lambda x: (x[:, ::2], x[:, 1::2]),
            "_unpack": lambda words, kind: (
                words.view(kind).float().unflatten(-1, (-1, 2)).unbind(-1)
            ),
            "_pack": lambda low, high, kind: (
                torch.stack([low, high], dim=-1).to(kind).flatten(-2).view(torch.int32)
            ),
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=lambda: "barrier",
                init=initialise,
                expect=lambda barrier, n: barrier.update(arrivals=1, announced=n),
                arrive=lambda barrier: barrier.update(arrivals=1),
                wait=lambda barrier, parity: barrier.wait(int(parity)),
            ),
            "async_load": engine.copy,
            "warpgroup_mma": begin_product,
            "warpgroup_mma_init": lambda x: x if isinstance(x, Accumulator) else Accumulator(x),
            "warpgroup_mma_wait": lambda left, deps: deps[0].finish(left),
        }
        for name, value in [*vars(hopper).items(), *kernel.fn.__globals__.items()]:
            if isinstance(value, triton.language.constexpr):
                names[name] = value.value
            elif isinstance(value, triton.runtime.JITFunction) and name not in names:
                function = value.fn
                names[name] = types.FunctionType(function.__code__, names, name)
        try:
            names[kernel.fn.__name__](*arguments, **constants)
        finally:
            engine.running = False
            engine.thread.join()


def initialise(barrier, count):
    barrier.count = barrier.pending = count


def begin_product(a, b, acc, *, use_acc, is_async):
    acc.waiting.append((a, b, bool(use_acc)))
    return acc


def value_and_slope(z, kind, ptx):
    z = z.detach().requires_grad_()
    value = functions._plain(z, kind)
    return value.detach(), torch.autograd.grad(value.sum(), z)[0]


def up_gradient(d_factor, up, factor, kind):
    up = up.detach().requires_grad_()
    return torch.autograd.grad(functions._factor(up, kind), up, d_factor)[0]


@pytest.fixture
def simulated(request, monkeypatch):
    monkeypatch.setattr(hopper, "launch", simulate)
    monkeypatch.setattr(hopper, "with_layout", Descriptor)
    with assume(lambda dtype: Plan(TARGETS["sm90"], dtype, request.param, True, True)):
        yield


def tile_list(offsets, block_m):
    """As ``schedule`` lists them, for rows of experts alone."""
    tiles = [
        [e, row, end, 0]
        for e, (start, end) in enumerate(itertools.pairwise(offsets))
        for row in range(start, end, block_m)
    ]
    tiles += [[0, 0, 0, 0]] * 2
    tiles[0][3] = tiles[1][3] = len(tiles) - 2
    return torch.tensor(tiles, dtype=torch.int32)


OFFSETS = {"ragged": [0, 150, 150, 151, 420], "halves": [0, 64, 129, 257, 450], "none": [0, 0, 0]}


# Activation, ffn, whether the weights lie transposed, and OFFSETS.
LAYOUTS = [
    *itertools.product(
        ("swiglu-256", "geglu-304", "gelu-512", "relu-272"), (False,), ("ragged", "halves", "none")
    ),
    ("swigluoai-304", True, "ragged"),
    ("gelu-272", True, "halves"),
    ("swiglu(alpha=1.7, limit=7, offset=1, interleaved)-304", True, "ragged"),
    ("geglu(interleaved)-256", False, "halves"),
]


# Programs, a layout, whether h is saved, and whether there are scales: any two of the first three
# meet, and with every layout each of the others.
RUNS = [
    pytest.param(
        *(programs, layout, (i + j) % 2 == 0, (i + j // 2) % 2 == 0),
        marks=[pytest.mark.slow] * ((i + j) % 3 > 0),  # a number of programs for each layout
    )
    for i, layout in enumerate(LAYOUTS)
    for j, programs in enumerate((1, 3, 50))
]


@pytest.fixture
def layout(request):
    activation_ffn, transposed, offsets = request.param
    activation, ffn = activation_ffn.rsplit("-", 1)
    return activation, int(ffn), transposed, OFFSETS[offsets]


def scales_of(generator, rows, dropped, experts, columns):
    """Scales as of 8-bit codes; rows of dropped slots have none."""
    of_rows = torch.rand(rows + dropped, generator=generator)
    of_columns = torch.rand(experts, columns, generator=generator)
    of_rows[rows:] = float("nan")
    return Scales(of_rows + 0.5, of_columns + 0.5, torch.bfloat16)


def _words(value):
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.sweep(2)
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("simulated", "layout", "save_h", "scaled"), RUNS, ids=_words, indirect=["simulated", "layout"]
)
def test_up(layout, save_h, scaled):
    activation, ffn, transposed, offsets = layout
    hidden, experts, rows, dropped = 208, len(offsets) - 1, offsets[-1], 5
    columns = 2 * ffn if is_glu(activation) else ffn
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows + dropped, hidden, generator=generator).bfloat16()
    w1 = torch.randn(experts, columns, hidden, generator=generator).bfloat16()
    x[rows:] = float("nan")  # rows of dropped slots, which no expert computes
    h = torch.full((rows + dropped, columns) if save_h else (0,), float("nan")).bfloat16()
    a = torch.full((rows + dropped, ffn), float("nan")).bfloat16()
    tile = TILES["up_hopper"]["sm90"]
    tiles = tile_list(offsets, tile.block_m)
    bias = activation.startswith("ge") or "1.7" in activation
    b1 = 16 * torch.randn(experts, columns, generator=generator) if bias else None
    stored = w1.mT.contiguous() if transposed else w1
    scales = scales_of(generator, rows, dropped, experts, columns) if scaled else None
    options = {"transposed": transposed, "save_h": save_h, "tile": tile, "scales": scales}
    hopper_up.up(x, stored, b1, tiles, h, a, parse(activation), **options)

    expert = torch.repeat_interleave(torch.tensor(offsets).diff())
    z = torch.einsum("nd,nfd->nf", x[:rows].float(), w1.float()[expert])
    z = z * scales.rows[:rows, None] * scales.columns[expert] if scaled else z
    z = z + b1[expert] if bias else z
    assert_close("a", a[:rows], activate(z, activation), dtype=torch.bfloat16)
    assert a[rows:].isnan().all()
    if save_h:
        assert_close("h", h[:rows], z, dtype=torch.bfloat16)
        assert h[rows:].isnan().all()


@pytest.mark.sweep(2)
@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("simulated", "layout", "scaled"),
    [
        pytest.param(*run.values[:2], run.values[3], marks=run.marks)
        for i, run in enumerate(RUNS)
        if i % 4
    ],  # two or three ways for each layout
    ids=_words,
    indirect=["simulated", "layout"],
)
def test_dact(layout, scaled):
    activation, ffn, transposed, offsets = layout
    hidden, experts, rows, dropped = 208, len(offsets) - 1, offsets[-1], 5
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    columns = 2 * ffn if is_glu(activation) else ffn
    do, h = normal(rows + dropped, hidden), 4 * normal(rows + dropped, columns)
    w2 = normal(experts, hidden, ffn)
    weights = torch.rand(rows + dropped, 1, generator=generator)
    order = torch.randperm(rows + dropped, generator=generator).int()
    tile = TILES["dact_hopper"]["sm90"]
    dh, a = (torch.full_like(t, float("nan")) for t in (h, h[:, :ffn]))
    dh, a = dh.contiguous(), a.contiguous()
    partials = torch.full((-(-ffn // tile.block_n), rows + dropped), float("nan"))
    tiles = tile_list(offsets, tile.block_m)
    stored = w2.mT.contiguous() if transposed else w2
    scales = scales_of(generator, rows, dropped, experts, ffn) if scaled else None
    hopper_dact.dact(
        *(do, stored, order, weights, tiles, h, dh, a, partials, parse(activation)),
        transposed=transposed,
        tile=tile,
        scales=scales,
    )

    expert = torch.repeat_interleave(torch.tensor(offsets).diff())
    q = torch.einsum("nd,ndf->nf", do[:rows].float(), w2.float()[expert])
    q = q * scales.rows[:rows, None] * scales.columns[expert] if scaled else q
    s = weights[order.long()[:rows]]
    z = h[:rows].float().requires_grad_()
    act = activate(z, activation)
    assert_close("a", a[:rows], s * act, dtype=torch.bfloat16)
    assert_close("dh", dh[:rows], torch.autograd.grad(act, z, s * q)[0], dtype=torch.bfloat16)
    assert_close("partials", partials.sum(0)[:rows], (q * act).sum(1), dtype=torch.bfloat16)
    for written in (dh, a, partials.T):
        assert written[rows:].isnan().all()
