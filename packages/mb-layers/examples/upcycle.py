"""Upcycling: a trained dense feed-forward becomes the experts of a dMoE (arXiv 2212.05055).

Every expert starts as a copy of the dense network. With renormalized routing weights, which sum to
one, the new layer computes just what the old one did, whatever the router says; from there the
experts grow apart.

    python examples/upcycle.py
"""

import torch
import torch.nn.functional as F
from mb_layers import MoEConfig, dMoE
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """A dense feed-forward as in Llama."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, ffn, bias=False)
        self.up_proj = nn.Linear(width, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def upcycle(dense: SwiGLU, *, num_experts: int, top_k: int) -> dMoE:
    """Return a dMoE that computes what `dense` does."""
    ffn, width = dense.gate_proj.weight.shape
    config = MoEConfig(
        hidden_size=width,
        ffn_hidden_size=ffn,
        num_experts=num_experts,
        top_k=top_k,
        activation="swiglu",
        renormalize=True,
    )
    layer = dMoE(config, device=dense.gate_proj.weight.device, dtype=dense.gate_proj.weight.dtype)
    with torch.no_grad():
        layer.experts.w1.copy_(torch.cat([dense.gate_proj.weight, dense.up_proj.weight]))
        layer.experts.w2.copy_(dense.down_proj.weight)
    return layer


def main() -> tuple[float, float]:
    torch.manual_seed(0)
    dense = SwiGLU(64, 128)
    layer = upcycle(dense, num_experts=8, top_k=2)
    x = torch.randn(4, 32, 64)
    before = (layer(x).y - dense(x)).abs().max().item()
    print(f"largest difference from the dense layer: {before:.1e}")

    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(20):
        y, aux_loss, _ = layer(x)
        loss = (y - x.sin()).square().mean() + aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    apart = (layer.experts.w1[0] - layer.experts.w1[1]).abs().mean().item()
    print(f"after 20 steps two experts differ by {apart:.1e} on average")
    return before, apart


if __name__ == "__main__":
    main()
