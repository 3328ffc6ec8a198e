"""Flags that are unknown, or of Megatron and its forks for what does not exist here.

The latter are errors with a reason, because a model trained without one would be another one; a
few are accepted with a number that asks for nothing, see `translated`.
Megatron Core's come first, then those of Megatron's old tasks, DeepSpeed's (Megatron-DeepSpeed,
BigScience), Alibaba's (Pai-Megatron-Patch) and Huawei's (MindSpeed), those of other forks (EPFL's,
Swiss AI's, LLM-jp's), and what transformers, torchtitan, nanoGPT and torchrun call what is called
otherwise here. Those of the three companies are never translated, because their scripts also rely
on defaults that are not ours.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

# Why, and what there is instead; the flags of which that holds. "*" stands for any end of a flag.
_REASONS: Mapping[str, str] = {
    "FP8 is of the products with the weights of blocks, and of nothing else: see --fp8-format": """
        --fp8* --no-fp8-*
    """,
    "say --fp8-format and --first-last-layers-bf16, for precisions of whole layers": """
        --te-precision-config-file --kitchen-* --use-kitchen --use-kitchen-attention
    """,
    "there is no FP4 here: --bf16 is what trains": "--fp4*",
    "say --qk-head-dim": "--qk-nope-head-dim",
    "say --window-size, which does not count a token itself: one less": """
        --sliding-window --sliding-window-size
    """,
    "say --qk-pos-emb-head-dim": "--qk-rope-head-dim",
    "attention is a softmax over what came before, its gate that of --attention-output-gate, or "
    "a state by --experimental-attention-variant gated_delta_net": """
        --head-wise-attn-gate --linear-attention-* --dsa-* --csa-* --o-groups --o-lora-rank
        --use-lf-gate --lf-conv2d-* --gdn-*
    """,
    "say --attention-output-gate": "--use-gated-attention",
    "say --norm-placement both": "--post-self-attn-layernorm --post-mlp-layernorm",
    "maps of queries and keys are not clipped: --qk-layernorm or --clip-qkv bounds scores": """
        --qk-clip*
    """,
    "say --rope-type yarn, --rotary-scaling-factor, --mscale and the like": """
        --yarn-* --rope-scaling-type --rope-scaling-beta-fast --rope-scaling-beta-slow
        --rope-scaling-mscale --rope-scaling-mscale-all-dim
        --rope-scaling-original-max-position-embeddings
    """,
    "--recipe gpt-oss-20b is that model, with rotations of --rope-type yarn, "
    "--rotary-scaling-factor 32 and --no-yarn-truncate": "--enable-gpt-oss",
    "all layers have --rotary-base, but for those of --no-rope-freq, which have no positions": """
        --rotary-base-per-layer
    """,
    "T5's encoder lies on the ranks of its decoder": """
        --encoder-tensor-model-parallel-size --encoder-pipeline-model-parallel-size
    """,
    "T5 tells 32 distances apart, up to 128 tokens": """
        --relative-attention-num-buckets --relative-attention-max-distance
    """,
    "say --softmax-type learnable, which gives each head a sink": "--attention-sink-k",
    "a tokenizer says its own size, and --make-vocab-size-divisible-by pads it": """
        --extra-vocab-size
    """,
    "say --mtp-num-layers": "--use-multi-token-prediction --num-mtp-predictor",
    "--mtp-loss-scaling-factor holds for the whole run": "--mtp-loss-scaling-factor-*",
    "each module of --mtp-num-layers is a layer like the last, or of the letters of "
    "--mtp-hybrid-override-pattern, with weights of its own": """
        --mtp-*
    """,
    "norms and biases have no weight decay": """
        --apply-wd-to-qk-layernorm --no-weight-decay-cond-type
    """,
    "say --decoupled-lr": "--head-lr-mult",
    "all weights are drawn by --init-method-std": "--embedding-init-method-std",
    "weights are drawn from a normal distribution, by --init-method-std: leave it out, as it is "
    "without effect in MegaBlocks' fork of Megatron": "--init-method-xavier-uniform",
    "say --hybrid-layer-pattern, with a letter for each layer, in place of it or in its shares": """
        --hybrid-attention-ratio --hybrid-mlp-ratio --is-hybrid-model
    """,
    "Mamba layers have heads, groups and widths: see --mamba-num-heads and its like": "--mamba-*",
    "there are no models of images": """
        --img-* --vision-* --patch-dim --num-channels --num-classes --freeze-LM --freeze-ViT
        --language-model-type --disable-vision-class-token --dino-* --swin-* --mask-type
        --mask-factor --mrope-* --iter-per-epoch --classes-fraction --data-per-class-fraction
    """,
    "no layer looks up neighbours of a text, as Retro's do": """
        --retro-* --output-bert-embeddings --bert-embedder-type
    """,
    "all layers are alike, but for --moe-layer-freq": "--heterogeneous-*",
    "the layers are this library's": "--spec --custom-model-provider-path",
    "a router chooses by its scores in every layer": """
        --moe-n-hash-layers --moe-enable-routing-replay
    """,
    "say --moe-router-force-load-balancing, for a benchmark": "--moe-router-force-biased",
    "it follows from --hidden-size and --mup-base-hidden-size": "--mup-width-mult",
    "of a model's scales only those of its width are here: see --use-mup": "--scaling-*",
    "there is one residual stream": """
        --enable-hyper-connections --num-residual-streams --mhc-* --use-fused-mhc
    """,
    "with more ranks than experts --expert-model-parallel-size cuts them": """
        --expert-tensor-parallelism --moe-extended-tp --enable-expert-tensor-parallelism
    """,
    "all sequences are shared by as many ranks, see --context-parallel-size": """
        --hybrid-context-parallel --dynamic-context-parallel --max-seqlen-per-dp-cp-rank
    """,
    "say --context-parallel-size, which exchanges heads as DeepSpeed-Ulysses does": """
        --ds-sequence-parallel-size --force-ds-sequence-parallel --context-parallel-algo
    """,
    "say --optimizer-cpu-offload, of Adam's moments": """
        --cpu-optimizer --cpu_torch_adam --remote-device --use-pin-memory
    """,
    "weights stay on the GPUs, and activations go as --cpu-offloading-num-layers says": """
        --cpu-offloading-weights --no-cpu-offloading-activations
    """,
    "say --cpu-offloading-num-layers, of which layers": "--activation-offload-fraction",
    "all stages offload alike": "--delta-offload-bytes-across-pp-ranks",
    "copies to the host are not captured in CUDA graphs": "--delay-offload-until-cuda-graph",
    "say --cpu-offloading-num-layers beside --recompute-granularity full": "--checkpoint-in-cpu",
    "say --offload-modules core_attn": "--swap-attention",
    "every batch is trained on, and they grow as --rampup-batch-size says": """
        --iterations-to-skip --step-batch-size-schedule --skip-train-iteration-range
    """,
    "an evaluation is --eval-iters batches of --global-batch-size, of all validation data": """
        --full-validation --multiple-validation-sets --validation-set-names --start-eval-at-iter
        --eval-global-batch-size --eval-micro-batch-size
    """,
    "say --keep-checkpoints": "--most-recent-k",
    "a vocabulary is padded as --make-vocab-size-divisible-by says": "--no-pad-vocab-size",
    "the upcycle command makes experts of a dense run": """
        --moe-use-upcycling --moe-upcycling-granularity
    """,
    "the convert command does that": "--ckpt-convert-*",
    "--config reads a TOML file, which --print-config writes": "--yaml-cfg",
    "mb-data chats writes conversations with their model's own template, for --sft": """
        --sft-tokenizer-prompt-format --finetune-hf-dataset --ap-sft*
    """,
    "there is no reinforcement learning: a run learns from the texts of --data-path": """
        --perform-rl-step --rl-* --no-rl-* --grpo-* --langrl-* --refit-*
    """,
    "mb-train generate RUN writes texts, and mb-train serve RUN answers requests": """
        --inference* --ds-inference --use-legacy-static-engine --decode-only-cuda-graphs
        --enable-chunked-prefill --disable-chunked-prefill --num-speculative-tokens
        --return-log-probs --skip-prompt-log-probs --use-flashinfer-fused-rope --flash-decode
        --symmetric-ar-type --nccl-all-reduce-for-prefill --mlp-chunks-for-prefill
        --use-same-sampling-seed-across-dp-ranks --moe-pad-experts-for-cuda-graph-inference
        --use-inference-optimized-layers --prompt-format --num-tokens-to-generate --out-seq-length
        --sample-input-file --sample-output-file --genfile
    """,
    "--load RUN --finetune begins from weights, and mb-train finetune RUN learns a task": """
        --pretrained-checkpoint
    """,
    "say mb-train eval RUN FILE --task lambada --strict": "--strict-lambada",
    "say mb-train eval RUN FILE --task wikitext --stride": "--overlapping-eval",
    "see mb-train index and mb-train retrieve": "--qa-data-dev --qa-data-test --faiss-*",
    "DeepSpeed's settings are flags here: see --zero-stage, --fp16 and --bf16": """
        --deepspeed --deepspeed_config --deepspeed_mpi --deepscale --deepscale_config
        --zero-reduce-scatter --zero-contigious-gradients --zero-reduce-bucket-size
        --zero-allgather-bucket-size
    """,
    "say --recompute-granularity": """
        --deepspeed-activation-checkpointing --partition-activations --contigious-checkpointing
        --synchronize-each-layer --profile-backward --split-transformers
        --memory-centric-tiled-linear --tile-factor --scattered-embeddings
        --recompute-activation-function
    """,
    "say --optimizer adam, whose step is one kernel": "--ds_fused_adam",
    "say --optimizer-state-dtype bf16, which halves it": "--use-bnb-optimizer",
    "say --pipeline-schedule interleaved-zero-bubble or zbv-zero-bubble": """
        --enable-zbh1-* --enable-zero-bubble --zero-bubble-* --enable-optimizer-post-validation
        --enable-exactly-numeric-match
    """,
    "say --ckpt-step": "--load-iteration",
    "say --deterministic-mode": "--batch-invariant-mode",
    "say --num-virtual-stages-per-pipeline-rank": "--virtual-pipeline-model-parallel-size",
    "say --eod-token": "--null-tokenizer-eod-id",
    "say --swiglu, or --activation": "--gated-linear-unit",
    "a blend asks each data set for 0.5 % more samples than its share": """
        --mid-level-dataset-surplus
    """,
    "one blend of data holds for the whole run": "--phase-transition-iterations",
    "all micro-batches are computed alike: see --recompute-granularity": """
        --num-microbatches-with-partial-activation-checkpoints
    """,
    "--load RUN --finetune begins at step 0": "--reset-iteration",
    "--load RUN --no-load-optim begins the rates anew": "--no-load-lr-state --reset-lr-state",
    "data is read as often as --train-iters or --train-samples need it, and its index is built "
    "here: see --data-cache-path": """
        --train-data-exact-num-epochs --repeated-dataloader --return-data-index --use-dataset-only
        --train-idx-path --train-desc-path --train-doc-idx-path --train-sample-idx-path
        --train-shuffle-idx-path --aml-data-download-path
    """,
    "leave it out, what is logged is in the run folder, log.jsonl": """
        --log-level --log-level-replica --log-path --log-optimizer-states-to-tensorboard
        --codecarbon-dir
    """,
    "leave it out, there is one implementation": """
        --disable-mem-efficient-ln --custom-token-counting --multiprocessing-context
    """,
    "say --rotary-base": "--rotary-position-embeddings-theta --rope-theta",
    "leave it out, attention always takes the fastest kernel of torch": """
        --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton --use-flash-attn-builder
    """,
    "leave it out, the experts are this library's": """
        --use-tutel --moe-model-type --use-mok-megakernel --mok-*
    """,
    "a second expert is the next best: the choice has no noise but --moe-jitter-eps": """
        --moe-top2-2nd-expert-sampling --noisy-gate-policy
    """,
    "any checkpoint loads on any number of ranks: say --load": "--universal-checkpoint",
    "samples come in their shuffled order, all tokens of them: there is no curriculum": """
        --curriculum-learning-* --data-efficiency-curriculum-learning --random-ltd
    """,
    "a model learns from texts, not from another model": """
        --kd --kd-* --mos --mos-* --teacher-forward --load-teacher --num-layers-teacher
        --num-attention-heads-teacher --hidden-size-teacher --num-experts-teacher
        --teacher-model-config
    """,
    "weights are neither pruned nor rounded for a later use: mb-train convert RUN gives them to "
    "others as they are": "--compression-training --export-* --modelopt-enabled",
    "say --train-data-path, --valid-data-path and --test-data-path": """
        --train-weighted-split-paths* --valid-weighted-split-paths* --test-weighted-split-paths*
    """,
    "all targets count, but what --eod-mask-loss leaves out": """
        --loss-on-targets-only --norm-target-loss --reweight-loss-based-on-position-frequency
        --goldfish-*
    """,
    "say --activation: there is no xIELU": "--xielu --weight-decay-on-xielu-alphas",
    "say --optimizer adam, sgd, adafactor or muon": "--ademamix-* --lion-*",
    "leave it out, norms have one implementation": "--qknorm-impl",
    "say --reset-attention-mask, with which tokens see their own document alone": """
        --use-packed-seq-params --sequence-packing-scheduler --pad-packed-seq-alignment
        --thd-max-packed-sequences
    """,
    "say --moe-router-lr-mult": "--lr-scale-gate",
    "leave it out, see --moe-router-fp32": "--use-fp32-router",
    "say --num-workers, which are those of all data": "--valid-num-workers",
    "say --untie-embeddings-and-output-weights": "--no-tie-embed-logits",
    "attention and feed-forward stand one behind the other": "--parallel-attn",
    "say --wandb-project": "--wandb-logger --wandb-log --report-to",
    "leave it out, torchrun starts the ranks": "--use-mpi --fake-process-group",
    "say --exit-duration-in-mins, or send a SIGTERM, which saves": """
        --kill-switch-path --kill-switch-file
    """,
    "leave it out, what all ranks hold stays equal here": "--sync-tp-duplicated-parameters",
    "leave it out, there is one kernel, which has no such constraints": """
        --abort-on-unmet-fused-kernel-constraints
    """,
    "leave it out, as --pipeline-model-parallel-size": "--no-pipeline-parallel",
    "lengths are in steps or in samples of --seq-length tokens: say --train-samples": """
        --train-tokens
    """,
    "lengths are in steps or in samples of --seq-length tokens: say --lr-decay-samples": """
        --lr-decay-tokens
    """,
    "lengths are in steps or in samples of --seq-length tokens: say --lr-warmup-samples": """
        --lr-warmup-tokens
    """,
    "say --expert-model-parallel-size, and --moe-layer-freq 2, for every second layer has experts "
    "there if nothing else is said": "--moe-expert-parallel-size",
    "say --moe-layer-freq: the first of every N layers has experts, not the last, and N is 1 where "
    "it is not given": "--expert-interval",
    "say --moe-aux-loss-coeff, which weighs every layer's loss too": "--moe-loss-coeff",
    "say --moe-capacity-factor": "--moe-train-capacity-factor",
    "leave --moe-capacity-factor out, no token is dropped then": "--disable-moe-token-dropping",
    "leave it out, it sets nothing that the optimizer needs here": "--create-moe-param-group",
    "say --moe-router-topk": "--topk --router-type",
    "a router is a linear map of the hidden state": "--use-attention-router",
    "say --multi-latent-attention": "--multi-head-latent-attention",
    "see --moe-shared-expert-intermediate-size for an expert that all tokens visit": "--mlp-type",
    "say --group-query-attention --num-query-groups": "--num-key-value-heads",
    "only with --post-layernorm embeddings have a norm": "--embed-layernorm",
    "say --tokenizer-type HuggingFaceTokenizer --tokenizer-model": "--tokenizer-name-or-path",
    "say --swiglu or --activation": "--glu-activation",
    "say --tokenizer-model": "--tokenizer-model-path",
    "say --max-position-embeddings": "--max-absolute-position-embeddings",
    "the tokenizer's own special tokens are the ones there are": "--vocab-extra-ids-list",
    "say --tokenizer FILE, with the model's tokenizer.json": "--patch-tokenizer-type",
    "say --moe-shared-expert-intermediate-size, of all of them together": "--n-shared-experts",
    "say --moe-shared-expert-gate": "--shared-expert-gate",
    "say --moe-ffn-hidden-size": "--moe-intermediate-size",
    "say --moe-first-k-dense": "--first-k-dense-replace",
    "say --moe-router-topk, which makes a token's weights add up to 1": "--norm-topk-prob",
    "say --moe-router-load-balancing-type seq_aux_loss": "--seq-aux",
    "leave it out, fusion is the kernels' own matter": """
        --use-fused-* --gemm-gradient-accumulation-fusion --use-fast-softmax
        --fused-padded-mla-attention
    """,
    "say --recompute-granularity, or a smaller --micro-batch-size": "--mlp-chunks-for-training",
    "say --moe-saved-activation-bits, of experts: elsewhere what the backward pass needs is kept "
    "as it is": "--activation-func-fp8-input-store",
    "leave it out, how ranks communicate is the library's own matter": """
        --moe-permutation-async-comm --moe-alltoall-overlap-comm --moe-allgather-overlap-comm
        --use-mc2
    """,
    "say --moe-router-num-groups and --moe-router-group-topk": """
        --moe-router-topk-limited-devices
    """,
    "say --position-embedding-type rope": "--use-llama2-rotary-position-embeddings",
    "say --lr": "--learning-rate --max-lr",
    "say --lr-decay-style": "--lr-scheduler --lr-scheduler-type",
    "say --lr-warmup-fraction, of the decay": "--warmup-ratio",
    "say --train-iters": "--max-steps --num-train-steps --max-iters --num-iterations --total-steps",
    "say --train-iters or --train-samples: a run goes through its data as often as that takes, and "
    "mb-train finetune RUN --task mnli, qqp or race as often as its --epochs say": """
        --num-train-epochs --num-epochs --epochs
    """,
    "say --seq-length": """
        --block-size --context-length --seq-len --max-seq-len --max-seq-length --sequence-length
    """,
    "say --num-layers": "--n-layer --n-layers --num-hidden-layers",
    "say --micro-batch-size": "--device-batch-size --device-train-microbatch-size",
    "say --adam-beta1 and --adam-beta2": "--adam-betas --betas",
    "say --zero-stage": "--fsdp",
    "mb-train convert makes a run folder of a model from elsewhere, for --load with --finetune": """
        --model-name-or-path --pretrained-model-name-or-path
    """,
    "say --clip-grad": "--max-grad-norm --grad-clip --gradient-clipping",
    "say --hidden-dropout and --attention-dropout": """
        --dropout --flash-attn-drop --no-embedding-dropout
    """,
    "say --micro-batch-size, of a rank, and --global-batch-size, of a step": """
        --gradient-accumulation-steps --per-device-train-batch-size
    """,
    "say --num-attention-heads": "--num-heads --n-head --n-heads",
    "say --hidden-size": "--n-embd --d-model",
    "say --activation": "--hidden-act",
    "say --normalization RMSNorm": "--use-rmsnorm --use-rms-norm --norm-type --norm-dtype",
    "say --moe-top-k": "--num-experts-per-tok",
    "say --tensor-model-parallel-size": "--tp --tp-size",
    "say --pipeline-model-parallel-size": "--pp --pp-size",
    "say --context-parallel-size": "--cp --cp-size",
    "say --expert-model-parallel-size": "--ep --ep-size",
    "data-parallel are the ranks that the other parallel sizes leave": "--dp --dp-size",
    "say --bf16 or --fp16": "--dtype --precision --mixed-precision --enable-autocast",
    "say --compile": "--torch-compile",
    "say --recompute-granularity, selective or full": """
        --gradient-checkpointing --activation-checkpointing
    """,
    "say --save": "--output-dir --save-dir",
    "say --load": "--resume --resume-from --resume-from-checkpoint",
    "it is torchrun's, and stands before -m mb_train": """
        --nproc_per_node --nproc-per-node --nnodes --node_rank --node-rank --master_addr
        --master-addr --master_port --master-port
    """,
}
_REFUSED = {name: reason for reason, flags in _REASONS.items() for name in flags.split()}
_FAMILIES = {name[:-1]: reason for name, reason in _REFUSED.items() if name.endswith("*")}


def refusal(flag: str) -> str | None:
    """Why a flag cannot be honoured and what there is instead; None if it is not among these."""
    spellings = (flag, _with_hyphens(flag))  # those of EPFL's fork have underscores
    families = _FAMILIES.items()
    alone = (_REFUSED[name] for name in spellings if name in _REFUSED)
    family = (why for name in spellings for prefix, why in families if name.startswith(prefix))
    return next(alone, None) or next(family, None)


def _with_hyphens(flag: str) -> str:
    return flag.replace("_", "-")


def wrong_flags(typed: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """A sentence on each flag that does not exist here, or on several refused for one reason."""
    helps = {option: a.help for a in parser._actions for option in a.option_strings}
    listed = [option for option, text in helps.items() if text != argparse.SUPPRESS]
    absent = [word for word in typed if re.fullmatch(r"--?[a-zA-Z]\S*", word) and word not in helps]
    whys = {name: refusal(name) for name in absent}
    said = []
    for why in dict.fromkeys(why for why in whys.values() if why):
        names = ", ".join(name for name in absent if whys[name] == why)
        said.append(f"{names} cannot be honoured: {why}.")
    unknown = [name for name in absent if whys[name] is None]
    if misspelled := [name for name in unknown if _with_hyphens(name) in helps]:
        names = ", ".join(misspelled)
        said.append(f"Unknown: {names}. Flags have hyphens between their words here.")
    for name in (name for name in unknown if name not in misspelled):
        said.append(f"Unknown flag {name}.{nearest(name, listed, helps)}")
    return said


def nearest(word: str, known: Iterable[str], unlisted: Iterable[str] = ()) -> str:
    """A sentence with the most similar of `known`; of `unlisted` only for a slip of a letter.

    Words that go on from this one are more similar than any other.
    """
    known = list(known)
    near = sorted((other for other in known if other.startswith(word)), key=len)
    near = near or difflib.get_close_matches(word, list(unlisted), n=1, cutoff=0.8)
    near = near or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" The nearest is {near[0]}." if near else " See --help."
