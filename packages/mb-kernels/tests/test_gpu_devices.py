"""Kernels on a GPU that is not the current one."""

import pytest
import torch
from every_op import ON_A_GPU
from mb_kernels import (
    VocabularyShard,
    adamw_step,
    bin_tokens,
    expert_mlp,
    linear_cross_entropy,
    muon_momentum,
    muon_step,
    reference,
)
from mb_kernels.exchange import Layout, PeerMemory
from mb_kernels.testing import (
    TOLERANCES,
    Case,
    assert_close,
    expert_mlp_errors,
    make_inputs,
    run_expert_mlp,
)

pytestmark = [*ON_A_GPU, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_than_the_current():
    inputs = make_inputs(Case(300, 128, 64, 4, 2), dtype=torch.bfloat16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    got = run_expert_mlp(expert_mlp, inputs)
    with torch.cuda.device(1):
        want = run_expert_mlp(expert_mlp, inputs)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one():
    case = Case(300, 128, 384, 4, 2)
    errors = expert_mlp_errors(case, dtype=torch.bfloat16, device="cuda:1")
    assert max(errors.values()) <= TOLERANCES[torch.bfloat16], errors

    x, w = (torch.randn(n, 64, device="cuda:1").requires_grad_() for n in (50, 32))
    labels = torch.randint(32, (50,), device="cuda:1")
    shard = VocabularyShard(0, 32, lambda statistics: statistics[None])
    want = reference.linear_cross_entropy(x, w, labels)
    for options in ({}, {"shard": shard}):
        got = linear_cross_entropy(x, w, labels, **options)
        assert_close("loss", got, want)
        pairs = zip(torch.autograd.grad(got, (x, w)), torch.autograd.grad(
            want, (x, w), retain_graph=True), strict=True)  # fmt: skip
        for g, v in pairs:
            assert_close("gradient", g, v)

    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    results = []
    for device in ("cpu", "cuda:1"):
        weight, m, v = (torch.zeros(40, device=device) for _ in range(3))
        lists = ([t] for t in (weight, torch.ones_like(m), m, v, None, m.new_zeros(())))
        scalars = {"grad_scale": m.new_ones(()), "found_inf": m.new_zeros(())}
        adamw_step(*lists, **scalars, **options)
        results.append(weight.cpu())
    assert_close("weight", results[1], results[0])

    zero, one = torch.zeros((), device="cuda:1"), torch.ones((), device="cuda:1")
    weight, buffer = torch.zeros(2, 40, device="cuda:1")
    rates = {"momentum": 0.5, "grad_scale": one, "found_inf": zero, "dtype": torch.float32}
    direction = muon_momentum(torch.ones_like(weight), buffer, **rates)
    muon_step(weight, direction, None, size=2.0, decay=0.0, found_inf=zero)
    assert weight.tolist() == [-1.5] * 40
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("index", [0, 1])
def test_ranks_exchange_rows_on_a_device_that_is_not_the_current_one(index):
    if torch.cuda.device_count() <= index:
        pytest.skip("needs another GPU")
    device = torch.device("cuda", index)
    layout = Layout(ranks=2, tokens=7, hidden=16, words=2, dtype=torch.bfloat16)
    arenas = [torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    table = torch.tensor([arena.data_ptr() for arena in arenas], device=device)
    error = torch.zeros(3, dtype=torch.int32).pin_memory()
    memories = [PeerMemory(layout, r, a, table, error, polls=1000) for r, a in enumerate(arenas)]
    with torch.cuda.device(0):
        tokens = [torch.randn(n, 16, device=device).bfloat16() for n in (7, 4)]
        peers = [torch.arange(len(x), device=device).int()[:, None] % 2 for x in tokens]
        bins = [bin_tokens(p, 2) for p in peers]
        for memory, x, b in zip(memories, tokens, bins, strict=True):
            memory.push("tokens", x, b.tokens_per_expert_E, order_N=b.order_N)
        counts = [memory.wait("tokens") for memory in memories]
        for memory, c in zip(memories, counts, strict=True):
            memory.push("home", memory.rows("tokens") * (memory.rank + 1), c)
        for memory, x, p, b in zip(memories, tokens, peers, bins, strict=True):
            memory.wait("home")
            got = memory.sum_home(memory.rows("home"), p, b.inverse_N, b.offsets_E1)
            assert torch.equal(got, x * (p + 1))
    assert not error.any()
    assert [c.tolist() for c in counts] == [[4, 2], [3, 2]]
