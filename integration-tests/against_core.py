"""GPTs of Megatron Core's, trained by its own code and by `mb-train`, on a CPU: a tool, not a test.

    pip install --no-deps --target core megatron-core==0.16.1
    PYTHONPATH=core python integration-tests/against_core.py
    PYTHONPATH=core python integration-tests/against_core.py latent

A case is flags of a script, and the configuration that they are in Core. Core draws the weights,
and the rules of `mb-train convert` carry them over. Printed are the largest deviations of one
micro-batch's gradient, by parameter, and of the losses and gradient norms of some steps, which
Core's model takes with Core's own schedules, rule of who decays and update of balancing biases.
The losses of experts, their means over layers and micro-batches, weight decay, clipping, rates: all
of it is in the steps. An argument chooses the cases whose name has it.

Core asks for a GPU and for Transformer Engine here and there. What it wants of them is replaced,
and attention to latents, which its layers for other machines have not, is written out.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import mb_data
import megatron.core.models.backends as backends
import megatron.core.tensor_parallel.layers as layers
import megatron.core.tensor_parallel.random as randomness
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.multi_latent_attention as latent_attention
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mb_train.assembly.execute import weigh
from mb_train.convert.megatron.core import _flat, _renamed
from mb_train.flags.command_line import parse, resolve
from mb_train.logs.timers import Clock
from mb_train.machine.signals import StopFlag
from mb_train.tasks.base import FIRST_INPUT
from mb_train.train.reports import Reports
from mb_train.train.run import Run
from mb_train.train.step import train_step
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

STEPS, MICRO, BATCH, S = 8, 2, 8, 24
SAME = (
    f"--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length {S} --use-mcore-models "
    f"--micro-batch-size {MICRO} --global-batch-size {BATCH} --train-iters {STEPS} --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer null:255 --num-workers 0 --device cpu "
    "--make-vocab-size-divisible-by 64 --split 100,0,0 --init-method-std 0.08 --clip-grad 0.5"
)
CORE = {
    "num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "init_method_std": 0.08,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True,
    "perform_initialization": True, "persist_layer_norm": False, "masked_softmax_fusion": False,
    "bias_activation_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}  # fmt: skip
LIMIT = 1e-5

GATED = {
    "activation_func": F.silu, "gated_linear_unit": True, "ffn_hidden_size": 96,
    "add_bias_linear": False,
}  # fmt: skip
GATES = "--swiglu --ffn-hidden-size 96 --disable-bias-linear --position-embedding-type rope"
EXPERTS = GATED | {
    "num_moe_experts": 8, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss",
}  # fmt: skip
ROUTED = f"{GATES} --num-experts 8 --moe-aux-loss-coeff 0.1"
LATENTS = {
    "multi_latent_attention": True, "normalization": "LayerNorm", "qk_layernorm": True,
    "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
LATENT = (
    f"{GATES} --multi-latent-attention --qk-layernorm --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12"
)
RATES = "--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.3"
# A case: its flags, Core's configuration, and what differs of Core's schedules.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GELU, biases, learned positions": (
        "--no-bias-gelu-fusion", {"activation_func": F.gelu}, {},
    ),
    "grouped queries, norms of them, rising decay": (
        f"{GATES} --group-query-attention --num-query-groups 2 --qk-layernorm --add-qkv-bias "
        "--rotary-percent 0.5 --untie-embeddings-and-output-weights --start-weight-decay 0.01 "
        "--end-weight-decay 0.5 --weight-decay-incr-style cosine",
        GATED | {"num_query_groups": 2, "qk_layernorm": True, "add_qkv_bias": True},
        {"start_wd": 0.01, "end_wd": 0.5, "wd_incr_style": "cosine"},
    ),
    "sinks, gates, a layer without positions": (
        f"{GATES} --softmax-type learnable --attention-output-gate --no-rope-freq 3",
        GATED | {"softmax_type": "learnable", "attention_output_gate": True,
                 "no_rope_freq": [0, 0, 1]}, {},
    ),
    "quick GEGLU, clamped": (
        "--ffn-hidden-size 96 --disable-bias-linear --position-embedding-type rope --quick-geglu "
        "--glu-linear-offset 1 --activation-func-clamp-value 2",
        GATED | {"activation_func": quick_gelu, "glu_linear_offset": 1.0,
                 "activation_func_clamp_value": 2.0}, {},
    ),
    "experts, a loss of theirs and a z-loss": (
        f"{ROUTED} --moe-router-topk 2 --moe-z-loss-coeff 0.02",
        EXPERTS | {"moe_router_topk": 2, "moe_z_loss_coeff": 0.02}, {},
    ),
    "experts in every second layer, one shared, global balance": (
        f"{ROUTED} --moe-router-topk 2 --moe-layer-freq 2 --moe-ffn-hidden-size 32 "
        "--moe-router-load-balancing-type global_aux_loss --moe-shared-expert-gate "
        "--moe-shared-expert-intermediate-size 48",
        EXPERTS | {"moe_router_topk": 2, "moe_layer_freq": 2, "moe_ffn_hidden_size": 32,
                   "moe_router_load_balancing_type": "global_aux_loss",
                   "moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 48}, {},
    ),
    "experts by sigmoids, a bias and groups, balance by sequence": (
        f"{ROUTED} --moe-router-topk 4 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-load-balancing-type seq_aux_loss",
        EXPERTS | {"moe_router_topk": 4, "moe_router_score_function": "sigmoid",
                   "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.01,
                   "moe_router_num_groups": 4, "moe_router_group_topk": 2,
                   "moe_router_topk_scaling_factor": 2.5,
                   "moe_router_load_balancing_type": "seq_aux_loss"}, {},
    ),
    "experts by probabilities in groups": (
        f"{ROUTED} --moe-router-topk 4 --moe-router-pre-softmax --moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 1.7",
        EXPERTS | {"moe_router_topk": 4, "moe_router_pre_softmax": True,
                   "moe_router_num_groups": 4, "moe_router_group_topk": 2,
                   "moe_router_topk_scaling_factor": 1.7}, {},
    ),
    "one expert by Sinkhorn": (
        f"{GATES} --num-experts 8 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn",
        EXPERTS | {"moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn",
                   "moe_aux_loss_coeff": 0.0}, {},
    ),
    "experts with a capacity": (
        f"{ROUTED} --moe-router-topk 2 --moe-expert-capacity-factor 0.7",
        EXPERTS | {"moe_router_topk": 2, "moe_expert_capacity_factor": 0.7,
                   "moe_token_dispatcher_type": "alltoall"}, {},
    ),
    "experts with biases": (
        "--no-bias-gelu-fusion --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1",
        {"activation_func": F.gelu, "num_moe_experts": 4, "moe_router_topk": 2,
         "moe_aux_loss_coeff": 0.1}, {},
    ),
    "latent attention, YaRN": (
        f"{LATENT} --q-lora-rank 24 --rotary-scaling-factor 4 --mscale-all-dim 0.7",
        GATED | LATENTS | {"q_lora_rank": 24, "rope_type": "yarn", "rotary_scaling_factor": 4.0,
                           "mscale_all_dim": 0.7}, {},
    ),
    "latent attention, queries of none, turned sharper": (
        f"{LATENT} --rotary-scaling-factor 40 --mscale 0.7 --max-position-embeddings 163840",
        GATED | LATENTS | {"q_lora_rank": None, "rope_type": "yarn",
                           "rotary_scaling_factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.0}, {},
    ),
    "further tokens": (
        f"{GATES} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3",
        GATED | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}, {},
    ),
}  # fmt: skip


class _Stream:
    """A stream or event of a GPU, for which nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


