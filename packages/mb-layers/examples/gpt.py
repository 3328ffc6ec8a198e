"""A GPT whose feed-forward is a dMoE, in forty lines, learning to count in steps.

python examples/gpt.py
"""

import torch
import torch.nn.functional as F
from mb_layers import MoEConfig, dMoE
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.moe = dMoE(
            MoEConfig(hidden_size=width, ffn_hidden_size=2 * width, num_experts=8, top_k=2)
        )

    def forward(self, x):
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        y, aux_loss, metrics = self.moe(self.norms[1](x))
        return x + y, aux_loss, metrics


class GPT(nn.Module):
    def __init__(
        self, vocab: int, width: int = 64, heads: int = 4, layers: int = 2, length: int = 32
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        aux_losses = []
        for block in self.blocks:
            x, aux_loss, metrics = block(x)
            aux_losses.append(aux_loss)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return loss + torch.stack(aux_losses).mean(), metrics


def main(steps: int = 60) -> list[float]:
    torch.manual_seed(0)
    model = GPT(vocab=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        start, stride = torch.randint(64, (16, 1)), torch.randint(1, 5, (16, 1))
        ids = (start + stride * torch.arange(33)) % 64
        loss, metrics = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            load = metrics["load_imbalance"].item()
            print(f"step {step:3d}  loss {loss.item():.3f}  fullest expert {load:.2f} x the mean")
    return losses


if __name__ == "__main__":
    main()
