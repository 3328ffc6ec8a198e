"""A GPT of a few thousand parameters, and its training in any layout of ranks.

Letters: B sequences, S tokens of a sequence, D hidden, H heads, G key-value heads, C width of a
head, R query heads of a group, V vocabulary, L layers.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mb_kernels import linear_cross_entropy
from mb_layers import MoE, MoEConfig, dMoE
from mb_parallel import (
    ParallelDims,
    apply_data_parallel,
    parallelize_experts,
    set_gradient_sync,
    set_micro_batch,
)
from mb_parallel.offload import Offload, apply_offload
from mb_parallel.pipeline_parallel import Pipeline, split_layers, stage_indices
from mb_parallel.recompute import apply_recompute
from mb_parallel.tensor_parallel import (
    ColumnParallel,
    SequenceParallel,
    SplitNorm,
    VocabParallelLoss,
    block_plan,
    embedding_plan,
    parallelize_tensors,
)
from torch import nn
from torch.distributed.tensor import DTensor

D, H, C, V, S = 16, 4, 4, 32, 8
L = 4  # layers, unless `Options` says otherwise


@dataclasses.dataclass(frozen=True)
class Options:
    """A layout, and what is trained in it."""

    dp_replicate: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero_stage: int = 3
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    kv_heads: int = 2
    tied: bool = True
    experts: int = 0  # 0: dense
    capacity_factor: float | None = None
    shared_expert: int | None = None
    latent: int | None = None  # between whose maps the experts compute
    gated: bool = False
    rms: bool = False
    qk_norm: str = ""  # over a "head", or the "width" of all
    padded: bool = False
    empty: bool = False  # the second micro-batch has no token that counts
    expert_bias: bool = False
    balance_over: str = "micro_batch"
    recompute: bool = False
    offload: bool = False
    frozen: str = ""  # parameters whose name holds this do not train
    dropout: float = 0.0
    layers: int = L
    steps: int = 2
    micro_batches: int = 4
    batch: int = 2
    loss_scale: float = 1.0
    first_lighter: int = 0
    device: str = "cpu"

    @property
    def dims(self):
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep}
        return ParallelDims(dp_replicate=self.dp_replicate, dp_shard=self.dp, **sizes)


class Output(NamedTuple):
    x: torch.Tensor | None
    losses: dict
    aux_loss: torch.Tensor | None
    metrics: dict


def norm(options, width=None):
    width = width or D
    return nn.RMSNorm(width) if options.rms else nn.LayerNorm(width)


class Attention(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.per_group = H // options.kv_heads
        self.qkv = nn.Linear(D, (H + 2 * options.kv_heads) * C)
        self.norm_q = self.norm_k = None
        self.over_width = options.qk_norm == "width"
        if options.qk_norm:
            self.norm_q = norm(options, H * C if self.over_width else C)
            self.norm_k = norm(options, options.kv_heads * C if self.over_width else C)
        self.out = nn.Linear(H * C, D)

    def forward(self, x_BSD):
        rows = self.qkv(x_BSD)
        R = min(self.per_group, rows.shape[2] // C - 2)  # ranks may share a group
        q, k, v = rows.unflatten(2, (-1, R + 2, C)).split([R, 1, 1], dim=3)
        q, k, v = (t.flatten(2, 3) for t in (q, k, v))
        if self.over_width:
            q = self.norm_q(q.flatten(2)).view_as(q)
            k = self.norm_k(k.flatten(2)).view_as(k)
        elif self.norm_q is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class DenseMLP(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.gate = nn.Linear(D, 2 * D) if options.gated else None
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D)

    def forward(self, x):
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, options, layer):
        super().__init__()
        self.norm_1, self.norm_2 = norm(options), norm(options)
        self.attention = Attention(options)
        self.dropout = nn.Dropout(options.dropout)
        if options.experts and layer % 2:
            config = MoEConfig(
                hidden_size=D,
                ffn_hidden_size=D,
                num_experts=options.experts,
                top_k=2,
                capacity_factor=options.capacity_factor,
                load_balancing_loss_weight=0.1,
                z_loss_weight=0.01,
                shared_expert_hidden_size=options.shared_expert,
                shared_expert_gate=options.shared_expert is not None,
                latent_size=options.latent,
                output_bias=True,
                mlp_bias=options.expert_bias,
                balance_over=options.balance_over,
                init_method_std=0.3,
            )
            self.mlp = (dMoE if options.capacity_factor is None else MoE)(config)
        else:
            self.mlp = DenseMLP(options)

    def forward(self, x, mask_BS):
        x = x + self.dropout(self.attention(self.norm_1(x)))
        if isinstance(self.mlp, DenseMLP):
            return x + self.dropout(self.mlp(self.norm_2(x))), None, {}
        output = self.mlp(self.norm_2(x), mask=mask_BS)
        return x + self.dropout(output.y), output.aux_loss, output.metrics


class Embedding(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, D), nn.Embedding(S, D)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, tokens_BS):
        positions_1S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None]
        return self.dropout(self.tokens(tokens_BS) + self.positions(positions_1S))


class Stack(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): Block(options, i) for i in range(options.layers)})
        self.norm = norm(options)


class GPT(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.embedding = Embedding(options)
        self.stack = Stack(options)
        self.head = nn.Linear(D, V, bias=False)
        if options.tied:
            self.head.weight = self.embedding.tokens.weight
        self.moe_layers = options.layers // 2
        self.cross_entropy = linear_cross_entropy

    def keep(self, layers, *, first, last):
        for name in list(self.stack.blocks):
            if int(name) not in layers:
                del self.stack.blocks[name]
        if not first:
            self.embedding = None
        if not last:
            self.stack.norm = self.head = None

    def forward(self, x, *, labels, weights, mask=None):
        if self.embedding is not None:
            x = self.embedding(x)
        aux_losses, metrics = [], []
        for block in self.stack.blocks.values():
            x, aux_loss, measured = block(x, mask)
            if aux_loss is not None:
                aux_losses.append(aux_loss)
                metrics.append(measured)
        aux_loss = torch.stack(aux_losses).sum() / self.moe_layers if aux_losses else None
        stacked = {k: torch.stack([m[k] for m in metrics]) for k in metrics[0]} if metrics else {}
        if self.head is None:
            return Output(x, {}, aux_loss, stacked)
        x = self.stack.norm(x)
        loss = self.cross_entropy(x, self.head.weight, labels, weights, reduction="sum")
        return Output(None, {"lm loss": loss}, aux_loss, stacked)


def plan(options):
    over_width = options.qk_norm == "width"
    qk_norm = {"qk_norm": SplitNorm(rms=options.rms)} if over_width else {}
    sizes = {"num_heads": H, "head_size": C}
    return {
        **embedding_plan(),
        **block_plan(options.kv_heads, **sizes, blocks="stack.blocks", **qk_norm),
        "stack.norm": SequenceParallel(),
        "head": ColumnParallel(enter=False, unit="vocabulary"),
        "": VocabParallelLoss(),
    }


def data(options):
    """The micro-batches of every step; a third of the labels has no weight, if padded."""
    generator = torch.Generator().manual_seed(7)
    B = options.batch
    for _ in range(options.steps):
        batches = []
        for index in range(options.micro_batches):
            text = torch.randint(V, (B, S + 1), generator=generator)
            tokens, labels = text[:, :-1], text[:, 1:]
            weights = torch.ones(B, S)
            batch = {"tokens": tokens, "labels": labels, "weights": weights}
            if options.padded:
                batch["mask"] = torch.rand(B, S, generator=generator) < 0.7
                if options.empty and index == 1:
                    batch["mask"].zero_()
                batch["weights"] = batch["mask"].float()
            batches.append(batch)
        total = sum(batch["weights"].sum() for batch in batches)
        for batch in batches:
            batch["weights"] = batch["weights"] / total
        yield [{k: v.to(options.device) for k, v in batch.items()} for batch in batches]


def build(options):
    torch.manual_seed(3)
    model = GPT(options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # no bias is zero, no norm is one
        for table in (model.embedding.tokens, model.embedding.positions):
            table.weight.mul_(0.3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not options.frozen or options.frozen not in name)
    return model.to(options.device)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()).cpu()


def call(model, batch):
    """A batch through a whole model."""
    return model(batch["tokens"], **{k: v for k, v in batch.items() if k != "tokens"})


def spread(options):
    """The mesh of a layout, this rank's stages of the model, and what runs several."""
    mesh = options.dims.build(options.device)
    count = options.pp * options.stages_per_rank
    layers = split_layers(options.layers, count, first_lighter=options.first_lighter)
    indices = [0]
    if options.pp > 1:
        indices = stage_indices(
            options.schedule,
            pp_size=options.pp,
            pp_rank=mesh.pp_rank,
            stages_per_rank=options.stages_per_rank,
        )
    stages = [build(options) for _ in indices]
    offload = Offload(torch.device(options.device), least_numbers=1)
    for stage, index in zip(stages, indices, strict=True):
        stage.keep(layers[index], first=index == 0, last=index == count - 1)
        parallelize_tensors(stage, mesh, plan(options), sequence_parallel=options.sequence_parallel)
        parallelize_experts(stage, mesh, sequence_parallel=options.sequence_parallel)
        blocks = stage.stack.blocks.values()
        if options.recompute:
            apply_recompute(blocks, "full")
        if options.offload:
            apply_offload(blocks, offload)
        apply_data_parallel(stage, mesh, blocks=blocks, zero_stage=options.zero_stage)
    pipeline = None
    if options.pp > 1:
        tied = {"embedding.tokens.weight": "head.weight"} if options.tied else None
        pipeline = Pipeline(
            stages,
            mesh,
            schedule=options.schedule,
            first_input="tokens",
            hidden_size=D,
            sequence_parallel=options.sequence_parallel,
            tied=tied,
        )
    return mesh, stages, pipeline


