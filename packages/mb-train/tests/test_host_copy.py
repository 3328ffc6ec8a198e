"""A copy of tensors in host memory: of any layout, and of the moment of the call."""

import pytest
import torch
from mb_train.checkpoint.host_copy import HostCopier, pieces_of

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


def laid_out(shape, dtype):
    """Tensors of that shape: contiguous, transposed, with gaps, and every row the same memory."""
    x = torch.randint(2, shape).to(dtype)
    yield x
    if x.ndim == 2:
        yield x.mT.contiguous().mT
        yield torch.stack([x, x], dim=2)[:, :, 0]
        yield x[:1].expand(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (16, 8), (7, 33)])
def test_pieces_are_a_whole_tensor_of_any_layout(shape, dtype):
    for x in laid_out(shape, dtype):
        copy = torch.empty_like(x, device="cpu")
        for source, target in pieces_of(x, copy, 64):
            assert source.nbytes <= 64
            target.copy_(source)
        assert torch.equal(copy, x)
        assert copy.untyped_storage().nbytes() == x.numel() * x.itemsize


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [1, 4])
def test_copies_are_of_the_moment_of_the_call(monkeypatch, threads):
    monkeypatch.setattr("mb_train.checkpoint.host_copy._BUFFER_BYTES", 1024)
    copier = HostCopier(threads)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for shape in [(), (0, 3), (300, 401)]:
            for x in laid_out(shape, torch.float32):
                x = x.cuda() if x.stride() != (0, 1) else x[:1].cuda().expand(shape)
                torch.cuda._sleep(10_000_000)  # which the copies have to wait for
                x = x * 3
                copy = copier.copy(x)
                x.zero_()
                assert copy.device.type == "cpu"
                assert set(copy.unique().tolist()) <= {0.0, 3.0}
                assert torch.equal(copy > 0, copy == 3)
                assert x.numel() < 2 or copy.any()
