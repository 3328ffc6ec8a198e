"""Flags of other forks of Megatron that ask for what there is not, or what here is said otherwise.

DeepSpeed's (Megatron-DeepSpeed, examples_deepspeed/MoE) and Alibaba's (Pai-Megatron-Patch). None is
translated: a script of theirs is another program's, whose defaults differ where it says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    "--fp8-hybrid": "there is no FP8 here: --bf16 is what trains",
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