def accumulate(mesh, stages, pipeline, batches, *, loss_scale=1.0):
    """Gradients of this rank's micro-batches of a step; returns their loss, fp64, and metrics."""
    loss, metrics = torch.zeros((), dtype=torch.float64, device=batches[0]["tokens"].device), []
    mine = batches[mesh.dp_rank :: mesh.dp_size]
    if pipeline is not None:
        losses = pipeline.step(mine, loss_scale=loss_scale, measured=metrics.append)
        return loss + losses["lm loss"], metrics
    (model,) = stages
    for index, batch in enumerate(mine):
        set_gradient_sync(model, batch is mine[-1])
        set_micro_batch(model, index)
        output = call(model, batch)
        total = output.losses["lm loss"]
        if output.aux_loss is not None:
            total = total + output.aux_loss / len(batches)
        (total * loss_scale).backward()
        loss += output.losses["lm loss"].detach()
        metrics.append(output.metrics)
    return loss, metrics


def train(rank, world_size, options):
    """Losses per step, all metrics, every step's gradients and the parameters at the end."""
    mesh, stages, pipeline = spread(options)
    parameters = {name: p for stage in stages for name, p in stage.named_parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.01, momentum=0.9, foreach=False)
    history = {"dp": (mesh.dp_rank, mesh.dp_size)}
    history |= {key: [] for key in ("loss", "eval", "metrics", "grads")}
    for batches in data(options):
        loss, metrics = accumulate(mesh, stages, pipeline, batches, loss_scale=options.loss_scale)
        trained = {name: p for name, p in parameters.items() if p.requires_grad}
        for parameter in trained.values():
            parameter.grad /= options.loss_scale
        history["loss"].append(mesh.all_reduce(loss, "dp").item())
        history["metrics"].append(metrics)
        history["grads"].append({name: whole(p.grad) for name, p in trained.items()})
        optimizer.step()
        optimizer.zero_grad()
        if history["eval"]:  # once, and with a step after it
            continue
        mine = batches[mesh.dp_rank :: mesh.dp_size]
        for stage in stages:
            stage.eval()
        if pipeline is not None:
            loss = pipeline.evaluate(mine)["lm loss"]
        else:
            with torch.no_grad():
                loss = sum(call(stages[0], batch).losses["lm loss"] for batch in mine)
        history["eval"].append(mesh.all_reduce(loss, "dp").item())
        for stage in stages:
            stage.train()
    history["parameters"] = {name: whole(p.detach()) for name, p in parameters.items()}
    if pipeline is not None:
        built = [stage for *_, stages in pipeline._schedules.values() for stage in stages]
        assert not any(stage.graphs for stage in built)  # nothing is kept behind the backward pass
        history["copies"] = [
            name for name, p in parameters.items() if any(p is copy for copy in pipeline.copies)
        ]
    return history


