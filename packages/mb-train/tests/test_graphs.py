"""`--cuda-graph`: what cannot be captured is refused; a graph trains as what it holds."""

import contextlib
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from mb_layers import MoE, MoEConfig, dMoE
from mb_parallel import ParallelDims, apply_data_parallel, parallelize_experts
from mb_parallel.expert_parallel import (
    AllGatherDispatcher,
    GlobalCapacity,
    PeerBuffers,
    PeerDispatcher,
)
from mb_parallel.optimizer import (
    SGD,
    AdamW,
    GradScaler,
    clip_and_step,
    decay_groups,
    hold_working_copies,
)
from mb_parallel.random import seed_micro_batch
from mb_parallel.shards import local
from mb_parallel.testing import run_ranks
from mb_train.assembly import graphs
from mb_train.assembly.execute import Sequential, Work, weigh
from mb_train.assembly.graphs import WARM_UP, Graphed, check_capturable, peer_buffers
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.models.transformer import Block
from mb_train.tasks.make import make_task

SIZES = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 64,
    "micro_batch_size": 2, "train_iters": 1, "lr": 1e-3, "ffn_hidden_size": 96,
    "hidden_dropout": 0.1, "attention_dropout": 0.0,
}  # fmt: skip
MOE = {"moe_num_experts": 4, "moe_top_k": 2, "swiglu": True, "moe_jitter_eps": 0.01}
DROPPING = {"moe_capacity_factor": 1.0}
V = 128


@pytest.mark.parametrize(
    ("change", "device", "dims", "says"),
    [
        ({}, "cpu", {}, "a GPU for --cuda-graph, got --device cpu"),
        ({}, "cuda", {"dp_shard": 2}, "--zero-stage 0 with several ranks for --cuda-graph, got 1,"),
        ({"zero_stage": 0}, "cuda", {"tp": 2}, "no tensor or pipeline parallelism"),
        (
            MOE | DROPPING | {"zero_stage": 0, "moe_drop_policy": "probability"},
            "cuda",
            {"dp_shard": 2, "ep": 2},
            "--moe-drop-policy position over several ranks for --cuda-graph, got probability",
        ),
        (
            MOE | {"zero_stage": 0, "moe_dispatcher": "all_to_all"},
            "cuda",
            {"dp_shard": 2, "ep": 2},
            "--moe-dispatcher peer for --cuda-graph, got all_to_all",
        ),
        (
            MOE | {"zero_stage": 0},
            "cuda",
            {"dp_shard": 8, "ep": 8},
            "--moe-dispatcher peer for --cuda-graph, got auto, which takes all_to_all on 8 ranks,",
        ),
        (
            MOE | {"zero_stage": 0, "moe_row_policy": "exact"},
            "cuda",
            {"dp_shard": 2, "ep": 2},
            "--moe-row-policy worst",
        ),
        (
            MOE | {"zero_stage": 0, "moe_rebalance_interval": 2},
            "cuda",
            {"dp_shard": 2, "ep": 2},
            "no --moe-rebalance-interval",
        ),
        ({"zero_stage": 0}, "cuda", {"dp_shard": 2, "cp": 2}, "no context parallelism"),
        ({"recompute_granularity": "full"}, "cuda", {}, "no recompute"),
        (MOE | {"moe_balance_over": "global_batch"}, "cuda", {}, "another --moe-balance-over"),
        (MOE | {"moe_mlp_impl": "sparse"}, "cuda", {}, "--moe-mlp-impl grouped"),
    ],
)
def test_what_cannot_be_one_graph_is_refused(change, device, dims, says):
    config = TrainConfig(**SIZES | change, cuda_graph=True)
    with pytest.raises(ValueError, match=f"Expected {says}"):
        check_capturable(config, torch.device(device), ParallelDims(**dims))
    check_capturable(TrainConfig(**SIZES | MOE), torch.device("cuda"), ParallelDims())
    dropping = TrainConfig(**SIZES | MOE | DROPPING, zero_stage=0)
    for ranks in (2, 8):  # whose rows a capacity bounds
        check_capturable(dropping, torch.device("cuda"), ParallelDims(dp_shard=ranks, ep=ranks))


