"""Whole transformers models on dMoE layers: losses, checkpoints, and the way back."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

import mb_layers.transformers as mb  # noqa: E402
from mb_layers import MoEConfig, add_lora, collect, freeze_in_bits, merge_lora  # noqa: E402
from tiny_models import BLOCKS, COMMON, FAMILIES, build, outputs_and_gradients  # noqa: E402


def same(got: dict, expected: dict, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-5}
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, **tolerance, msg=name)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_swapped_model_gives_the_same_logits_and_the_loss_of_its_routers(family: str) -> None:
    model = build(family)
    swapped = copy.deepcopy(model)
    layers = mb.swap_blocks(swapped, load_balancing_loss_weight=0.0)
    assert all(isinstance(layer.config, MoEConfig) for layer in layers.values())
    expected, got = outputs_and_gradients(model), outputs_and_gradients(swapped)
    torch.testing.assert_close(got["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
    embedding = "model.embed_tokens.weight"
    torch.testing.assert_close(got[embedding], expected[embedding], rtol=1e-5, atol=1e-5)

    balanced = copy.deepcopy(model)
    layers = mb.swap_blocks(balanced, load_balancing_loss_weight=10.0)
    losses = []
    for layer in layers.values():
        layer.register_forward_hook(lambda _, __, out: losses.append(out.aux_loss.detach()))
    tokens = torch.randint(3, 64, (2, 11))
    outputs = balanced(input_ids=tokens, labels=tokens)
    plain = swapped(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(outputs.aux_loss, torch.stack(losses).mean())
    torch.testing.assert_close(outputs.loss, plain.loss + outputs.aux_loss)
    name = next(n for n, _ in balanced.named_parameters() if n.endswith("router.weight"))
    outputs.loss.backward()
    assert not torch.allclose(balanced.get_parameter(name).grad, got[name])
    without_labels = balanced(input_ids=tokens)
    assert without_labels.loss is None
    assert without_labels.aux_loss.requires_grad
    balanced.eval()
    torch.testing.assert_close(balanced(input_ids=tokens, labels=tokens).loss, plain.loss)


@pytest.mark.parametrize("normalised", [False, True], ids=["mean", "num_items_in_batch"])
def test_accumulation_counts_the_losses_once(normalised: bool) -> None:
    """Four micro-batches of uneven labels, as Trainer runs them, against one batch of all."""
    model = build("olmoe")
    mb.swap_blocks(model, load_balancing_loss_weight=0.0, z_loss_weight=1.0)
    tokens = torch.randint(3, 64, (4, 11))
    labels = tokens.clone()
    if normalised:
        labels[2, 4:] = -100
    items = (labels[:, 1:] != -100).sum()
    whole: dict[str, torch.Tensor] = {}
    z_losses = []
    for share in (slice(0, 4), *(slice(i, i + 1) for i in range(4))):
        model.zero_grad()
        arguments = {"input_ids": tokens[share], "labels": labels[share]}
        if normalised:
            arguments["num_items_in_batch"] = items
        outputs = model(**arguments)
        weight = (labels[share][:, 1:] != -100).sum() / items
        factor = 1.0 if normalised else float(weight)
        (outputs.loss * factor).backward()
        for name, p in model.named_parameters():
            if share == slice(0, 4):
                z_losses.append(outputs.aux_loss.item())
            else:
                whole[name] = whole.get(name, 0) + p.grad
    model.zero_grad()
    ce = model(input_ids=tokens, labels=labels)
    parts = [model(input_ids=tokens[i : i + 1]).aux_loss for i in range(4)]
    weights = (labels[:, 1:] != -100).sum(dim=1) / items
    expected = ce.loss - ce.aux_loss + sum(w * z for w, z in zip(weights, parts, strict=True))
    expected.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole[name], p.grad, rtol=1e-4, atol=1e-5, msg=name)
    by_place = model(tokens, None, None, None, None, labels, num_items_in_batch=items)
    by_name = model(input_ids=tokens, labels=labels, num_items_in_batch=items)
    assert torch.equal(by_place.loss, by_name.loss)


def test_gpt_oss_has_its_gates_numbers_in_the_experts() -> None:
    model = build("gpt_oss")
    for name in ("swiglu_alpha", "swiglu_limit"):  # as in transformers 5.17
        vars(model.config).pop(name, None)
    layers = mb.swap_blocks(model)
    assert {m.config.activation for m in layers.values()} == {
        "swiglu(alpha=1.702, limit=7.0, offset=1)"
    }


@pytest.mark.parametrize("head", ["Sequence", "Token"])
def test_a_classifiers_losses_are_means_both(head: str) -> None:
    """It takes `num_items_in_batch`, and weighs its own loss by none of it."""
    config = build("mixtral").config
    config.classifier_dropout = 0.0
    auto = getattr(transformers, f"AutoModelFor{head}Classification")
    model = auto.from_config(config).float().train()
    tokens = torch.randint(3, 64, (1, 11))
    arguments = {
        "input_ids": tokens,
        "labels": tokens[:, 0] % 2 if head == "Sequence" else tokens % 2,
    }
    own = model(**arguments).loss
    mb.swap_blocks(model)
    for more in ({}, {"num_items_in_batch": 44}):
        outputs = model(**arguments, **more)
        torch.testing.assert_close(outputs.loss, own + outputs.aux_loss)


def test_answers_to_questions_give_the_losses_their_own_weight() -> None:
    """An answer outside of the text has no loss of its own, and no part in the balance either."""
    config = build("mixtral").config
    model = transformers.AutoModelForQuestionAnswering.from_config(config).float().train()
    arguments = {
        "input_ids": torch.randint(3, 64, (2, 11)),
        "start_positions": torch.tensor([3, 11]),
        "end_positions": torch.tensor([5, 7]),
        "num_items_in_batch": 6,
    }
    own = model(**arguments).loss
    mb.swap_blocks(model)
    outputs = model(**arguments)
    torch.testing.assert_close(outputs.loss, own + 3 / 12 * outputs.aux_loss)


def test_trainer_accumulates_the_balance_of_one_batch(tmp_path: Path) -> None:
    """Through Trainer itself: accumulation over 4 moves the router as one batch of 4 does."""
    pytest.importorskip("accelerate")
    model = build("olmoe")
    mb.swap_blocks(model, load_balancing_loss_weight=0.0, z_loss_weight=1.0)
    tokens = torch.randint(3, 64, (4, 11))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    moved = []
    for size, steps in ((4, 1), (1, 4)):
        trained = copy.deepcopy(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=1,
            learning_rate=0.1,
            optim="sgd",
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        transformers.Trainer(trained, arguments, train_dataset=data).train()
        name = next(n for n, _ in model.named_parameters() if n.endswith("router.weight"))
        moved.append(trained.get_parameter(name) - model.get_parameter(name))
    assert moved[0].abs().max() > 1e-3
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("recompute", "reduce_counts"),
    [(False, None), (True, lambda counts_LE: counts_LE.flip(1))],
    ids=["plain", "recomputed and reduced"],
)
def test_trainer_moves_the_balancing_biases_once_per_step(
    recompute: bool, reduce_counts: Callable[[torch.Tensor], torch.Tensor] | None, tmp_path: Path
) -> None:
    """By the counts of all its micro-batches, recomputed or not; the checkpoint has them."""
    pytest.importorskip("accelerate")
    from mb_layers.transformers.trainer import BalancingBiasCallback

    model = build("deepseek_v3")
    (layer,) = mb.swap_blocks(model).values()
    before = layer.router.balancing_bias.clone()
    tokens = torch.randint(3, 64, (4, 11))
    with torch.no_grad(), collect(model) as moe:
        model(input_ids=tokens)
    (counts,) = moe.tokens_per_expert().values()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=1,
        learning_rate=0.0,
        gradient_checkpointing=recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    callback = BalancingBiasCallback(rate=0.25, reduce_counts=reduce_counts)
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    if reduce_counts is not None:
        (counts,) = reduce_counts(counts[None])
    step = 0.25 * torch.sign(counts.float().mean() - counts)
    torch.testing.assert_close(layer.router.balancing_bias, before + step - step.mean())
    names = [n for n in model.state_dict() if n.endswith("e_score_correction_bias")]
    assert torch.equal(model.state_dict()[names[-1]], layer.router.balancing_bias)
    assert not layer._forward_hooks


def test_gradient_checkpointing_keeps_the_loss_or_says_so() -> None:
    model = build("olmoe")
    mb.swap_blocks(model, load_balancing_loss_weight=5.0)
    expected = outputs_and_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    same(outputs_and_gradients(model), expected)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model.model.layers[-1].gradient_checkpointing = False  # one block's loss is lost, not all
    with pytest.raises(ValueError, match="reentrant checkpointing loses them"):
        outputs_and_gradients(model)


def test_layers_that_are_compiled_one_by_one_share_their_code() -> None:
    """As Accelerate's regional compilation does: however many losses were taken before."""
    model = build("qwen3_moe", num_hidden_layers=4, router_aux_loss_coef=0.1)
    mb.swap_blocks(model)
    tokens = torch.randint(3, 64, (2, 11))
    expected = model(tokens, labels=tokens)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager", fullgraph=True)
    for _ in range(2):  # steps
        got = model(tokens, labels=tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    torch.testing.assert_close(got.loss, expected.loss)
    torch.testing.assert_close(got.aux_loss, expected.aux_loss)


@pytest.mark.slow
def test_checkpointed_layers_compile_without_a_break() -> None:
    model = build("olmoe", num_hidden_layers=1)
    model.config.use_cache = False  # else transformers breaks the graph to say that it cannot
    mb.swap_blocks(model, load_balancing_loss_weight=5.0)
    expected = outputs_and_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    model.compile(backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        got = outputs_and_gradients(model)
    torch._dynamo.reset()
    same(got, expected)


def test_layers_without_losses_have_none_to_lose() -> None:
    model = build("olmoe")
    expected = outputs_and_gradients(model)
    mb.swap_blocks(model, load_balancing_loss_weight=0)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    tokens = torch.randint(3, 64, (2, 11), generator=torch.Generator().manual_seed(5))
    loss, *_ = model(input_ids=tokens, labels=tokens, use_cache=False, return_dict=False)
    loss.backward()
    head = {"lm_head.weight": model.lm_head.weight.grad}
    same(head, {"lm_head.weight": expected["lm_head.weight"]})


def test_layers_without_losses_need_no_place_for_them() -> None:
    """As the error of a call from elsewhere says."""
    tokens = torch.randint(3, 64, (2, 11))
    model = build("olmoe")
    expected = model(input_ids=tokens, labels=tokens).loss.item()
    mb.swap_blocks(model, load_balancing_loss_weight=0)
    model.model(input_ids=tokens)
    loss, *_ = model(input_ids=tokens, labels=tokens, return_dict=False)
    assert loss.item() == pytest.approx(expected)
    layer = build("olmoe")
    mb.swap_blocks(layer.model.layers[1], load_balancing_loss_weight=0)
    layer(input_ids=tokens, labels=tokens).loss.backward()


def test_a_head_alone_is_trained_on_frozen_blocks() -> None:
    model = build("olmoe").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    mb.swap_blocks(model)
    ids = torch.randint(3, 64, (1, 5))
    model.train()(ids, labels=ids).loss.backward()
    assert model.lm_head.weight.grad.abs().max() > 0


def test_a_loss_that_nobody_would_add_is_an_error() -> None:
    model = build("olmoe")
    mb.swap_blocks(model)
    with pytest.raises(ValueError, match="balancing loss would be lost"):
        model.model(input_ids=torch.randint(3, 64, (1, 5)))
    with torch.no_grad():
        model.model(input_ids=torch.randint(3, 64, (1, 5)))
    model.eval().model(input_ids=torch.randint(3, 64, (1, 5)))


@pytest.mark.parametrize("family", BLOCKS)
def test_save_pretrained_of_a_swapped_model_loads_as_the_original(
    family: str, tmp_path: Path
) -> None:
    model = build(family)
    swapped = copy.deepcopy(model)
    mb.swap_blocks(swapped)
    state = swapped.state_dict()
    assert list(state) == list(model.state_dict())
    swapped.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
        assert torch.equal(state[name], tensor), name
    other = build(family)
    other.load_state_dict(state)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in swapped.parameters():
            p.zero_()
    swapped.load_state_dict(other.state_dict())
    same(outputs_and_gradients(swapped.eval()), {"logits": outputs_and_gradients(model)["logits"]})


def test_saving_that_looks_up_the_shapes_of_experts(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    config = transformers.AutoConfig.for_model(
        "qwen3_vl_moe",
        text_config=COMMON | FAMILIES["qwen3_moe"],
        vision_config=vision | {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).float()
    swapped = copy.deepcopy(model)
    mb.swap_blocks(swapped)
    swapped.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("family", BLOCKS)
def test_restored_blocks_are_the_original_ones_with_todays_weights(family: str) -> None:
    model = build(family)
    kinds = [type(m).__name__ for m in model.modules()]
    expected = outputs_and_gradients(model)
    mb.swap_blocks(model, load_balancing_loss_weight=0.0)
    names = mb.restore_blocks(model)
    assert names
    assert not model._forward_pre_hooks | model._forward_hooks
    assert [type(m).__name__ for m in model.modules()] == kinds
    same(outputs_and_gradients(model), expected, rtol=0, atol=0)

    mb.swap_blocks(model, load_balancing_loss_weight=1.0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    trained = copy.deepcopy(model)
    mb.restore_blocks(model)
    a, b = (m.eval()(input_ids=torch.arange(3, 9)[None]).logits for m in (model, trained))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="found none"):
        mb.restore_blocks(model)


def test_a_block_of_several_layers_is_swapped_and_restored_in_all() -> None:
    model = build("olmoe")
    first, second = model.model.layers[:2]
    second.mlp = first.mlp
    expected = outputs_and_gradients(model)
    swapped = copy.deepcopy(model)
    layers = mb.swap_blocks(swapped, load_balancing_loss_weight=0.0)
    assert layers["model.layers.0.mlp"] is layers["model.layers.1.mlp"]
    got = outputs_and_gradients(swapped)
    torch.testing.assert_close(got["logits"], expected["logits"], rtol=1e-5, atol=1e-5)
    assert swapped.state_dict().keys() == model.state_dict().keys()
    mb.restore_blocks(swapped)
    same(outputs_and_gradients(swapped), expected)


def test_a_weight_of_which_a_half_is_frozen_is_refused() -> None:
    """As by a loop that freezes routers, and whatever else has `gate` in its name."""
    model = build("qwen2_moe")
    for name, p in model.named_parameters():
        p.requires_grad_("gate" not in name)
    with pytest.raises(
        ValueError, match=r"trained together, .* got shared_expert\.gate_proj\.weight frozen"
    ):
        mb.swap_blocks(model)


def test_a_model_that_is_spread_over_ranks_is_refused() -> None:
    """Its wrapper knows the weights that it was given, and no others."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = build("olmoe")
        averaged = torch.nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ValueError, match=r"blocks of its `\.module`, and wrap that anew"):
            mb.swap_blocks(averaged)
        mb.swap_blocks(model)
        with pytest.raises(ValueError, match=r"blocks of its `\.module`, and wrap that anew"):
            mb.restore_blocks(averaged)
        sharded = build("olmoe")
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="got some as DTensor; swap_blocks before"):
            mb.swap_blocks(sharded)
    finally:
        torch.distributed.destroy_process_group()


def test_experts_frozen_in_bits_before_the_swap_are_refused() -> None:
    model = build("olmoe")
    expected = outputs_and_gradients(model)
    experts = model.model.layers[1].mlp.experts
    freeze_in_bits(experts, 8, names=("gate_up_proj", "down_proj"))
    with pytest.raises(ValueError, match=r"FrozenWeight; swap_blocks before .* freeze_in_bits"):
        mb.swap_blocks(model)
    assert outputs_and_gradients(model).keys() < expected.keys()


def test_a_model_of_ones_own_may_return_a_dict() -> None:
    class Regression(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = build("olmoe").model

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
            y = self.backbone(input_ids).last_hidden_state.mean(dim=(1, 2))
            return {"y": y} | ({} if labels is None else {"loss": (y - labels).square().mean()})

    model = Regression()
    tokens, labels = torch.randint(3, 64, (2, 11)), torch.ones(2)
    own = model(tokens, labels)["loss"]
    mb.swap_blocks(model, load_balancing_loss_weight=1.0)
    outputs = model(tokens, labels)
    assert outputs["aux_loss"] > 0.5
    torch.testing.assert_close(outputs["loss"], own + outputs["aux_loss"])
    assert model(tokens).keys() == {"y", "aux_loss"}


@pytest.mark.gpu
def test_a_model_on_two_devices_has_the_losses_of_one() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = build("olmoe")
    mb.swap_blocks(model, load_balancing_loss_weight=1.0)
    spread = copy.deepcopy(model)
    for module in (spread.model.layers[-1], spread.model.norm, spread.lm_head):
        add_hook_to_module(module.cuda(), AlignDevicesHook("cuda"))
    tokens = torch.randint(3, 64, (2, 11))
    batch = {"input_ids": tokens, "labels": tokens, "num_items_in_batch": torch.tensor(40)}
    one, two = outputs = [m(**batch) for m in (model, spread)]
    torch.testing.assert_close(two.loss.cpu(), one.loss, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(two.aux_loss.cpu(), one.aux_loss, rtol=1e-3, atol=1e-3)
    for output in outputs:
        output.loss.backward()
    for name, weight in model.named_parameters():
        grad = spread.get_parameter(name).grad.cpu()
        torch.testing.assert_close(grad, weight.grad, rtol=1e-2, atol=1e-3, msg=name)


def test_what_is_no_model_with_blocks_is_refused_and_keeps_its_weights() -> None:
    block = build("olmoe").model.layers[1].mlp
    expected = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with pytest.raises(ValueError, match=r"got OlmoeSparseMoeBlock alone, .* moe_from_block"):
        mb.swap_blocks(block)
    same(block.state_dict(), expected, rtol=0, atol=0)
    for function in (mb.swap_blocks, mb.restore_blocks, mb.use):
        with pytest.raises(ValueError, match="expected model to be a module, got a dict"):
            function({})


def test_hooks_that_nobody_would_call_are_refused() -> None:
    model = build("olmoe")
    block = model.model.layers[1].mlp
    for register in (
        lambda m: m.register_forward_hook(lambda m, args, output: output * 2),
        lambda m: m.register_forward_pre_hook(lambda m, args: None),
        lambda m: m.register_full_backward_hook(lambda m, grads, outs: None),
    ):
        hook = register(block)
        with pytest.raises(ValueError, match=r"got some on model\.layers\.1\.mlp, which would"):
            mb.swap_blocks(model)
        hook.remove()
    mb.swap_blocks(model)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda m, args, output: output * 2)
    with pytest.raises(ValueError, match="without hooks, got some on"):
        mb.restore_blocks(model)
    hook.remove()
    mb.restore_blocks(model)


def test_parts_that_blocks_share_are_refused() -> None:
    """Each block would get a weight of its own, one memory under two optimizer states."""
    model = build("olmoe")
    first, second = model.model.layers[:2]
    second.mlp.experts = first.mlp.experts
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.\S+ and model\.layers\.1\.mlp\.\S+, which are"
    ):
        mb.swap_blocks(model)
    other = build("olmoe")
    other.router = torch.nn.Linear(32, 6, bias=False)
    other.router.weight = other.model.layers[0].mlp.gate.weight
    with pytest.raises(ValueError, match=r"mlp\.gate\.weight and router\.weight"):
        mb.swap_blocks(other)
    tied_later = build("olmoe")
    layers = list(mb.swap_blocks(tied_later).values())
    layers[1].experts = layers[0].experts
    with pytest.raises(ValueError, match="which are one"):
        mb.restore_blocks(tied_later)


def test_a_block_routes_by_its_routers_numbers() -> None:
    """They were read from the config as the model was built, in HunYuan's from a list of layers."""
    tokens = torch.randint(3, 64, (2, 9))
    changed = build("qwen3_moe").eval()
    changed.config.num_experts_per_tok, changed.config.norm_topk_prob = 1, False
    changed.model.layers[0].mlp.gate.top_k = 2
    for model, top_ks in (
        (changed, [2, 3]),
        (build("hunyuan_v1_moe", moe_topk=[3, 2]).eval(), [3, 2]),
    ):
        logits = model(input_ids=tokens).logits
        layers = mb.swap_blocks(model)
        assert [layer.config.top_k for layer in layers.values()] == top_ks
        torch.testing.assert_close(model(input_ids=tokens).logits, logits, rtol=1e-4, atol=1e-5)


def test_a_swapped_block_is_not_changed_by_its_old_names() -> None:
    model = build("qwen2_moe")
    mb.swap_blocks(model)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        block = each.model.layers[0].mlp
        assert block.gate.weight.requires_grad
        for change in (
            lambda w: w.data.copy_(torch.ones(6, 32)),
            lambda w: torch.nn.init.zeros_(w),
            lambda w: w[0].fill_(1),
            lambda w: w.data.__setitem__(0, 1),
            lambda w: w.detach().__iadd__(1),
        ):
            with torch.no_grad(), pytest.raises(ValueError, match="swapped, which is empty"):
                change(block.gate.weight)
        with pytest.raises(ValueError, match=r"weights of a swapped block's `\.moe`"):
            block.experts.requires_grad_(False)
        with pytest.raises(ValueError, match="is empty; or freeze what is to be frozen, and"):
            block.gate.weight.requires_grad = False
        zeros = torch.nn.Parameter(torch.zeros(6, 32))
        with pytest.raises(ValueError, match="swapped, which is empty"):
            block.gate.weight = zeros
        with pytest.raises(ValueError, match="swapped, which is empty"):
            torch.func.functional_call(each, each.state_dict(), (torch.ones(1, 3).long(),))
        with pytest.raises(ValueError, match="load what load_state_dict does not, before"):
            type(block.gate.weight)(zeros, requires_grad=True)  # as accelerate loads weights
        each.requires_grad_(False)
    mb.restore_blocks(model)
    assert not any(p.requires_grad for p in model.parameters())
    model.model.layers[0].mlp.gate.weight.requires_grad = True


def test_a_swapped_blocks_balancing_bias_is_not_moved_by_its_old_name() -> None:
    model = build("deepseek_v3")
    mb.swap_blocks(model)
    gate = model.model.layers[1].mlp.gate
    with pytest.raises(ValueError, match="swapped, which is empty"):
        gate.e_score_correction_bias += 1
    mb.restore_blocks(model)
    gate.e_score_correction_bias += 1
    model = build("afmoe")
    mb.swap_blocks(model)
    with pytest.raises(ValueError, match="swapped, which is empty"):
        model.model.layers[1].mlp.expert_bias = torch.zeros(6)  # of the block itself


def test_what_was_frozen_stays_frozen() -> None:
    model = build("qwen2_moe")
    for name, p in model.named_parameters():
        p.requires_grad_("gate_up_proj" not in name and "shared_expert." not in name)
    layers = mb.swap_blocks(model)
    for layer in layers.values():
        flags = {name: p.requires_grad for name, p in layer.named_parameters()}
        assert flags == {
            "router.weight": True,
            "experts.w1": False,
            "experts.w2": True,
            "shared_expert.w1": False,
            "shared_expert.w2": False,
            "shared_expert.gate": True,
        }
        layer.router.requires_grad_(False)
        layer.experts.w1.requires_grad_(True)
    mb.restore_blocks(model)
    for name, p in model.named_parameters():
        assert p.requires_grad == ("mlp.gate.weight" not in name and "shared_expert." not in name)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_weights_swapped_and_restored_without_gradients_train_on(
    family: str, context: Callable
) -> None:
    """Those too that are copies in the other layout, and in a copy of the model."""
    model = build(family)
    expected = outputs_and_gradients(model)
    with context():
        mb.swap_blocks(model, load_balancing_loss_weight=0.0)
    model = copy.deepcopy(model)
    assert all(p.requires_grad for p in model.parameters())
    outputs_and_gradients(model)
    with context():
        mb.restore_blocks(model)
    same(outputs_and_gradients(model), expected)


def test_a_model_is_saved_as_accelerate_does(tmp_path: Path) -> None:
    """By safetensors' save_model, which takes no tensor that is a part of a storage."""
    from safetensors.torch import load_file, save_model

    model = build("qwen2_moe")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for change in (mb.swap_blocks, mb.restore_blocks):
        change(model)
        save_model(model, str(tmp_path / "model.safetensors"))
        same(load_file(tmp_path / "model.safetensors"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("by", ["peft", "add_lora"])
def test_adapters_on_swapped_blocks_are_saved_beside_the_blocks(by: str, tmp_path: Path) -> None:
    model = build("qwen2_moe").eval()
    original = copy.deepcopy(model)
    tokens = torch.randint(3, 64, (2, 11))
    layers = mb.swap_blocks(model)
    swapped = copy.deepcopy(model)
    adapted = model
    if by == "peft":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(
            r=4,
            target_modules=["q_proj"],
            target_parameters=["experts.w1", "experts.w2"],
            init_lora_weights=False,
        )
        adapted = peft.get_peft_model(model, config)
        adapted.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(swapped, tmp_path)
    else:
        for tree in (model, swapped):
            for name in layers:
                add_lora(tree.get_submodule(name).moe.experts, rank=4, alpha=4.0)
        for layer in layers.values():
            layer.experts.parametrizations.w1[0].b.data.normal_()
        loaded = swapped
        loaded.load_state_dict(model.state_dict())
        assert original.load_state_dict(model.state_dict(), strict=False).missing_keys == []
    with torch.no_grad():
        logits = adapted(input_ids=tokens).logits
        torch.testing.assert_close(loaded(input_ids=tokens).logits, logits)
        assert not torch.allclose(original(input_ids=tokens).logits, logits)
        with pytest.raises(ValueError, match=r"a block without adapters, got moe\.experts.* merge"):
            mb.restore_blocks(model)
        if by == "peft":
            model = adapted.merge_and_unload()
        else:
            for layer in layers.values():
                with pytest.raises(ValueError, match="a block without adapters"):
                    mb.restore_blocks(model)
                assert all(isinstance(model.get_submodule(n), mb.BlockAdapter) for n in layers)
                merge_lora(layer.experts)
        mb.restore_blocks(model)
        torch.testing.assert_close(model(input_ids=tokens).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("part", ["router", "shared_expert", "moe"])
def test_peft_trains_whole_parts_of_swapped_blocks(part: str, tmp_path: Path) -> None:
    """PEFT's `modules_to_save` is a second copy of a part, beside the one that the block has."""
    peft = pytest.importorskip("peft")
    model = build("qwen2_moe")
    tokens = torch.randint(3, 64, (2, 11))
    with torch.no_grad():
        before = model.eval()(input_ids=tokens).logits
    mb.swap_blocks(model)
    swapped = copy.deepcopy(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[part])
    adapted = peft.get_peft_model(model, config).train()
    adapted(input_ids=tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "modules_to_save" in name:
                p -= p.grad
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(swapped, tmp_path).eval()
    with torch.no_grad():
        logits = adapted.eval()(input_ids=tokens).logits
        assert not torch.allclose(logits, before, atol=1e-2)
        torch.testing.assert_close(loaded(input_ids=tokens).logits, logits)
        with pytest.raises(ValueError, match="a block without adapters"):
            mb.restore_blocks(model)
        merged = adapted.merge_and_unload()
        mb.restore_blocks(merged)
        torch.testing.assert_close(merged(input_ids=tokens).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_adapters_of_the_original_blocks_are_loaded_or_refused(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, tokens = build(family).eval(), torch.randint(3, 64, (2, 11))
    swapped, merged = copy.deepcopy(model), copy.deepcopy(model)
    names = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path)
    mb.swap_blocks(swapped)
    with pytest.raises(ValueError, match=r"names of its `\.moe`, got .*lora_A.* the block that"):
        peft.PeftModel.from_pretrained(swapped, tmp_path)
    merged = peft.PeftModel.from_pretrained(merged, tmp_path).merge_and_unload()
    mb.swap_blocks(merged)
    with torch.no_grad():
        expected = adapted(input_ids=tokens).logits
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_swap_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="found none"):
        mb.swap_blocks(torch.nn.Linear(2, 2))
    model = build("olmoe")
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match=r"config\.output_router_logits=False"):
        mb.swap_blocks(model)
    # A model of text and images has the field in the config of its text part.
    text_config, model.config = model.config, SimpleNamespace()
    model.config.text_config = text_config
    with pytest.raises(ValueError, match=r"config\.text_config\.output_router_logits=False"):
        mb.swap_blocks(model)
    peft = pytest.importorskip("peft")
    for names in (["mlp.experts.gate_up_proj"], ["gate.weight"]):
        config = peft.LoraConfig(r=2, target_parameters=names)
        with pytest.raises(ValueError, match="ParamWrapper; merge or unload adapters first"):
            mb.swap_blocks(peft.get_peft_model(build("mixtral"), config))


def test_what_was_swapped_already_and_copies_in_threads_are_named() -> None:
    model = build("olmoe")
    mb.swap_blocks(model)
    with pytest.raises(ValueError, match="restore_blocks first"):
        mb.swap_blocks(model)
    with pytest.raises(ValueError, match="on these kernels already"):
        mb.use(model)
    replica = model._replicate_for_data_parallel()  # what nn.DataParallel calls, in a thread
    with pytest.raises(ValueError, match="one process per GPU"):
        replica(input_ids=torch.randint(3, 64, (1, 5)))


def test_a_call_that_has_no_place_for_losses_or_router_logits_is_named() -> None:
    model = build("olmoe")
    mb.swap_blocks(model)
    tokens = torch.randint(3, 64, (1, 5))
    with pytest.raises(ValueError, match="return_dict=True"):
        model(input_ids=tokens, labels=tokens, return_dict=False)
    with pytest.raises(ValueError, match="return no router logits"):
        model(input_ids=tokens, output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match=r"config\.output_router_logits=False"):
        model(input_ids=tokens, labels=tokens)
    assert model(input_ids=tokens, labels=tokens, output_router_logits=False).aux_loss > 0
    model.config.output_router_logits = False
    layer = build("olmoe")
    mb.swap_blocks(layer.model.layers[1])
    with pytest.raises(ValueError, match=r"of shape .* from OlmoeDecoderLayer, .* whole model"):
        layer(input_ids=tokens, labels=tokens)
    layer.eval()(input_ids=tokens, labels=tokens)
    model.eval()
    logits = model(input_ids=tokens, return_dict=False)[0]
    torch.testing.assert_close(logits, model(input_ids=tokens).logits)


def test_a_checkpoint_in_several_files_is_loaded_whole() -> None:
    """As `Trainer` loads one, file by file; a file may hold any part of a block."""
    model = build("qwen2_moe")
    mb.swap_blocks(model)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for name in sorted(saved):
        loaded = model.load_state_dict({name: saved[name]}, strict=False)
        assert not loaded.unexpected_keys
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    original = build("qwen2_moe")
    of_block = "model.layers.0.mlp."
    for left_out in ("shared_expert.up_proj", "gate.", ""):  # a half, a whole of ours, all of them
        part = {n: t for n, t in saved.items() if not n.startswith(of_block + left_out)}
        wanted = original.load_state_dict(part, strict=False).missing_keys
        assert wanted
        assert sorted(model.load_state_dict(part, strict=False).missing_keys) == sorted(wanted)
        with pytest.raises(RuntimeError, match=re.escape(wanted[0])):
            model.load_state_dict(part)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