def train_all(rank, world_size, *cases):
    """Several trainings in one start of the ranks."""
    histories = []
    for options in cases:
        print(f"rank {rank}: {options}", flush=True)  # shown where this one fails or hangs
        histories.append(train(rank, world_size, options))
    return histories


def relative_error(got, want):
    scale = want.double().norm().item()
    return (got.double() - want.double()).norm().item() / (scale if scale > 0 else 1.0)


def compare(results, want, tolerance=1e-5):
    """Hold every rank's history against one process; return the largest relative deviation."""
    worst = 0.0
    seen = set()
    for got in results:
        for key in ("loss", "eval"):
            for a, b in zip(got[key], want[key], strict=True):
                worst = max(worst, abs(a - b) / abs(b))
        pairs = list(zip(got["grads"], want["grads"], strict=True))
        pairs.append((got["parameters"], want["parameters"]))
        for mine, whole_model in pairs:
            for name, value in mine.items():
                if name == "head.weight" and name not in whole_model:
                    name = "embedding.tokens.weight"
                seen.add(name)
                expected = whole_model[name]
                assert value.shape == expected.shape, name
                error = relative_error(value, expected)
                assert error < tolerance, f"{name}: relative error {error:.1e}"
                worst = max(worst, error)
        dp_rank, dp = got["dp"]
        for mine, all_ranks in zip(got["metrics"], want["metrics"], strict=True):
            for measured, expected in zip(mine, all_ranks[dp_rank::dp], strict=True):
                assert sorted(measured) == sorted(expected)
                for name, value in expected.items():
                    assert measured[name].dtype == value.dtype, name
                    torch.testing.assert_close(
                        measured[name].cpu(), value.cpu(), rtol=tolerance, atol=tolerance / 10
                    )
    assert seen == set(want["parameters"])
    assert worst < tolerance, worst
    return worst