def test_the_command_says_so_before_it_writes(tmp_path, capsys):
    folder = tmp_path / "run"
    words = ["--recipe=quickstart", "--cuda-graph", "--device=cpu", "--save", str(folder)]
    assert main(words) == 2
    assert "Expected a GPU for --cuda-graph" in capsys.readouterr().err
    assert not (folder / "config.toml").exists()


def arrays_of(task, model, lengths, generator):
    """A batch of random tokens; a sentence model's samples have `lengths`."""
    if model == "gpt":
        return task.collate([*generator.integers(V, size=(len(lengths), 65))])

    def row(length, name, valid, size=64):
        text, there = np.zeros((2, size), np.int64)
        text[:length], there[:length] = generator.integers(V, size=length), 1
        return {name: text, valid: there}

    def sample(n):
        if model == "bert":
            labels = np.where(np.arange(64) % 7 == 0, 3, -1)
            found = row(n, "text", "padding_mask") | {"is_random": n % 2}
            types = found["padding_mask"] * (np.arange(64) > n // 2)
            return found | {"types": types, "labels": np.where(found["padding_mask"], labels, -1)}
        if model == "t5":
            found = row(n, "text_enc", "enc_mask") | row(n // 2, "text_dec", "dec_mask", 32)
            return found | {"labels": found["text_dec"], "loss_mask": found["dec_mask"]}
        query = row(n // 3 + 1, "query_tokens", "query_pad_mask")
        return query | row(n, "block_tokens", "block_pad_mask")

    return task.collate([sample(n) for n in lengths])


def trained(
    kind, fields, *, dtype, compiled=False, counts=(4, 2), steps=WARM_UP + 16, device="cuda"
):
    """Losses, norms and weights of steps of so many micro-batches in turn, of several shapes."""
    torch.manual_seed(3)
    config = TrainConfig(**SIZES | fields)
    mesh = ParallelDims().build(device)
    task = make_task(config, Tokenizer(), vocab_size=V, mesh=mesh)
    with torch.device(device):
        model = task.build_model(compute_dtype=dtype)
    if compiled:
        for block in model.modules():
            if isinstance(block, Block):
                block.compile()
    copies = hold_working_copies([model], dtype)
    optimizer = AdamW(decay_groups(model, 0.1), lr=1e-2, working_copies=copies)
    if config.optimizer == "sgd":  # it knows nothing of copies
        optimizer = SGD(decay_groups(model, 0.1), lr=1e-1)
    # It grows to 2^7. At 2^12 a T5's gradient behind its embedding, which the first norm multiplies
    # by up to 300 (a small embedding's 1 / std), has been seen to overflow.
    scaler = GradScaler(2.0**4, growth_interval=2) if dtype is torch.float16 else None
    more = (copies,) if kind is Graphed else ()
    executor, seen, kinds = kind(model, *more), [], Counter()
    generator = np.random.default_rng(0)
    for step in range(steps):
        batches = []
        for index in range(counts[step % len(counts)]):
            lengths = [64, 64] if (step + index) % 7 == 0 else generator.integers(8, 33, 2).tolist()
            arrays = arrays_of(task, config.model, lengths, generator)
            batch = {n: torch.tensor(a, device=device) for n, a in arrays.items()}
            batches.append(batch)
            kinds[min(index, 2), str([t.shape for t in batch.values()])] += 1
        weigh(task, mesh, batches)
        metrics = []
        scale = 1.0 if scaler is None else scaler.scale_on(torch.device(device))
        losses = executor.step(
            Work(
                batches,
                scale,
                lambda index, step=step: seed_micro_batch(1, step=step, place=index),
                metrics.append,
            )
        )
        for name, parameter in model.named_parameters():  # shown where the test fails, or by -s
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                print(f"step {step}, {kind.__name__}, scale {float(scale):.0f}: {name} overflows")
        done = clip_and_step(optimizer, max_norm=1.0, scaler=scaler)
        optimizer.zero_grad(set_to_none=True)
        seen += [next(iter(losses.values())), done.grad_norm]
        seen += [m["tokens_per_expert"].float().std() for m in metrics if m]
    if kind is Graphed:
        assert executor.captured == sum(n > WARM_UP for n in kinds.values())
    return torch.stack([value.double() for value in seen]), list(model.parameters())


class Tokenizer:
    """As much of one as a task is made with."""

    eod = 0


T5 = {"model": "t5", "decoder_seq_length": 32}
MAMBA = {
    "hybrid_layer_pattern": "ME*-", "num_layers": 4, "mamba_head_dim": 32, "mamba_num_groups": 1,
    "mamba_state_dim": 32, "position_embedding_type": "none",
}  # fmt: skip
STATES = {
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
KINDS = {
    "dense": {},
    "dmoe": MOE,
    "dmoe, further tokens": MOE | {"mtp_num_layers": 2},
    "dmoe-sgd": MOE | {"optimizer": "sgd"},
    "bert": MOE | {"model": "bert"},
    "bert, masks": {"model": "bert", "attention_dropout": 0.1},
    "t5": T5,
    "t5, relative": MOE | T5 | {"position_embedding_type": "relative"},
    "ict": {"model": "ict"},
    "states": MOE | STATES,
    "states, documents": STATES | {"reset_attention_mask": True},
    "mamba": MOE | MAMBA | {"reset_attention_mask": True},
    "states in plain PyTorch": STATES | {"linear_key_head_dim": 264, "reset_attention_mask": True},
}


def check_graphs(fields, **options):
    expected, weights = trained(Sequential, fields, **options)
    got, graphed = trained(Graphed, fields, **options)
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    for a, b in zip(graphed, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_graphs_train_as_the_passes_they_hold(fields, dtype, compiled):
    check_graphs(fields, dtype=dtype, compiled=compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(1,), (1, 2, 5)], ids=str)
@pytest.mark.parametrize("name", ["dense", "dmoe", "dmoe-sgd", "t5, relative", "states, documents"])
def test_graphs_of_one_micro_batch_train_as_the_passes_they_hold(name, counts):
    check_graphs(KINDS[name], dtype=torch.bfloat16, counts=counts, steps=44)


class Replayed:
    """Stands in for a graph on a CPU: its passes run anew, over tensors that stay in place."""

    def __init__(self, passes, batch, parameters, stream, pool):
        self.passes, self.batch = passes, {name: value.clone() for name, value in batch.items()}
        self.parameters, self.reads, self.leaves = parameters, grads_of(parameters), None

    def run(self, batch):
        # A graph reads and writes where it was captured, wherever gradients are by now.
        assert same(self.reads, grads_of(self.parameters))
        for name, value in self.batch.items():
            value.copy_(batch[name])
        passed = self.passes(self.batch)
        self.leaves = self.leaves or grads_of(self.parameters)
        assert same(self.leaves, grads_of(self.parameters))
        return passed


def grads_of(parameters):
    return [p.grad for p in parameters]


def same(some, others):
    return all(a is b for a, b in zip(some, others, strict=True))


def trained_on_ranks(rank, world_size, kind, fields, ep, counts, device):
    """Losses, norms and weights of steps of so many micro-batches in turn."""
    torch.manual_seed(3)
    dtype, dispatcher = torch.bfloat16, "peer" if device == "cuda" else "all_gather"
    config = TrainConfig(**SIZES | fields | {"hidden_dropout": 0.0})
    mesh = ParallelDims(dp_shard=world_size, ep=ep).build(device)
    task = make_task(config, Tokenizer(), vocab_size=V, mesh=mesh)
    model = task.build_model(compute_dtype=dtype).to(device)
    parallelize_experts(model, mesh, dispatcher=dispatcher, equal_tokens=True)
    apply_data_parallel(model, mesh, blocks=[], zero_stage=0)
    copies = hold_working_copies([model], dtype)
    optimizer = AdamW(decay_groups(model, 0.1), lr=1e-2, working_copies=copies)
    more = ()
    if kind is Graphed:
        more = (copies, peer_buffers(model) if device == "cuda" else ())
    executor, seen = kind(model, *more, dp_size=mesh.dp_size), []
    generator = np.random.default_rng(rank)
    for step in range((WARM_UP + 2) * len(counts)):
        batches = []
        for _ in range(counts[step % len(counts)]):
            arrays = arrays_of(task, "gpt", [64, 64], generator)
            batches.append({n: torch.tensor(a, device=device) for n, a in arrays.items()})
        weigh(task, mesh, batches)
        losses = executor.step(Work(batches, 1.0, lambda index: None, lambda metrics: None))
        done = clip_and_step(optimizer, max_norm=1.0, mesh=mesh)
        optimizer.zero_grad()
        seen += [losses["lm loss"], done.grad_norm]
    if kind is Graphed:
        assert executor.captured == min(max(counts), 3)
    return [t.cpu() for t in (*seen, *(local(p).detach() for p in model.parameters()))]


@contextlib.contextmanager
def replayed_on_a_cpu():
    streams = {name: mock.MagicMock() for name in ("Stream", "current_stream", "graph_pool_handle")}
    with (
        mock.patch.multiple(torch.cuda, stream=lambda _: contextlib.nullcontext(), **streams),
        mock.patch.object(graphs, "MicroBatchGraph", Replayed),
    ):
        yield


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["dmoe", "bert"])
def test_gradients_stay_where_graphs_of_any_shape_read_them(name):
    options = {"dtype": torch.bfloat16, "counts": (1, 4, 2), "device": "cpu"}
    expected = trained(Sequential, KINDS[name], **options)
    with replayed_on_a_cpu():
        torch.testing.assert_close(trained(Graphed, KINDS[name], **options), expected)


def trained_both_ways(rank, world_size, *options):
    expected = trained_on_ranks(rank, world_size, Sequential, *options, "cpu")
    with replayed_on_a_cpu():
        return expected, trained_on_ranks(rank, world_size, Graphed, *options, "cpu")


def trained_both_ways_on_gpus(rank, world_size, *options):
    kinds = (Sequential, Graphed)
    return [trained_on_ranks(rank, world_size, kind, *options, "cuda") for kind in kinds]


RANKS = [
    *((MOE, 2, (1, 2)), (MOE, 1, (1,)), (MOE | DROPPING, 2, (2,)), (STATES, 1, (1, 2))),
    ({}, 1, (4,)),
]
FURTHER = [({}, 1, (2,)), ({}, 1, (1,)), (MOE, 2, (2,)), (MOE, 2, (1, 4, 2))]
RANKS += [pytest.param(*further, marks=pytest.mark.slow) for further in FURTHER]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("fields", "ep", "counts"), RANKS, ids=str)
def test_graphs_of_ranks_sum_their_gradients(fields, ep, counts):
    for expected, got in run_ranks(trained_both_ways, 2, fields, ep, counts):
        torch.testing.assert_close(got, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("fields", "ep", "counts"), RANKS, ids=str)
def test_graphs_of_two_gpus_train_as_the_passes_they_hold(fields, ep, counts):
    by_rank = run_ranks(trained_both_ways_on_gpus, 2, fields, ep, counts, device_type="cuda")
    for expected, got in by_rank:
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-3)


def test_rows_that_collectives_move_are_not_captured():
    config = MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=2)
    layer = dMoE(config)
    assert peer_buffers(layer) == set()
    layer.dispatcher = AllGatherDispatcher(2, mock.MagicMock(size=2, rank=0))
    with pytest.raises(ValueError, match=r"memory alone.* got AllGather.* --moe-dispatcher peer"):
        peer_buffers(layer)


@pytest.mark.parametrize(
    ("options", "captured"),
    [
        ({"equal_tokens": True}, True),
        ({}, False),
        ({"equal_tokens": True, "drop_policy": "probability"}, False),
        ({"equal_tokens": True, "split_over": 2}, False),
    ],
)
def test_a_capacity_is_captured_where_peers_count_through_their_memory(options, captured):
    place, other = (mock.MagicMock(size=2, rank=0) for _ in range(2))
    layer = MoE(MoEConfig(hidden_size=16, ffn_hidden_size=16, num_experts=2, capacity_factor=1.0))
    peers = PeerDispatcher(2, place, PeerBuffers(place))
    for ranks, is_captured in ((place, captured), (other, False)):
        layer.dispatcher = GlobalCapacity(peers, 2, 1.0, ranks, **options)
        if is_captured:
            assert peer_buffers(layer) == {peers.buffers}
        else:
            with pytest.raises(ValueError, match="got GlobalCapacity, whose collectives"):
                peer_buffers(layer)
