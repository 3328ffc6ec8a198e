"""Flags of Megatron-LM that are no choice here (settled), or have another name (translated).

Scripts that have them are accepted as they are. One note at the start of a run lists the settled
flags with the reason, so that nothing is ignored in silence. Megatron Core's are in `core_flags`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mb_train import core_flags

_FUSED = "fusion is the kernels' own matter"
_RESTORED = "random numbers follow from the seed and the step, there is no state to keep"
_ONE = "there is one implementation"
_SERVER = "it belongs to Megatron's text server, not to training"
_INDEX = "it belongs to Megatron's retrieval index, not to training"

# Flag -> how many values follow ("?": one or none), and the reason.
SETTLED: Mapping[str, tuple[int | str, str]] = {
    "--DDP-impl": (1, "data parallelism is FSDP2"),
    "--no-contiguous-buffers-in-local-ddp": (0, "data parallelism is FSDP2"),
    "--overlap-grad-reduce": (0, "data parallelism is FSDP2"),
    "--overlap-param-gather": (0, "data parallelism is FSDP2"),
    "--use-distributed-optimizer": (0, "the ranks always share the optimizer: see --zero-stage"),
    "--accumulate-allreduce-grads-in-fp32": (0, "gradients are always summed in fp32"),
    "--no-gradient-accumulation-fusion": (0, _FUSED),
    "--no-async-tensor-model-parallel-allreduce": (0, "there is no such switch to turn off"),
    "--no-scatter-gather-tensors-in-pipeline": (0, "there is no such switch to turn off"),
    "--distribute-saved-activations": (0, "--sequence-parallel shares them"),
    "--distribute-checkpointed-activations": (0, "--sequence-parallel shares them"),
    "--pipeline-model-parallel-split-rank": (
        1,
        "T5's layers are shared out evenly, the decoder's behind the encoder's",
    ),
    "--standalone-embedding-stage": (0, "stages are cut between layers"),
    "--distributed-backend": (1, "the device decides: NCCL on GPUs, gloo on CPUs"),
    "--local_rank": (1, "torchrun says it in LOCAL_RANK"),
    "--local-rank": (1, "torchrun says it in LOCAL_RANK"),
    "--use-flash-attn": (0, "attention always takes the fastest kernel of torch"),
    "--no-masked-softmax-fusion": (0, _FUSED),
    "--no-bias-gelu-fusion": (0, _FUSED + "; the exact GELU is --activation gelu"),
    "--no-bias-dropout-fusion": (0, _FUSED),
    "--no-persist-layer-norm": (0, _FUSED),
    "--no-query-key-layer-scaling": (0, "attention scores are never scaled by the layer"),
    "--attention-softmax-in-fp32": (0, "attention's softmax is always computed in fp32"),
    "--fp16-lm-cross-entropy": (0, "the loss is always computed in fp32"),
    "--openai-gelu": (0, "the default activation is that GELU"),
    "--onnx-safe": ("?", "there is no ONNX export"),
    "--moe-lbl-in-fp32": ("?", "the load-balancing loss is always computed in fp32"),
    "--moe-use-megatron-switch": ("?", "the experts are this library's, dropless"),
    "--moe-grouped-gemm": (0, "the experts are always computed together"),
    "--use-mcore-models": (0, _ONE),
    "--transformer-impl": (1, _ONE),
    "--inference-batch-times-seqlen-threshold": (1, _SERVER),
    "--max-tokens-to-oom": (1, _SERVER),
    "--init-method-xavier-uniform": (
        0,
        "weights are drawn normal, by --init-method-std, as in the fork, whose ViT alone heeds it; "
        "Megatron Core would draw them uniform",
    ),
    "--data-parallel-random-init": (0, "all ranks begin from one initialization"),
    "--use-cpu-initialization": (0, "initialization does not depend on the number of ranks"),
    "--fim-pad-token": (1, "rearranged samples are never short"),
    "--fim-eod-token": (1, "documents end with the tokenizer's own end of document"),
    "--lazy-mpu-init": (1, "there is no such switch"),
    "--no-initialization": (0, "weights that are loaded are not drawn before"),
    "--empty-unused-memory-level": (1, "torch's allocator needs no help"),
    "--exit-signal-handler": (0, "SIGTERM always saves and exits"),
    "--adlr-autoresume": (0, "it is a cluster of NVIDIA's"),
    "--adlr-autoresume-interval": (1, "it is a cluster of NVIDIA's"),
    "--use-checkpoint-args": (0, "--load always takes over what the run was started with"),
    "--override-opt_param-scheduler": (0, "a flag that is typed always wins over --load"),
    "--override-lr-scheduler": (0, "a flag that is typed always wins over --load"),
    "--no-save-rng": (0, _RESTORED),
    "--no-load-rng": (0, _RESTORED),
    "--data-impl": (1, "data files are always memory-mapped"),
    "--mmap-warmup": (0, "data files are always memory-mapped"),
    "--no-barrier-with-level-1-timing": (0, "timers wait for the device, never for other ranks"),
    "--tensorboard-log-interval": (1, "scalars are written every --log-interval"),
    "--sample-rate": (1, "it thins out images, and there are none"),
    "--ict-load": (1, _INDEX),
    "--retriever-seq-length": (1, _INDEX),
    "--evidence-data-path": (1, _INDEX),
    "--block-data-path": (1, _INDEX),
    "--embedding-path": (1, _INDEX),
    "--indexer-batch-size": (1, _INDEX),
    "--indexer-log-interval": (1, _INDEX),
    **core_flags.SETTLED,
}


# Flag -> whether a value follows ("+": some), and the fields that it sets.
TRANSLATED: Mapping[str, tuple[bool | str, Callable[[Any], Mapping[str, Any]]]] = {
    "--recompute-activations": (False, lambda _: {"recompute_granularity": "selective"}),
    "--checkpoint-activations": (False, lambda _: {"recompute_granularity": "full"}),
    "--activations-checkpoint-method": (
        True,
        lambda method: {"recompute_granularity": "full", "recompute_method": method},
    ),
    "--use-rotary-position-embeddings": (False, lambda _: {"position_embedding_type": "rope"}),
    "--no-position-embedding": (False, lambda _: {}),  # see `core_flags.defaults_beside`
    **core_flags.TRANSLATED,
}


def note(flags: list[str]) -> str:
    """What is said about the settled flags of a command line."""
    answers: dict[str, list[str]] = {}
    for name in flags:
        answers.setdefault(SETTLED[name][1], []).append(name)
    parts = [f"{', '.join(names)} ({answer})" for answer, names in answers.items()]
    return "accepted without effect, the matter being settled here: " + "; ".join(parts)