def slope(rank, world_size, options):
    """Of the loss along its gradient, in fp64 and with dropout: measured, and as it should be.

    The masks are drawn anew from the same seed for every evaluation, on each rank its own.
    """
    mesh = ParallelDims(tp=options.tp).build("cpu")
    model = build(options).double()
    parallelize_tensors(model, mesh, plan(options), sequence_parallel=options.sequence_parallel)
    (batch, *_), *_ = data(options)

    def loss():
        torch.manual_seed(11)
        return call(model, batch).losses["lm loss"]

    loss().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    expected = sum(whole(grad).square().sum() for grad in grads).item()
    values, step = [], 1e-4 / expected**0.5
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter += sign * step * grad
            values.append(loss().item())
    replicated = torch.cat([g.flatten() for g in grads if not isinstance(g, DTensor)])
    return (values[0] - values[1]) / (2 * step), expected, replicated, values[0]


def router_slope(rank, world_size, options):
    """Of a step's whole loss along a direction of all routers, in fp64: measured, and by backward.

    The whole loss is the sum of the micro-batches' losses and the mean of their auxiliary losses.
    """
    mesh = options.dims.build("cpu")
    stage = build(options).double()
    if options.pp > 1:
        stage.keep(split_layers(L, 2)[rank], first=rank == 0, last=rank == 1)
    parallelize_experts(stage, mesh)
    pipeline = None
    if options.pp > 1:
        settings = {"schedule": "1f1b", "first_input": "tokens", "hidden_size": D}
        pipeline = Pipeline([stage], mesh, dtype=torch.float64, **settings)
    batches, *_ = data(options)
    routers = {n: p for n, p in stage.named_parameters() if "router" in n}

    def whole_loss():
        loss, metrics = accumulate(mesh, [stage], pipeline, batches)
        for one in metrics:
            aux_L = 0.1 * one["load_balancing_loss"] + 0.01 * one["z_loss"]
            loss = loss + aux_L.sum() / (L // 2) / len(batches)
        return mesh.all_reduce(loss, "dp")

    whole_loss()
    along = torch.zeros((), dtype=torch.float64)
    for name, parameter in routers.items():
        generator = torch.Generator().manual_seed(len(name) + int(name.split("blocks.")[1][0]))
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        along += (parameter.grad * direction).sum()
        parameter.direction = direction
    for axis in ("dp", "pp"):
        mesh.all_reduce(along, axis)
    values, step = [], 1e-6
    for sign in (1, -2):
        with torch.no_grad():
            for parameter in routers.values():
                parameter += sign * step * parameter.direction
        values.append(whole_loss().item())
    return (values[0] - values[1]) / (2 * step), along.item()


def router_slopes(rank, world_size, *cases):
    return [router_slope(rank, world_size, options) for options in cases]
