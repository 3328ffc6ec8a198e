"""transformers' models on two processes: its own expert parallelism, FSDP2, and ours."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mb_kernels.testing import assert_close
from mb_parallel import ParallelDims, apply_data_parallel, parallelize_experts
from mb_parallel.context_parallel import parallelize_context
from mb_parallel.tensor_parallel import (
    ColumnParallel,
    ExpertLayer,
    JoinOutput,
    ParallelInput,
    PartialGradients,
    Replicated,
    RowParallel,
    SequenceParallel,
    SplitSequence,
    parallelize_tensors,
)
from mb_parallel.testing import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

pytest.importorskip("transformers", minversion="5.17")


def _save(folder: str):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(folder)
    return model


def _tokens() -> Tensor:
    return torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(1))


def _through(model, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits without and with gradients, and every gradient."""
    ids = _tokens()
    with torch.no_grad():
        result = {"inference": model(input_ids=ids, **inputs).logits}
    out = model(input_ids=ids, labels=ids, **inputs)
    out.loss.backward()
    result["logits"] = out.logits.detach()
    for name, parameter in model.named_parameters():
        result[name] = full(parameter.grad)
    return result


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _qwen2_moe():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen2MoeForCausalLM(config)


def _keep_swapped_state() -> None:
    """FSDP2 cuts a shared expert, a stack of one, into all of it and nothing."""
    from mb_layers.transformers import swap_blocks
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _qwen2_moe()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    swap_blocks(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    for _ in range(2):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor.full_tensor(), expected[name]), name
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(state)
    # torch's functions for checkpoints look every name up in the model.
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert whole.keys() == expected.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, expected[name]), name
    ids = torch.arange(8)[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    weights, moments = tree_map_only(torch.Tensor, torch.clone, get_state_dict(model, optimizer))
    losses = [step(), step()]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert [step(), step()] == losses


def _spread(rank: int, ranks: int, folder: str):
    _keep_swapped_state()
    import mb_layers.transformers  # noqa: F401, registers "mb"
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    spread = DistributedConfig(tp_size=2, tp_plan="auto", enable_expert_parallel=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=spread, dtype=torch.float32
    )
    model.set_experts_implementation("mb")
    weight = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape[0] == 2
    return _through(model)


def test_expert_parallel_model_of_transformers(tmp_path):
    expected = _through(_save(str(tmp_path)))
    assert any(name.endswith("mlp.gate.weight") for name in expected)
    for got in run_ranks(_spread, 2, str(tmp_path)):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(name, got[name], value)


def _adapted():
    from mb_layers import add_lora
    from mb_layers.transformers import swap_blocks

    model = _qwen2_moe()
    for layer in swap_blocks(model).values():
        for part in (layer.experts, layer.shared_expert):
            add_lora(part, rank=2, alpha=4)
            for adapter in part.parametrizations.parameters():
                torch.nn.init.normal_(adapter)
    return model


def _save_adapters(rank: int, ranks: int, folder: str) -> None:
    from mb_layers.transformers import save_adapters

    for name, ep, zero_stage in (("experts", 2, 0), ("shards", 1, 3)):
        model, mesh = _adapted(), ParallelDims(dp_shard=2, ep=ep).build("cpu")
        parallelize_experts(model, mesh)
        apply_data_parallel(model, mesh, blocks=model.model.layers, zero_stage=zero_stage)
        save_adapters(model, f"{folder}/{name}")


def test_adapters_of_a_spread_model_are_saved_whole(tmp_path):
    from mb_layers.transformers import adapters_by_expert
    from safetensors.torch import load_file

    expected, _ = adapters_by_expert(_adapted())
    run_ranks(_save_adapters, 2, str(tmp_path))
    for name in ("experts", "shards"):
        saved = load_file(tmp_path / name / "adapter_model.safetensors")
        assert saved.keys() == expected.keys()
        for place, tensor in expected.items():
            assert torch.equal(saved[place], tensor), (name, place)


def _save_and_load_whole(rank: int, ranks: int, folder: str) -> None:
    from mb_layers.transformers import swap_blocks
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name, ep, zero_stage in (("experts", 2, 0), ("shards", 1, 3), ("both", 2, 2)):
        model, mesh = _qwen2_moe(), ParallelDims(dp_shard=2, ep=ep).build("cpu")
        swap_blocks(model)
        parallelize_experts(model, mesh)
        apply_data_parallel(model, mesh, blocks=model.model.layers, zero_stage=zero_stage)
        whole = get_model_state_dict(model, options=options)
        if rank == 0:
            model.save_pretrained(f"{folder}/{name}", state_dict=whole)
        kept = {n: full(p.detach()) for n, p in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        set_model_state_dict(model, _qwen2_moe().state_dict(), options=options)
        for n, parameter in model.named_parameters():
            assert torch.equal(full(parameter.detach()), kept[n]), (name, n)
        _refuse_a_broadcast(rank, model, whole)


def _refuse_a_broadcast(rank: int, model: Any, whole: dict[str, Any]) -> None:
    """It goes by the names of modules, and reaches the first rank's blocks alone."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    for strict in (True, False):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
        given = whole.copy() if rank == 0 else {}
        if rank and strict:
            with pytest.raises(RuntimeError, match=r"Missing.*layers\.0\.mlp\.gate\.weight"):
                set_model_state_dict(model, given, options=options)
            continue
        missing = set_model_state_dict(model, given, options=options).missing_keys
        assert missing == [n for n in _qwen2_moe().state_dict() if ".mlp." in n and rank]


def test_a_spread_model_is_saved_whole_and_loaded(tmp_path):
    expected = _qwen2_moe()
    run_ranks(_save_and_load_whole, 2, str(tmp_path))
    for name in ("experts", "shards", "both"):
        saved = type(expected).from_pretrained(tmp_path / name, dtype=torch.float32)
        torch.testing.assert_close(saved.state_dict(), expected.state_dict(), rtol=0, atol=0)


def _tensor_parallel(rank: int, ranks: int, folder: str, sequence_parallel: bool):
    """Qwen3-MoE with swapped blocks, its attention split by heads."""
    from mb_layers.transformers import swap_blocks
    from transformers import AutoModelForCausalLM

    # "sdpa" needs no mask, which transformers would make for a rank's part of the sequence.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    swap_blocks(model.train())  # with the balancing loss
    mesh = ParallelDims(tp=ranks, ep=ranks).build("cpu")
    attention = "model.layers.*.self_attn"
    plan = {
        "model.embed_tokens": SplitSequence(),
        "model.layers.*.*_layernorm": SequenceParallel(),
        attention: ParallelInput(),
        f"{attention}.[qkv]_proj": ColumnParallel(units=2, unit="key-value heads", enter=False),
        f"{attention}.[qk]_norm": PartialGradients(),
        f"{attention}.o_proj": RowParallel(),
        "model.layers.*.mlp.moe": ExpertLayer(),
        "model.norm": JoinOutput(),
        "lm_head": Replicated(),
    }
    parallelize_tensors(model, mesh, plan, sequence_parallel=sequence_parallel)
    parallelize_experts(model, mesh)
    apply_data_parallel(model, mesh, blocks=model.model.layers)
    return _through(model, position_ids=torch.arange(10)[None])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_model_of_transformers(tmp_path, sequence_parallel):
    from mb_layers.transformers import swap_blocks

    model = _save(str(tmp_path))
    swap_blocks(model)
    expected = _through(model, position_ids=torch.arange(10)[None])
    for got in run_ranks(_tensor_parallel, 2, str(tmp_path), sequence_parallel):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(name, got[name], value)


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return y.transpose(1, 2)


def attend(layer, q, k, v, mask, *, scaling, **_):
    """transformers' [B, heads, S, width]; an attention it does not know is given no mask."""
    assert mask is None
    return layer.core(*(x.transpose(1, 2) for x in (q, k, v)), scaling), None


def _share_of_loss(logits: Tensor, part: slice) -> Tensor:
    labels = F.pad(_tokens()[:, 1:], (0, 1), value=-100)[:, part]
    return F.cross_entropy(logits.mT, labels, ignore_index=-100, reduction="sum") / 18


def _context_parallel(rank: int, ranks: int, folder: str):
    from mb_layers.transformers import swap_blocks
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("cores", attend)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="cores"
    )
    swap_blocks(model, load_balancing_loss_weight=0.0)
    mesh = ParallelDims(dp_shard=ranks, cp=ranks, ep=ranks).build("cpu")
    for layer in model.model.layers:
        layer.self_attn.core = Core()
    parallelize_experts(model, mesh)
    parallelize_context([layer.self_attn.core for layer in model.model.layers], mesh)
    apply_data_parallel(model, mesh, blocks=model.model.layers)
    part = slice(rank * 10 // ranks, (rank + 1) * 10 // ranks)
    logits = model(_tokens()[:, part], position_ids=torch.arange(10)[None, part]).logits
    _share_of_loss(logits, part).backward()
    return logits.detach(), {name: full(p.grad) for name, p in model.named_parameters()}


def test_context_parallel_model_of_transformers(tmp_path):
    from mb_layers.transformers import swap_blocks

    model = _save(str(tmp_path))
    swap_blocks(model, load_balancing_loss_weight=0.0)
    logits = model(_tokens()).logits
    _share_of_loss(logits, slice(None)).backward()
    by_rank = run_ranks(_context_parallel, 2, str(tmp_path))
    torch.testing.assert_close(torch.cat([part for part, _ in by_rank], dim=1), logits)
    for _, grads in by_rank:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, msg=name)


def _restore_spread(rank: int, ranks: int) -> None:
    from mb_layers.transformers import restore_blocks, swap_blocks

    for ep, zero_stage in ((2, 0), (1, 3)):
        model, mesh = _qwen2_moe(), ParallelDims(dp_shard=2, ep=ep).build("cpu")
        swap_blocks(model)
        parallelize_experts(model, mesh)
        apply_data_parallel(model, mesh, blocks=model.model.layers, zero_stage=zero_stage)
        if rank == 0:  # nothing is sent, for which it would wait
            with pytest.raises(ValueError, match="with whole weights, got DTensors"):
                restore_blocks(model)
        model(torch.arange(8)[None])  # as it was


def test_blocks_of_a_spread_model_are_not_restored():
    run_ranks(_restore_spread, 2)
