"""Flags of Megatron and its forks that ask for what there is not, or what here is said otherwise.

They are errors with a reason, not words unheard of: trained without what they ask for, a model
would be another one. Megatron Core's come first, then DeepSpeed's (Megatron-DeepSpeed) and
Alibaba's (Pai-Megatron-Patch), of which none is translated: where a script of theirs says nothing,
its defaults are others.
"""

from __future__ import annotations

from collections.abc import Mapping

_FP8 = "there is no FP8 here: --bf16 is what trains"
_UNEVEN = "stages get equally many layers, the first ones more where they do not divide"
_DEEPSPEED = "DeepSpeed's settings are flags here: see --zero-stage, --fp16 and --bf16"
_LENGTHS = "lengths are in steps or in samples of --seq-length tokens: say --{}"
_OFFLOAD = "the optimizer stays on the GPUs: see --zero-stage"
_YARN = "rotations slow down as --use-rope-scaling or --rotary-seq-len-interpolation-factor say"
_MTP = "a model predicts the next token only"
_MLA = "there is no latent attention: --group-query-attention saves memory too"
_MUON = "Muon's momentum is 0.95, and its updates have the size of Adam's"
_CONTEXT = "there is no context parallelism. Long sequences: --sequence-parallel, recompute"

# Flag -> why it is refused, and what there is instead.
REFUSED: Mapping[str, str] = {
    "--fp8-format": _FP8,
    "--fp8-recipe": _FP8,
    "--fp8-margin": _FP8,
    "--fp8-interval": _FP8,
    "--fp8-amax-history-len": _FP8,
    "--fp8-amax-compute-algo": _FP8,
    "--fp8-param-gather": _FP8,
    "--moe-router-padding-for-fp8": _FP8,
    "--fp4-format": "there is no FP4 here: --bf16 is what trains",
    "--multi-latent-attention": _MLA,
    "--q-lora-rank": _MLA,
    "--kv-lora-rank": _MLA,
    "--qk-head-dim": _MLA,
    "--qk-pos-emb-head-dim": _MLA,
    "--v-head-dim": _MLA,
    "--mtp-num-layers": _MTP,
    "--mtp-loss-scaling-factor": _MTP,
    "--apply-layernorm-1p": "norms multiply by their weight, not by one more than it",
    "--decoupled-lr": "embeddings and head train at --lr",
    "--decoupled-min-lr": "embeddings and head train at --lr",
    "--window-size": "attention sees the whole sequence",
    "--quick-geglu": "the same is --activation 'swiglu(alpha=1.702)'",
    "--hybrid-override-pattern": "there are no Mamba layers",
    "--hybrid-layer-pattern": "there are no Mamba layers",
    "--num-virtual-stages-per-pipeline-rank": "say --num-layers-per-virtual-pipeline-stage",
    "--pipeline-model-parallel-layout": _UNEVEN,
    "--decoder-first-pipeline-num-layers": _UNEVEN,
    "--decoder-last-pipeline-num-layers": _UNEVEN,
    "--optimizer-cpu-offload": _OFFLOAD,
    "--cpu-offloading": "activations stay on the GPUs: see --recompute-granularity",
    "--moe-use-upcycling": "the upcycle command makes experts of a dense run",
    "--pretrained-checkpoint": "--load RUN --finetune begins from weights",
    "--ckpt-convert-format": "the convert command does that",
    "--yaml-cfg": "--config reads a TOML file, which --print-config writes",
    "--spec": "the layers are this library's",
    "--deepspeed": _DEEPSPEED,
    "--deepspeed_config": _DEEPSPEED,
    "--deepspeed-activation-checkpointing": "say --recompute-granularity",
    "--no-pipeline-parallel": "leave it out, as --pipeline-model-parallel-size",
    "--train-tokens": _LENGTHS.format("train-samples"),
    "--lr-decay-tokens": _LENGTHS.format("lr-decay-samples"),
    "--lr-warmup-tokens": _LENGTHS.format("lr-warmup-samples"),
    "--moe-expert-parallel-size": "say --expert-model-parallel-size, and --moe-layer-freq 2, for "
    "every second layer has experts there if nothing else is said",
    "--expert-interval": "say --moe-layer-freq: the first of every N layers has experts, not the "
    "last, and N is 1 where it is not given",
    "--moe-loss-coeff": "say --moe-aux-loss-coeff, which weighs every layer's loss too",
    "--moe-train-capacity-factor": "say --moe-capacity-factor",
    "--disable-moe-token-dropping": "leave --moe-capacity-factor out, no token is dropped then",
    "--create-moe-param-group": "leave it out, it sets nothing that the optimizer needs here",
    "--topk": "say --moe-router-topk",
    "--mlp-type": "see --moe-shared-expert-intermediate-size for an expert that all tokens visit",
    "--num-key-value-heads": "say --group-query-attention --num-query-groups",
    "--extra-vocab-size": "a tokenizer says its own size, --make-vocab-size-divisible-by pads it",
    "--patch-tokenizer-type": "say --tokenizer FILE, with the model's tokenizer.json",
    "--dataset": "--data-path reads the files of mb-data preprocess, and Megatron's",
    "--optimizer-offload-policy": _OFFLOAD,
    "--optimizer-offload-fraction": _OFFLOAD,
    "--cpu-offloading-num-layers": "activations stay on the GPUs: see --recompute-granularity",
    "--fp8-hybrid": _FP8,
    "--qk-nope-head-dim": _MLA,
    "--qk-rope-head-dim": _MLA,
    "--mscale": _YARN,
    "--mscale-all-dim": _YARN,
    "--rotary-scaling-factor": _YARN,
    "--use-multi-token-prediction": _MTP,
    "--num-mtp-predictor": _MTP,
    "--enable-shared-expert": "say --moe-shared-expert-intermediate-size",
    "--num-shared-experts": "say --moe-shared-expert-intermediate-size, of all of them together",
    "--router-type": "say --moe-router-topk",
    "--moe-router-type": "say --moe-router-topk",
    "--moe-router-topk-limited-devices": "say --moe-router-num-groups and --moe-router-group-topk",
    "--use-llama2-rotary-position-embeddings": "say --position-embedding-type rope",
    "--expert-tensor-parallelism": "with more ranks than experts --expert-model-parallel-size cuts "
    "them",
    "--cp-comm-type": _CONTEXT,
    "--hierarchical-context-parallel-sizes": _CONTEXT,
    "--num-distributed-optimizer-instances": "say --data-parallel-replicas",
    "--muon-momentum": _MUON,
    "--muon-extra-scale-factor": _MUON,
    "--muon-scale-mode": _MUON,
}
