"""Flags of Megatron's scripts that are no choice here.

Scripts that have them are accepted as they are. One note at the start of a run lists them with the
reason, so that nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NO_FUSED_GELU = "--no-bias-gelu-fusion"
OVERRIDING = """
    --override-opt_param-scheduler --override-lr-scheduler --override-opt-param-scheduler
"""
_FAULTS = "a run is started again by who launched it: see --nan-limit for the rest"

# The answer, and the flags it is for. "=1" behind a flag: a value follows it; "=?": one or none;
# "=+": some.
_ANSWERS: Mapping[str, str] = {
    "data parallelism is FSDP2": """
        --DDP-impl=1 --no-contiguous-buffers-in-local-ddp --overlap-grad-reduce
        --overlap-param-gather --use-contiguous-parameters-in-local-ddp --use-megatron-fsdp
        --use-custom-fsdp --ddp-bucket-size=1 --ddp-num-buckets=1
        --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective
        --no-gradient-reduce-div-fusion --fsdp-double-buffer --suggested-communication-unit-size=1
        --enable-full-sharding-in-hsdp --megatron-fsdp-version=1
        --create-all-gather-group
    """,
    "the ranks always share the optimizer: see --zero-stage": """
        --use-distributed-optimizer --use-layer-wise-distributed-optimizer
        --use-layer-wise-param-layout --no-use-layer-wise-param-layout
    """,
    "gradients are always summed in fp32": """
        --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16 --main-grads-dtype=1
        --ddp-reduce-scatter-with-fp32-accumulation --fp32-allreduce
        --megatron-fsdp-main-grads-dtype=1 --megatron-fsdp-grad-comm-dtype=1
    """,
    "fusion is the kernels' own matter": """
        --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion
        --no-persist-layer-norm --no-rope-fusion --no-bias-swiglu-fusion --moe-permute-fusion
        --moe-router-fusion --use-te-activation-func --use-fused-weighted-squared-relu
        --use-transformer-engine-op-fuser --disable-jit-fuser --moe-router-aux-loss-fusion
        --no-moe-router-aux-loss-fusion --bias-gelu-fusion --bias-dropout-fusion
        --scaled-masked-softmax-fusion --no-scaled-masked-softmax-fusion
        --scaled-upper-triang-masked-softmax-fusion=? --mla-down-proj-fusion
        --dense-grouped-gemm --use-grouped-gemm-for-dense-mlp --use-grouped-gemm-for-shared-expert
        --fused-residual-rmsnorm --disable-mamba-mem-eff-path
    """,
    "there is no such switch to turn off": """
        --no-async-tensor-model-parallel-allreduce --no-scatter-gather-tensors-in-pipeline
        --scatter-gather-tensors-in-pipeline
    """,
    "--sequence-parallel shares them": """
        --distribute-saved-activations --distribute-checkpointed-activations
    """,
    "no example is left out at the end of a pass": "--keep-last",
    "T5's layers are shared out evenly, the decoder's behind the encoder's": """
        --pipeline-model-parallel-split-rank=1
    """,
    "stages are cut between layers": "--standalone-embedding-stage",
    "the device decides: NCCL on GPUs, gloo on CPUs": """
        --distributed-backend=1 --enable-gloo-process-groups --disable-gloo-process-groups
        --pipeline-model-parallel-comm-backend=1
    """,
    "torchrun says it in LOCAL_RANK": "--local_rank=1 --local-rank=1",
    "attention always takes the fastest kernel of torch": """
        --use-flash-attn --attention-backend=1 --export-force-local-attention
        --fallback-to-eager-attn
    """,
    "fusion is the kernels' own matter; the exact GELU is --activation gelu": NO_FUSED_GELU,
    "attention scores are never scaled by the layer": "--no-query-key-layer-scaling",
    "attention's softmax is always computed in fp32": "--attention-softmax-in-fp32",
    "the loss is always computed in fp32": "--fp16-lm-cross-entropy",
    "the default activation is that GELU": "--openai-gelu",
    "there is no ONNX export": "--onnx-safe=?",
    "the load-balancing loss is always computed in fp32": "--moe-lbl-in-fp32=?",
    "the experts are this library's, dropless": "--moe-use-megatron-switch=?",
    "the experts are always computed together": """
        --moe-grouped-gemm --moe-use-legacy-grouped-gemm --moe-single-grouped-weight
        --moe-single-grouped-bias
    """,
    "in which order rows of weights lie changes no result": """
        --moe-mlp-glu-interleave-size=1 --moe-shared-expert-glu-interleave-size=1
    """,
    "there is one implementation": "--use-mcore-models --transformer-impl=1 --use-legacy-models",
    "it belongs to Megatron's text server, not to training": """
        --inference-batch-times-seqlen-threshold=1 --max-tokens-to-oom=1 --cache-mla-latents
    """,
    "all ranks begin from one initialization": "--data-parallel-random-init",
    "initialization does not depend on the number of ranks": "--use-cpu-initialization",
    "rearranged samples need no padding": "--fim-pad-token=1",
    "documents end with the tokenizer's own end of document, or with --eod-token": """
        --fim-eod-token=1
    """,
    "there is no such switch": "--lazy-mpu-init=? --test-mode --enable-experimental --disable-msc",
    "weights that are loaded are not drawn before": "--no-initialization",
    "torch's allocator needs no help": """
        --empty-unused-memory-level=1 --no-clone-scatter-output-in-embedding
    """,
    "SIGTERM always saves and exits": """
        --exit-signal-handler --exit-signal-handler-for-dataloader
        --exit-signal-handler-for-training
    """,
    "it is a cluster of NVIDIA's": "--adlr-autoresume --adlr-autoresume-interval=1",
    "--load always takes over what the run was started with": """
        --use-checkpoint-args --use-mp-args-from-checkpoint-args
    """,
    "a flag that is typed always wins over --load": OVERRIDING,
    "random numbers follow from the seed and the step, there is no state to keep": """
        --no-save-rng --no-load-rng
    """,
    "data files are always memory-mapped": """
        --data-impl=1 --mmap-warmup --no-mmap-bin-files --dataloader-defer-npy-index-mmap
    """,
    "timers wait for the device, never for other ranks": "--no-barrier-with-level-1-timing",
    "scalars are written every --log-interval": "--tensorboard-log-interval=1",
    "it thins out images, and there are none": "--sample-rate=1",
    "it belongs to Megatron's retrieval index, not to training": """
        --ict-load=1 --retriever-seq-length=1 --evidence-data-path=1 --block-data-path=1
        --embedding-path=1 --indexer-batch-size=1 --indexer-log-interval=1
    """,
    "scores are computed in fp32, where it changes nothing": "--apply-query-key-layer-scaling",
    "the data loader never makes one": """
        --no-create-attention-mask-in-dataloader --create-attention-mask-in-dataloader
    """,
    "indices are built by rank 0, and kept": """
        --num-dataset-builder-threads=1 --dataloader-fast-cache-load --object-storage-cache-path=1
        --per-dataset-sequences-path=1
    """,
    "--dataloader-type cyclic always shuffles all samples together, not each rank its part": """
        --no-data-sharding
    """,
    "the loss is always fused with the head": """
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl=1
    """,
    "a step's loss is always the mean over its tokens": "--calculate-per-token-loss",
    "experts compute no empty slots": "--moe-pad-expert-input-to-capacity",
    "loads are logged for every layer": "--moe-per-layer-logging",
    "how and when ranks communicate is the library's own matter": """
        --moe-shared-expert-overlap --delay-wgrad-compute --tp-comm-overlap
        --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush
        --no-delay-grad-reduce --delay-param-gather
        --overlap-param-gather-with-optimizer-step --no-align-grad-reduce --no-align-param-gather
        --defer-embedding-wgrad-compute --wgrad-deferral-limit=1
        --microbatch-group-size-per-virtual-pipeline-stage=1 --high-priority-stream-groups=+
        --nccl-ub --use-sharp --tp-comm-overlap-cfg=1 --tp-comm-overlap-rs-dgrad
        --tp-comm-bootstrap-backend=1 --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs
        --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad --no-tp-comm-split-ag
        --no-tp-comm-split-rs --use-nccl-ub --disable-symmetric-registration
        --fsdp-manual-registration --sharp-enabled-group=1 --use-ring-exchange-p2p
        --nccl-communicator-config-path=1 --use-tp-pp-dp-mapping
        --ep-overlap-early-attn-memory-release --train-sync-interval=1
        --high-priority-a2a-comm-stream --overlap-dispatch-backward-with-experts-wgrad
        --align-param-gather
    """,
    "see --moe-dispatcher": """
        --moe-enable-deepep --moe-flex-dispatcher-backend=1 --moe-deepep-num-sms=1
        --moe-hybridep-num-sms=1 --moe-flex-dispatcher-num-sms=1 --moe-enable-mori
        --moe-mori-max-tokens-per-rank=1
        --moe-permute-fusion-into-hybridep --moe-hybridep-pad-variable-tokens
        --moe-hybridep-num-blocks-permute=1 --moe-hybridep-num-blocks-unpermute=1
        --moe-hybridep-num-sms-preprocessing=1 --moe-ncclep-static-shape --moe-ncclep-use-symm-mem
    """,
    "see --moe-a2a-overlap-degree": "--overlap-moe-expert-parallel-comm",
    "see --optimizer-state-dtype": "--use-precision-aware-optimizer",
    "how a model is built is the library's own matter": "--init-model-with-meta-device",
    "see --cuda-graph": """
        --enable-cuda-graph --external-cuda-graph --cuda-graph-scope=+ --cuda-graph-impl=1
        --cuda-graph-warmup-steps=1 --cuda-graph-modules=+ --optimizer-cuda-graph
        --cuda-graph-dynamic-microbatches
    """,
    "random numbers follow from the seed and the step": "--te-rng-tracker --inference-rng-tracker",
    "after the first steps collections of garbage have little to look at": """
        --manual-gc --manual-gc-interval=1 --no-manual-gc-eval
    """,
    "see --nan-limit": """
        --check-for-nan-in-loss-and-grad --no-check-for-nan-in-loss-and-grad --check-for-spiky-loss
        --check-for-large-grads --no-check-for-nan-in-loss
    """,
    _FAULTS: """
        --rerun-mode=1 --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters=1
        --inprocess-restart --inprocess-max-iterations=1 --inprocess-monitor-thread-interval=1
        --inprocess-monitor-process-interval=1 --inprocess-progress-watchdog-interval=1
        --inprocess-heartbeat-interval=1 --inprocess-soft-timeout=1 --inprocess-hard-timeout=1
        --inprocess-heartbeat-timeout=1 --inprocess-barrier-timeout=1
        --inprocess-completion-timeout=1 --inprocess-last-call-wait=1
        --inprocess-termination-grace-time=1 --inprocess-granularity=1
        --inprocess-active-world-size=1 --inprocess-empty-cuda-cache --error-injection-rate=1
        --error-injection-type=1 --result-rejected-tracker-filename=1
        --check-weight-hash-across-dp-replicas-interval=1 --gpu-sniff-test-interval=1
        --flight-recorder-dump-path=1 --flight-recorder-trace-buffer-size=1
        --no-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
        --no-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec
    """,
    "the profile is rank 0's": "--profile-ranks=+",
    "the profile is kept in the run's folder": "--profile-dir=1",
    "--profile is torch's profiler": """
        --use-pytorch-profiler --pytorch-profiler-collect-shapes
        --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra --record-shapes
        --nvtx-ranges --record-memory-history --memory-snapshot-path=1
    """,
    "checkpoints are torch's distributed format, each rank writes its own part": """
        --ckpt-format=1 --dist-ckpt-format=1 --use-dist-ckpt --auto-detect-ckpt-format
        --dist-ckpt-optim-fully-reshardable --ckpt-fully-parallel-save --ckpt-fully-parallel-load
        --no-ckpt-fully-parallel-save --ckpt-assume-constant-structure
        --ckpt-fully-parallel-load-exchange-algo=1 --ckpt-fully-parallel-load-process-group=1
        --ckpt-fully-parallel-save-process-group=1 --no-ckpt-load-validate-sharding-integrity
        --no-strict-fsdp-dtensor-load --dist-ckpt-save-pre-mcore-014
        --distrib-optim-fully-reshardable-mem-efficient
        --ckpt-fully-parallel-save-replicate-local --ckpt-fully-parallel-load-replicate-local
    """,
    "every tensor of a checkpoint has to fit, or it is an error": "--dist-ckpt-strictness=1",
    "see --async-save": """
        --use-persistent-ckpt-worker --async-strategy=1 --async-ckpt-cpu-priority=1
        --async-ckpt-io-priority=1 --async-ckpt-use-cpu-shm
    """,
    "a tokenizer that is named is taken": "--no-use-tokenizer-model-from-checkpoint-args",
    "what a run did is in its folder, log.jsonl": "--log-progress --config-logger-dir=1",
    "there is one level": "--logging-level=1",
    "it is a service of NVIDIA's": """
        --enable-one-logger --no-one-logger --one-logger-project=1 --one-logger-run-name=1
        --app-tag-run-name=1 --app-tag-run-version=1 --one-logger-async
        --run-workload-inspector-server
    """,
    "there is one kind of tokenizer": """
        --legacy-tokenizer --tokenizer-metadata=1 --tokenizer-hf-no-use-fast
        --tokenizer-hf-use-fast --tokenizer-sentencepiece-legacy
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
    """,
    "mb-data preprocess begins documents, see its --prepend-bos": """
        --tokenizer-hf-no-include-special-tokens --tokenizer-hf-include-special-tokens
    """,
    "samples of text are never padded": "--max-padding-length=1 --allow-ambiguous-pad-tokens",
    "see --timing-log-option for the slowest rank": """
        --log-straggler --disable-straggler-on-startup --straggler-ctrlr-port=1
        --straggler-minmax-count=1
    """,
    "checkpoints are written every --save-interval": """
        --non-persistent-save-interval=1 --non-persistent-ckpt-type=1
        --non-persistent-global-ckpt-dir=1 --non-persistent-local-ckpt-dir=1
        --non-persistent-local-ckpt-algo=1 --replication --replication-jump=1 --replication-factor=1
    """,
    "checkpoints hold the fp32 weights": "--load-main-params-from-ckpt",
    "checkpoints have checksums, which --load checks": "--verify-integrity",
    "see --log-memory-to-tensorboard": "--log-memory-interval=1 --log-device-memory-used",
    "it is not measured": """
        --log-energy --log-max-attention-logit --log-moe-overload-factor
        --log-per-layer-resource-usage --log-per-layer-resource-usage-interval=1
    """,
    "what a step computes is not written down": """
        --save-params-interval=1 --save-activations-interval=1 --save-wgrads-interval=1
        --save-dgrads-interval=1 --save-tokens-per-expert-interval=1 --moe-routing-trace-path=1
        --moe-routing-trace-max-training-iters=1 --moe-routing-trace-capture-logits
        --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights
        --dump-param-to-param-group-map=1
    """,
    "a global batch that the ranks cannot share is an error": "--decrease-batch-size-if-needed",
    "--distributed-timeout-minutes holds for the whole run": """
        --distributed-timeout-seconds-after-init=1
    """,
    "a kernel of the GPU updates moments in the host's memory, and nothing is copied": """
        --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads
        --no-pin-cpu-params
    """,
    "weights stay on the GPU": "--no-cpu-offloading-weights",
    "activations of one layer travel while the next computes": """
        --cpu-offloading-double-buffering --fine-grained-offloading-max-inflight-offloads=1
    """,
    "context-parallel ranks exchange heads by all-to-all, and the results are those of any way": """
        --cp-comm-type=+ --hierarchical-context-parallel-sizes=+ --cp-partition-mode=1
        --linear-cp-mode=1
    """,
    "how products are summed is the kernels' own matter": "--disable-bf16-reduced-precision-matmul",
    "stages get equally many layers, the first ones more where they do not divide": """
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
        --decoder-first-pipeline-num-layers=1 --decoder-last-pipeline-num-layers=1
        --pipeline-model-parallel-layout=1 --pp-partition-method=1
    """,
    "a head's first half turns with its second, the same model but for the order of rows": """
        --rotary-interleaved
    """,
    "no code that comes with a model is run": "--trust-remote-code",
    "in FP8 each row and output channel has a scale of its own, found anew at each product": """
        --fp8-recipe=1 --fp8-margin=1 --fp8-interval=1 --fp8-amax-history-len=1
        --fp8-amax-compute-algo=1 --tp-only-amax-red
    """,
    "gradients of weights are never products in FP8": "--no-fp8-wgrad",
    "weights are rounded to FP8 for each product, and nobody sends them so": """
        --fp8-param-gather --keep-fp8-transpose-cache
        --keep-fp8-transpose-cache-when-using-custom-fsdp --reuse-grad-buf-for-mxfp8-param-ag
    """,
    "experts take any number of rows": """
        --moe-router-padding-for-fp8 --moe-router-padding-for-quantization --moe-use-grouped-tensor
    """,
    "see --moe-row-policy": """
        --moe-paged-stash --moe-paged-stash-page-size=1 --moe-paged-stash-buffer-size-factor-cuda=1
        --moe-paged-stash-buffer-size-factor-cpu=1
    """,
    "norms have no weight decay, so that a weight learns what one more than it would": """
        --apply-layernorm-1p
    """,
    "Muon iterates in bf16": "--muon-fp32-matmul-prec=1",
}


def _spellings(name: str) -> Sequence[str]:
    """What Megatron Core turns off with --no-NAME, it mostly turns off with --disable-NAME too."""
    both = name.startswith("--no-") and name != NO_FUSED_GELU  # which has but the one
    return (name, "--disable-" + name.removeprefix("--no-")) if both else (name,)


# Flag -> whether a value follows ("?": one or none, "+": some), and the answer.
SETTLED: Mapping[str, tuple[bool | str, str]] = {
    name: ({"": False, "1": True}.get(count, count), answer)
    for answer, flags in _ANSWERS.items()
    for word, _, count in (word.partition("=") for word in flags.split())
    for name in _spellings(word)
}


def settled_note(flags: Sequence[str]) -> str:
    """What is said about the settled flags of a command line."""
    answers: dict[str, list[str]] = {}
    for name in flags:
        answers.setdefault(SETTLED[name][1], []).append(name)
    parts = [f"{', '.join(names)} ({answer})" for answer, names in answers.items()]
    return "accepted without effect, the matter being settled here: " + "; ".join(parts)
