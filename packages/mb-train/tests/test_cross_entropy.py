"""Head and loss in one op against PyTorch's, on the CPU, in Triton's interpreter and on a GPU."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from mb_train.models.cross_entropy import linear_cross_entropy, loss_and_gradient

V = 61
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check(count, dtype, device="cpu", vocab=V):
    torch.manual_seed(0)
    x, w = torch.randn(count, 24, device=device), torch.randn(vocab, 24, device=device) / 4
    labels = torch.randint(vocab, (count,), device=device)
    got, wanted = [], []
    for out, loss_of in (
        (got, lambda a, b: linear_cross_entropy(a.to(dtype), b, labels)),
        (wanted, lambda a, b: F.cross_entropy(a @ b.t(), labels)),
    ):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        loss = loss_of(a, b)
        (3 * loss).backward()
        out += [loss.detach(), a.grad, b.grad]
    for name, a, b in zip(["loss", "dx", "dw"], got, wanted, strict=True):
        error = (a - b).norm() / b.norm()
        assert error < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("count", [1, 255, 257, 600])  # below, around and above a slice
def test_loss_and_gradients_match_pytorch(dtype, count):
    check(count, dtype)


def test_loss_without_gradients():
    x, w = torch.randn(5, 8), torch.randn(V, 8)
    labels = torch.arange(5)
    with torch.no_grad():
        loss = linear_cross_entropy(x, w, labels)
    torch.testing.assert_close(loss, F.cross_entropy(x @ w.t(), labels))


def test_a_frozen_head():
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(V, 8)
    linear_cross_entropy(x, w, torch.arange(5)).backward()
    got, x.grad = x.grad, None
    F.cross_entropy(x @ w.t(), torch.arange(5)).backward()
    torch.testing.assert_close(got, x.grad)


def compare_kernel(device):
    """The kernel against the plain path: fewer columns than a step, exactly one, and more."""
    from mb_train.models.cross_entropy_kernel import loss_and_gradient_by_kernel

    for dtype in (torch.float32, torch.float16):
        for rows, vocab in ((3, V), (2, 8192), (5, 9001)):
            torch.manual_seed(vocab)
            logits = (5 * torch.randn(rows, vocab)).to(dtype)
            labels = torch.randint(vocab, (rows,))
            labels[-1] = vocab - 1
            wanted = loss_and_gradient(logits.clone(), labels)
            got = loss_and_gradient_by_kernel(logits.to(device), labels.to(device))
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-5)


def test_the_kernel_in_tritons_interpreter():
    # The interpreter is chosen when triton is imported: hence another process.
    command = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    command += "import test_cross_entropy; test_cross_entropy.compare_kernel('cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", command], env=environment, check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_on_a_gpu(dtype):
    compare_kernel("cuda")
    check(8200, dtype, "cuda", vocab=9001)