class _LatentCore(nn.Module):
    """Causal attention whose values are not as wide as queries and keys; [S, B, H, C]."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        scores = q @ k.mT * self.scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return y.permute(2, 0, 1, 3).flatten(2)


_DOT_PRODUCT = backends.DotProductAttention


def without_gpu() -> None:
    """Let Core run in one process of a machine without a GPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = _Stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda *_: None
    randomness.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    latent_attention.TELinear = type("TELinear", (), {})
    # Core writes into what this returns, which autograd lets nobody do on one rank.
    layers.reduce_from_tensor_model_parallel_region = lambda x, group=None: x.clone()


def write_tokens(folder: Path) -> str:
    """Texts of numbers drawn at random.

    Two sequences that begin alike have tokens that score alike, of which Core drops any.
    """
    with mb_data.IndexedDatasetBuilder(folder / "random", np.uint16) as builder:
        for tokens in np.random.default_rng(0).integers(255, size=(80, 40)):
            builder.add_document(tokens)
    return str(folder / "random")


def core_model(settings: dict[str, Any], flags: str, vocabulary: int) -> GPTModel:
    """Core's model, its biases and norms not as they begin."""
    moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER.clear()
    MTPLossLoggingHelper.tracker.clear()
    latent = "multi_latent_attention" in settings
    backends.DotProductAttention = _LatentCore if latent else _DOT_PRODUCT
    config = (MLATransformerConfig if latent else TransformerConfig)(**CORE | settings)
    blocks = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    behind = None
    if config.mtp_num_layers:
        behind = get_gpt_mtp_block_spec(config, blocks, use_transformer_engine=False)
    model = GPTModel(
        config,
        blocks,
        vocab_size=vocabulary,
        max_sequence_length=S,
        share_embeddings_and_output_weights="--untie" not in flags,
        position_embedding_type="rope" if "rope" in flags else "learned_absolute",
        rotary_percent=0.5 if "--rotary-percent" in flags else 1.0,
        mtp_block_spec=behind,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


class Pair:
    """A case in Core and here, from the same weights."""

    def __init__(self, flags: str, settings: dict[str, Any], course: dict[str, Any], data: str):
        torch.manual_seed(0)
        decay = "" if course else "--weight-decay 0.1"
        words = f"{SAME} {RATES} {decay} {flags} --data-path {data}".split()
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = Run(resolve(parse(words)), torch.device("cpu"), None)
        self.run.sign_of_life = lambda _: None
        self.core = core_model(settings, flags, self.run.vocab_size)
        (self.ours,) = self.run.model.parts
        self._args = Namespace(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1, quick_geglu=False,
            num_experts=settings.get("num_moe_experts"), hidden_size=CORE["hidden_size"],
            swiglu=settings.get("gated_linear_unit", False),
        )  # fmt: skip
        self.ours.load_state_dict(self.by_our_names(self.core.state_dict()))
        lengths = {"lr_warmup_steps": 0.3 * STEPS * BATCH, "lr_decay_steps": STEPS * BATCH}
        rates = {"init_lr": 0.0, "max_lr": 3e-3, "min_lr": 3e-4, "lr_decay_style": "cosine"}
        decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant"} | course
        never = [p for n, p in self.core.named_parameters() if n.endswith(".bias") or p.ndim == 1]
        others = [p for p in self.core.parameters() if not any(p is other for other in never)]
        self.optimizer = torch.optim.AdamW(
            [{"params": others}, {"params": never, "wd_mult": 0.0}], lr=0.0
        )
        self.schedule = OptimizerParamScheduler(
            self.optimizer, **rates, **lengths, **decay, wd_incr_steps=STEPS * BATCH,
            use_checkpoint_opt_param_scheduler=False,
        )  # fmt: skip

    def by_our_names(self, tensors: dict[str, Any]) -> dict[str, Tensor]:
        """Core's weights, or what it has of each of them, as ours."""
        alone = {n: t for n, t in tensors.items() if isinstance(t, Tensor)}
        if self.core.share_embeddings_and_output_weights:
            alone.pop("output_layer.weight", None)
        flat = _flat(alone, self._args, 0)
        return dict(_renamed([flat], self.run.config, self.run.vocab_size).items())

    def core_loss(self, batch: dict[str, Tensor], passes: int) -> Tensor:
        """Core's mean over a micro-batch; its other losses begin in the backward pass."""
        for scaler in (moe_utils.MoEAuxLossAutoScaler, MTPLossAutoScaler):
            scaler.main_loss_backward_scale = torch.tensor(1 / passes)
        tokens = batch[FIRST_INPUT]
        later = torch.ones(1, 1, S, S, dtype=torch.bool).triu(1)
        places = torch.arange(S).expand_as(tokens)
        labels = batch["labels_BS"].contiguous()
        return self.core(tokens, places, later, labels=labels).mean()

    def gradients(self) -> tuple[float, str]:
        """The largest deviation of a parameter's gradient in one micro-batch, and whose it is."""
        stream = self.run.stream(self.run.data.train, consumed_samples=0, stop=StopFlag())
        batch = next(stream)
        stream.close()
        self.core_loss(batch, 1).backward()
        weigh(self.run.task, self.run.mesh, [batch])
        self.ours(batch.pop(FIRST_INPUT), **batch).total().backward()
        grads = {name: p.grad for name, p in self.core.named_parameters()}
        # Buffers have none.
        theirs = self.by_our_names({**self.core.state_dict(), **grads})
        found = (0.0, "")
        for name, parameter in self.ours.named_parameters():
            assert parameter.grad is not None
            apart = (parameter.grad - theirs[name]).norm() / theirs[name].norm()
            found = max(found, (float(apart), name))
        self.ours.zero_grad()
        self.optimizer.zero_grad()
        self._forget_loads()
        return found

    def steps(self) -> tuple[float, float]:
        """The largest deviations of the steps' losses and gradient norms."""
        run, stop = self.run, StopFlag()
        mine, theirs = (run.stream(run.data.train, consumed_samples=0, stop=stop) for _ in range(2))
        accumulator, apart = Reports(run, Clock(run.device)).accumulator, (0.0, 0.0)
        passes = BATCH // MICRO
        for _ in range(STEPS):
            norm = float(train_step(run, mine, accumulator).grad_norm)
            loss = 0.0
            for _ in range(passes):
                part = self.core_loss(next(theirs), passes) / passes
                part.backward()
                loss += part.item()
            wanted = float(nn.utils.clip_grad_norm_(self.core.parameters(), run.config.clip_grad))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step(BATCH)
            self._move_biases()
            ours = float(run.last_losses["lm loss"])
            apart = max(apart[0], abs(ours - loss)), max(apart[1], abs(norm / wanted - 1))
        return apart

    def _routers(self) -> list[Any]:
        return [m for m in self.core.modules() if hasattr(m, "reset_global_aux_loss_tracker")]

    def _forget_loads(self) -> None:
        for router in self._routers():
            router.reset_global_aux_loss_tracker()
            if router.local_tokens_per_expert is not None:
                router.local_tokens_per_expert.zero_()

    def _move_biases(self) -> None:
        rate = self.run.config.moe_router_bias_update_rate
        for router in self._routers():
            if router.expert_bias is not None:
                loads, bias = router.local_tokens_per_expert, router.expert_bias
                bias.copy_(moe_utils.get_updated_expert_bias(loads, bias, rate))
        self._forget_loads()


def main(wanted: str) -> bool:
    """Run the cases whose name has `wanted`; whether all are alike."""
    without_gpu()
    alike = True
    with tempfile.TemporaryDirectory() as made:
        data = write_tokens(Path(made))
        for name, (flags, settings, course) in CASES.items():
            if not re.search(re.escape(wanted), name, re.IGNORECASE):
                continue
            pair = Pair(flags, settings, course, data)
            (gradient, where), (loss, norm) = pair.gradients(), pair.steps()
            fine = max(gradient, loss, norm) < LIMIT
            print(
                f"{'ok     ' if fine else 'DIFFERS'} {name}: gradient {gradient:.0e} ({where})  "
                f"losses {loss:.0e}  gradient norms {norm:.0e}",
                flush=True,
            )
            alike &= fine
    return alike


if __name__ == "__main__":
    raise SystemExit(not main(" ".join(sys.argv[1:])))
