"""Argument lists of launch scripts that people have: what stands behind `pretrain_*.py` in them.

MegaBlocks' exp/ (17 scripts; and two that were there for a time), and the examples/pretrain_*.sh of
Stanford's Megatron-LM, which AMD's port has too. Flags and values are the scripts' own, where a
script takes an argument its default; paths are as in the scripts, placeholders filled in.
"""

from __future__ import annotations

_PILE = [word for n in range(1, 30) for word in ("1.0", f"/mount/pile_gpt2/{n:02d}_text_document")]
_DENSE = "--DDP-impl local --no-async-tensor-model-parallel-allreduce --use-flash-attn"
_EXPERTS = "--DDP-impl local --moe-expert-model-parallelism"
_EXPERTS += " --no-async-tensor-model-parallel-allreduce"


def _exp(
    layers: int, hidden: int, heads: int, batch: int, rates: str, more: str, *, steps: int = 100_000
) -> list[str]:
    lr, min_lr = rates.split()
    std = "" if hidden == 2048 and "--glu" not in more else "--init-method-std 0.01"
    return f"""{more} --num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads}
        --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size {batch}
        --global-batch-size 512 --train-iters {steps} --lr-decay-iters {steps} --lr {lr}
        --min-lr {min_lr} --lr-decay-style cosine --lr-warmup-fraction 0.01 --clip-grad 1.0 {std}
        --data-path {" ".join(_PILE)} --vocab-file /mount/gpt2-vocab.json
        --merge-file /mount/gpt2-merges.txt --make-vocab-size-divisible-by 1024 --split 969,30,1
        --save-interval 2000 --save ./out --eval-iters 100 --log-interval 100
        --eval-interval 1000""".split()


def _experts(top: str) -> str:
    return f"--moe-num-experts=64 {top} --moe-loss-weight=0.1 --moe-top-k=1"


_ONE_GPU, _EIGHT = "--fp16 --DDP-impl local", f"--bf16 {_DENSE}"
_DMOE = f"{_experts('')} --bf16 {_EXPERTS} --use-flash-attn"
_SLOW, _FAST, _BIG = "0.00015 0.00001", "0.0006 0.00006", "0.0004 0.00004"

MEGABLOCKS: dict[str, list[str]] = {
    "gpt2/gpt2_46m_1gpu.sh": _exp(6, 512, 8, 64, _SLOW, _ONE_GPU),
    "gpt2/gpt2_125m_1gpu.sh": _exp(12, 768, 12, 32, _SLOW, _ONE_GPU),
    "gpt2/gpt2_356m_1gpu.sh": _exp(24, 1024, 16, 16, _SLOW, _ONE_GPU),
    "gpt2/gpt2_760m_1gpu.sh": _exp(24, 1536, 16, 16, _SLOW, _ONE_GPU),
    "gpt2/gpt2_1315m_1gpu.sh": _exp(24, 2048, 16, 8, _SLOW, _ONE_GPU),
    "gpt2/gpt2_46m_8gpu.sh": _exp(6, 512, 8, 64, _FAST, _EIGHT),
    "gpt2/gpt2_125m_8gpu.sh": _exp(12, 768, 12, 64, _FAST, _EIGHT),
    "gpt2/gpt2_356m_8gpu.sh": _exp(24, 1024, 16, 32, _FAST, _EIGHT),
    "gpt2/gpt2_760m_8gpu.sh": _exp(24, 1536, 16, 32, _BIG, _EIGHT),
    "gpt2/gpt2_1315m_8gpu.sh": _exp(24, 2048, 16, 16, _BIG, _EIGHT),
    "dmoe/dmoe_46m_8gpu.sh": _exp(6, 512, 8, 64, _FAST, _DMOE, steps=20_000),
    "dmoe/dmoe_125m_8gpu.sh": _exp(12, 768, 12, 32, _FAST, _DMOE, steps=20_000),
    "dmoe/dmoe_356m_8gpu.sh": _exp(24, 1024, 16, 16, _FAST, _DMOE, steps=20_000),
    "dmoe/dmoe_760m_8gpu.sh": _exp(
        24, 1536, 16, 8, _BIG,
        f"{_experts('')} --optimizer adafactor --fp16 {_EXPERTS} --use-flash-attn", steps=20_000,
    ),
    "moe/moe_46m_8gpu.sh": _exp(
        6, 512, 8, 64, _SLOW, f"{_experts('--moe-capacity-factor=16384')} --fp16 {_EXPERTS}",
        steps=20_000,
    ),
    "moe/moe_125m_8gpu.sh": _exp(
        12, 768, 12, 32, _SLOW, f"{_experts('--moe-capacity-factor=1')} --fp16 {_EXPERTS}",
        steps=20_000,
    ),
    "moe/moe_356m_8gpu.sh": _exp(
        24, 1024, 16, 8, _SLOW, f"{_experts('--moe-capacity-factor=16384')} --fp16 {_EXPERTS}",
        steps=20_000,
    ),
}  # fmt: skip

# No longer, or never, among the seventeen.
EARLIER: dict[str, list[str]] = {
    "dmoe/dmoe_760m_16gpu.sh": _exp(
        24, 1536, 16, 8, _SLOW,
        f"{_experts('')} --fp16 {_EXPERTS} --pipeline-model-parallel-size 2", steps=20_000,
    ),
    "mixtral/dmoe_1315m_8gpu.sh": _exp(
        24, 2048, 16, 4, _BIG, "--moe-num-experts=8 --moe-loss-weight=0.1 --moe-top-k=2 --glu "
        f"--optimizer adam --bf16 {_EXPERTS} --use-flash-attn", steps=54_000,
    ),
    "moe/moe_125m_8gpu.sh as it was first": _exp(
        12, 768, 12, 32, _SLOW, f"{_experts('--moe-capacity-factor=1')} --fp16 --DDP-impl local "
        "--expert-model-parallelism",
    ),
}  # fmt: skip

_LOGS = "--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16"
_KEPT = "--save checkpoints --load checkpoints"
_BERT = f"""--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
    --max-position-embeddings 512 {_KEPT} --data-path wiki_text_sentence
    --vocab-file bert-vocab.txt --data-impl mmap --split 949,50,1 --lr 0.0001
    --lr-decay-style linear --min-lr 1.0e-5 --lr-decay-iters 990000 --weight-decay 1e-2
    --clip-grad 1.0 --lr-warmup-fraction .01 {_LOGS}"""
_GPT = f"""--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000 {_KEPT}
    --data-path wiki_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
    --data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 0.00015
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0
    --lr-warmup-fraction .01 --activations-checkpoint-method uniform {_LOGS}"""
_T5 = f"""--num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64
    --ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128
    --max-position-embeddings 512 --micro-batch-size 16 --lr 0.0001 --train-iters 1000000
    --lr-decay-iters 1000000 --lr-decay-style linear --min-lr 0.00001 --weight-decay 1e-2
    --lr-warmup-fraction .01 --clip-grad 1.0 --vocab-extra-ids 100
    --data-path wiki_text_sentence --vocab-file bert-vocab.txt --data-impl mmap
    --split 949,50,1 {_KEPT} {_LOGS}"""

# By script: the model whose pretrain_*.py it starts, and the arguments.
EXAMPLES: dict[str, tuple[str, list[str]]] = {
    name: (model, text.split())
    for name, model, text in (
        (
            "pretrain_bert.sh", "bert",
            f"{_BERT} --micro-batch-size 4 --global-batch-size 8 --train-iters 2000000",
        ),
        (
            "pretrain_bert_distributed.sh", "bert",
            f"{_BERT} --micro-batch-size 4 --global-batch-size 32 --train-iters 1000000 "
            "--distributed-backend nccl",
        ),
        (
            "pretrain_bert_distributed_with_mp.sh", "bert",
            f"{_BERT} --micro-batch-size 2 --global-batch-size 16 --train-iters 1000000 "
            "--distributed-backend nccl --tensor-model-parallel-size 2 "
            "--pipeline-model-parallel-size 2",
        ),
        ("pretrain_gpt.sh", "gpt", f"{_GPT} --micro-batch-size 4 --global-batch-size 8"),
        (
            "pretrain_gpt_distributed.sh", "gpt",
            f"{_GPT} --micro-batch-size 8 --global-batch-size 64",
        ),
        (
            "pretrain_gpt_distributed_with_mp.sh", "gpt",
            f"{_GPT} --micro-batch-size 4 --global-batch-size 16 --tensor-model-parallel-size 2 "
            "--pipeline-model-parallel-size 2 --sequence-parallel",
        ),
        (
            "pretrain_gpt3_175B.sh", "gpt",
            """--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96
            --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
            --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536
            --rampup-batch-size 16 16 5859375 --train-samples 146484375
            --lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6
            --lr-decay-style cosine --log-interval 10 --eval-iters 40 --eval-interval 1000
            --data-path 0.2 a_text_document 0.3 b_text_document 0.5 c_text_document
            --vocab-file gpt-vocab.json --merge-file gpt-merges.txt --save-interval 1000
            --save checkpoints --load checkpoints --split 98,2,0 --clip-grad 1.0
            --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
            --tensorboard-dir boards --fp16 --activations-checkpoint-method uniform""",
        ),
        (
            "pretrain_ict.sh", "ict",
            """--num-layers 12 --hidden-size 768 --num-attention-heads 12
            --tensor-model-parallel-size 1 --micro-batch-size 32 --seq-length 256
            --max-position-embeddings 512 --train-iters 100000 --vocab-file bert-vocab.txt
            --tokenizer-type BertWordPieceLowerCase --DDP-impl torch --bert-load bert
            --log-interval 100 --eval-interval 1000 --eval-iters 10
            --retriever-report-topk-accuracies 1 5 10 20 100 --retriever-score-scaling
            --load checkpoints --save checkpoints --data-path wiki_text_sentence
            --titles-data-path titles --lr 0.0001 --lr-decay-style linear --weight-decay 1e-2
            --clip-grad 1.0 --lr-warmup-fraction 0.01 --save-interval 4000 --exit-interval 8000
            --query-in-block-prob 0.1 --fp16""",
        ),
        ("pretrain_t5.sh", "t5", f"{_T5} --global-batch-size 16"),
        ("pretrain_t5_distributed.sh", "t5", f"{_T5} --global-batch-size 128"),
        (
            "pretrain_t5_distributed_with_mp.sh", "t5",
            f"{_T5} --global-batch-size 128 --tensor-model-parallel-size 2",
        ),
    )
}  # fmt: skip


# Every flag of the fork outside vision, Transformer Engine and inference, and of MegaBlocks' group
# in it, with a value that it takes. By group, as there.
FORK_FLAGS = """
    --num-layers 2 | --encoder-num-layers 2 | --decoder-num-layers 2 | --hidden-size 8
    --ffn-hidden-size 8 | --num-attention-heads 2 | --kv-channels 4 | --max-position-embeddings 8
    --make-vocab-size-divisible-by 128 | --layernorm-epsilon 1e-5
    --apply-residual-connection-post-layernorm | --openai-gelu | --onnx-safe True
    --bert-no-binary-head | --num-experts 4 | --glu

    --moe-num-experts 4 | --moe-capacity-factor 1 | --moe-top-k 1 | --moe-loss-weight 0.1
    --moe-lbl-in-fp32 True | --moe-jitter-eps 0.1 | --moe-use-megatron-switch True
    --moe-expert-model-parallelism

    --log-params-norm | --log-num-zeros-in-grad | --timing-log-level 1 | --timing-log-option max
    --no-barrier-with-level-1-timing | --tensorboard-log-interval 1 | --tensorboard-queue-size 5
    --log-timers-to-tensorboard | --log-batch-size-to-tensorboard
    --no-log-learnig-rate-to-tensorboard | --no-log-loss-scale-to-tensorboard
    --log-validation-ppl-to-tensorboard | --log-memory-to-tensorboard
    --log-world-size-to-tensorboard

    --attention-dropout 0.1 | --hidden-dropout 0.1 | --weight-decay 0.01 | --start-weight-decay 0
    --end-weight-decay 1 | --weight-decay-incr-style cosine | --clip-grad 1 | --adam-beta1 0.9
    --adam-beta2 0.9 | --adam-eps 1e-8 | --sgd-momentum 0.9

    --micro-batch-size 1 | --global-batch-size 1 | --rampup-batch-size 16 8 300000
    --recompute-activations | --recompute-granularity selective | --distribute-saved-activations
    --recompute-method block | --recompute-num-layers 2 | --checkpoint-activations
    --train-iters 5 | --train-samples 5 | --log-interval 5 | --exit-interval 5
    --exit-duration-in-mins 5 | --exit-signal-handler | --tensorboard-dir boards
    --no-masked-softmax-fusion | --no-bias-gelu-fusion | --no-bias-dropout-fusion | --use-flash-attn
    --optimizer adafactor | --dataloader-type single | --no-data-sharding
    --no-async-tensor-model-parallel-allreduce | --no-persist-layer-norm | --sequence-parallel
    --no-gradient-accumulation-fusion

    --seed 1 | --data-parallel-random-init | --init-method-std 0.02

    --lr 0.1 | --lr-decay-style inverse-square-root | --lr-decay-iters 5 | --lr-decay-samples 5
    --lr-warmup-fraction 0.1 | --lr-warmup-iters 5 | --lr-warmup-samples 5 | --min-lr 0.1
    --override-opt_param-scheduler | --use-checkpoint-opt_param-scheduler

    --save a | --save-interval 5 | --no-save-optim | --no-save-rng | --load a | --no-load-optim
    --no-load-rng | --finetune | --no-initialization | --use-checkpoint-args

    --fp16 | --bf16 | --loss-scale 128 | --initial-loss-scale 4294967296 | --min-loss-scale 1
    --loss-scale-window 1000 | --hysteresis 2 | --fp32-residual-connection
    --no-query-key-layer-scaling | --attention-softmax-in-fp32
    --accumulate-allreduce-grads-in-fp32 | --fp16-lm-cross-entropy

    --tensor-model-parallel-size 2 | --pipeline-model-parallel-size 2
    --pipeline-model-parallel-split-rank 1 | --num-layers-per-virtual-pipeline-stage 1
    --distributed-backend nccl | --DDP-impl torch | --no-contiguous-buffers-in-local-ddp
    --no-scatter-gather-tensors-in-pipeline | --local_rank 0 | --lazy-mpu-init True
    --use-cpu-initialization | --empty-unused-memory-level 1 | --standalone-embedding-stage
    --use-distributed-optimizer

    --eval-iters 5 | --eval-interval 5 | --transformer-impl local | --max-tokens-to-oom 12000
    --inference-batch-times-seqlen-threshold 512

    --data-path a | --split 969,30,1 | --train-data-path a | --valid-data-path a
    --test-data-path a | --vocab-file a | --merge-file a | --vocab-extra-ids 100 | --seq-length 8
    --encoder-seq-length 8 | --decoder-seq-length 8 | --retriever-seq-length 8 | --sample-rate 1.0
    --mask-prob 0.15 | --short-seq-prob 0.1 | --mmap-warmup | --num-workers 2
    --tokenizer-type BertWordPieceCase | --tokenizer-model a | --data-impl infer
    --reset-position-ids | --reset-attention-mask | --eod-mask-loss

    --adlr-autoresume | --adlr-autoresume-interval 5

    --ict-head-size 8 | --biencoder-projection-dim 8 | --biencoder-shared-query-context-model
    --ict-load a | --bert-load a | --titles-data-path a | --query-in-block-prob 0.1
    --use-one-sent-docs | --evidence-data-path a | --retriever-report-topk-accuracies 1 5 20
    --retriever-score-scaling | --block-data-path a | --embedding-path a | --indexer-batch-size 5
    --indexer-log-interval 5
"""

# Megatron Core's examples, and scripts of AMD's port of it, of the Megatron-MoE-ModelZoo (whose
# arguments are YAML) and of Swiss AI, with the defaults of what they read from the environment. By
# script: the model whose pretrain_*.py it starts, and the arguments.
_CORE_MODEL = """--use-mcore-models --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --no-masked-softmax-fusion --attention-dropout 0.0
    --hidden-dropout 0.0 --group-query-attention"""
_MIXTRAL = f"""{_CORE_MODEL} --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01
    --untie-embeddings-and-output-weights --num-query-groups 8 --no-position-embedding
    --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
    --tokenizer-type Llama2Tokenizer --tokenizer-model /mount/tokenizer.model --lr 1e-4
    --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --clip-grad 1.0 --bf16
    --use-distributed-optimizer --sequence-parallel --log-interval 1"""
_TIMES = "--log-timers-to-tensorboard --log-batch-size-to-tensorboard"
_TIMES += " --log-validation-ppl-to-tensorboard --tensorboard-queue-size 1"
# Qwen2's script with MODEL_SIZE=72: the heads of its own default do not divide by 8 ranks.
_AMD = f"""{_CORE_MODEL} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1
    --context-parallel-size 1 --num-layers 80 --hidden-size 8192 --num-attention-heads 64
    --seq-length 2048 --max-position-embeddings 131072 --untie-embeddings-and-output-weights
    --no-position-embedding --init-method-std 0.02 --micro-batch-size 2 --global-batch-size 8
    --train-iters 10 --bf16 --lr 1e-4 --min-lr 1e-5 --lr-decay-iters 320000
    --lr-decay-style cosine --weight-decay 1.0e-1 --clip-grad 1.0 --optimizer adam
    --tokenizer-type HuggingFaceTokenizer --dataloader-type cyclic --save-interval 200000
    --tensorboard-dir boards --log-interval 1 --eval-interval 320000 --eval-iters 10
    --num-workers 8 --mock-data --log-interval 1 --save-interval 5000 --log-throughput
    --no-save-optim --eval-iters -1 --num-query-groups 8 --no-gradient-accumulation-fusion
    --distributed-backend nccl --distributed-timeout-minutes 120 --overlap-grad-reduce
    --use-distributed-optimizer --overlap-param-gather --sequence-parallel"""
_ZOO = """--distributed-timeout-minutes 60 --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8 --context-parallel-size 1 --expert-tensor-parallel-size 1
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-mcore-models
    --sequence-parallel --use-flash-attn --disable-bias-linear --micro-batch-size 1
    --global-batch-size 256 --train-samples 268554688 --exit-duration-in-mins 230
    --transformer-impl transformer_engine --data-cache-path cache --data-path text --split 99,1,0
    --no-mmap-bin-files --num-workers 6 --untie-embeddings-and-output-weights
    --position-embedding-type rope --rotary-percent 1.0 --normalization RMSNorm --swiglu
    --group-query-attention --seq-length 4096 --attention-dropout 0.0 --hidden-dropout 0.0
    --clip-grad 1.0 --weight-decay 0.1 --lr-decay-samples 255126953 --lr-warmup-samples 162761
    --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95
    --moe-router-load-balancing-type aux_loss --moe-grouped-gemm --moe-permute-fusion
    --eval-iters 32 --eval-interval 500 --finetune --auto-detect-ckpt-format --load checkpoints
    --save checkpoints --save-interval 500 --dist-ckpt-strictness log_all
    --log-timers-to-tensorboard --log-memory-to-tensorboard --log-num-zeros-in-grad
    --log-params-norm --log-validation-ppl-to-tensorboard --log-throughput --log-interval 1
    --tensorboard-dir boards --wandb-project zoo --wandb-exp-name baseline --bf16"""
_QWEN3 = """--qk-layernorm --kv-channels 128 --num-query-groups 4 --num-layers 48
    --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --num-experts 128
    --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-router-dtype fp32 --moe-aux-loss-coeff 1e-3
    --norm-epsilon 1e-06 --rotary-base 1000000 --rotary-seq-len-interpolation-factor 1
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-30B-A3B
    --make-vocab-size-divisible-by 1187"""

CORE: dict[str, tuple[str, list[str]]] = {
    name: (model, text.split())
    for name, model, text in (
        (
            "train_mixtral_8x7b_distributed.sh", "gpt",
            f"""{_MIXTRAL} --data-path /mount/text_document --split 99990,8,2 --micro-batch-size 1
            --global-batch-size 256 --train-iters 500000 --lr-decay-iters 320000
            --lr-warmup-iters 500 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
            --expert-model-parallel-size 8 --save-interval 10000 --eval-interval 1000
            --eval-iters 10 --no-load-optim --no-load-rng""",
        ),
        (
            "train_mixtral_moe.sh", "gpt",
            f"""{_MIXTRAL} --transformer-impl transformer_engine --moe-use-legacy-grouped-gemm
            --split 9900,80,20 --micro-batch-size 4 --global-batch-size 64 --train-iters 10
            --lr-decay-iters 8 --lr-warmup-iters 2 --seed 1234 --ckpt-format torch
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1
            --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
            --context-parallel-size 1 --save-interval 500 --eval-interval 1000000 --eval-iters -1
            --log-throughput --tensorboard-log-interval 1 --tensorboard-dir boards --use-flash-attn
            --no-gradient-accumulation-fusion --moe-layer-freq 1 --mock-data
            --data-cache-path cache""",
        ),
        (
            "train_qwen3.sh", "gpt",
            f"""{_CORE_MODEL} {_QWEN3} --log-throughput
            --no-async-tensor-model-parallel-allreduce --mock-data --data-cache-path cache
            --lr 1e-5 --min-lr 0.0 --lr-decay-style cosine
            --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
            --init-method-std 0.008 --dataloader-type cyclic --lr-decay-iters 50
            --lr-warmup-iters 2 --train-iters 50 --micro-batch-size 2 --global-batch-size 256
            --seq-length 4096 --max-position-embeddings 4096 --max-padding-length 4096
            --log-interval 1 --eval-interval 10000 --eval-iters -1 --save-interval 20000
            --ckpt-format torch --tensorboard-dir boards {_TIMES} --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 1 --context-parallel-size 1 --num-workers 8
            --transformer-impl transformer_engine --distributed-timeout-minutes 60 --eod-mask-loss
            --attention-backend fused --no-rope-fusion --rotary-percent 1.0 --no-bias-swiglu-fusion
            --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer
            --moe-router-load-balancing-type aux_loss --expert-model-parallel-size 8
            --expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
            --overlap-grad-reduce --ddp-bucket-size 629145600 --overlap-param-gather
            --train-mode pretrain""",
        ),
        (
            "train_llama3.sh", "gpt",
            f"""{_AMD} --ffn-hidden-size 28672 --no-async-tensor-model-parallel-allreduce
            --ckpt-format torch_dist --adam-beta1 0.9 --adam-beta2 0.95 --data-cache-path cache
            --tokenizer-model /mount/tokenizer_llama3 --use-flash-attn""",
        ),
        (
            "train_qwen2.sh", "gpt",
            f"""{_AMD} --ffn-hidden-size 29568 --use-te-activation-func --no-bias-swiglu-fusion
            --add-qkv-bias --rotary-percent 1.0 --rotary-base 1000000
            --rotary-seq-len-interpolation-factor 1 --tokenizer-model Qwen/Qwen2-72B
            --attention-backend fused""",
        ),
        (
            "Mixtral-8x22B.yaml", "gpt",
            f"""{_ZOO} --tensor-model-parallel-size 2 --tp-comm-overlap --num-layers 56
            --hidden-size 6144 --ffn-hidden-size 16384 --num-attention-heads 48
            --num-query-groups 8 --max-position-embeddings 4096 --make-vocab-size-divisible-by 128
            --tokenizer-type Llama2Tokenizer --tokenizer-model /mount/tokenizer.model --lr 1.2e-5
            --min-lr 1.2e-6 --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2
            --moe-router-fusion --no-ckpt-fully-parallel-save --init-method-std 0.008
            --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity""",
        ),
        (
            "Qwen3-30B-A3B.yaml", "gpt",
            f"""{_ZOO} {_QWEN3} --tensor-model-parallel-size 1
            --num-layers-per-virtual-pipeline-stage 6 --no-create-attention-mask-in-dataloader
            --manual-gc --manual-gc-interval 5 --max-position-embeddings 40960 --lr 1.2e-4
            --min-lr 1.2e-5 --moe-token-dispatcher-type flex --init-method-std 0.02
            --recompute-granularity selective --recompute-modules moe_act layernorm
            --cuda-graph-impl transformer_engine --cuda-graph-scope moe_router moe_preprocess""",
        ),
        (
            "DeepSeek-V3.yaml", "gpt",
            """--distributed-timeout-minutes 60 --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 16 --expert-model-parallel-size 64
            --context-parallel-size 1 --expert-tensor-parallel-size 1 --use-distributed-optimizer
            --overlap-grad-reduce --overlap-param-gather --use-mcore-models --sequence-parallel
            --use-flash-attn --disable-bias-linear --micro-batch-size 1 --global-batch-size 8192
            --train-samples 585937500 --exit-duration-in-mins 220 --no-save-optim
            --no-check-for-nan-in-loss-and-grad --cross-entropy-loss-fusion
            --cross-entropy-fusion-impl native --manual-gc --manual-gc-interval 10
            --transformer-impl transformer_engine --seq-length 4096 --data-cache-path cache
            --tokenizer-type HuggingFaceTokenizer --tokenizer-model unsloth/DeepSeek-V3
            --data-path text --split 99,1,0 --no-mmap-bin-files --num-workers 6
            --no-create-attention-mask-in-dataloader --num-layers 61 --hidden-size 7168
            --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
            --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000
            --make-vocab-size-divisible-by 3232 --normalization RMSNorm --norm-epsilon 1e-6
            --swiglu --untie-embeddings-and-output-weights --multi-latent-attention
            --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1
            --qk-layernorm --lr-decay-samples 584765624 --lr-warmup-samples 1536000
            --lr-warmup-init 3.9e-7 --lr 3.9e-6 --min-lr 3.9e-7 --lr-decay-style cosine
            --adam-beta1 0.9 --adam-beta2 0.95 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58)
            --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
            --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 8 --moe-grouped-gemm
            --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8
            --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid
            --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
            --moe-router-dtype fp32 --moe-permute-fusion --moe-router-fusion --q-lora-rank 1536
            --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
            --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --eval-iters 32
            --eval-interval 200 --no-load-optim --no-load-rng --auto-detect-ckpt-format
            --load checkpoints --save checkpoints --save-interval 500
            --dist-ckpt-strictness log_all --init-method-std 0.02 --log-timers-to-tensorboard
            --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard --log-throughput
            --log-interval 1 --logging-level 40 --tensorboard-dir boards --wandb-project zoo
            --wandb-exp-name baseline --bf16 --enable-experimental
            --moe-token-dispatcher-type flex --decoder-first-pipeline-num-layers 4
            --decoder-last-pipeline-num-layers 1""",
        ),
        (
            "submit-llama3-8b.sh", "gpt",
            """--transformer-impl transformer_engine --use-precision-aware-optimizer
            --main-grads-dtype bf16 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
            --num-attention-heads 32 --group-query-attention --num-query-groups 8
            --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000
            --use-rope-scaling --rope-scaling-factor 8 --make-vocab-size-divisible-by 128
            --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights
            --log-throughput --log-progress --tensorboard-dir boards --log-timers-to-tensorboard
            --no-log-loss-scale-to-tensorboard --log-memory-to-tensorboard
            --attention-dropout 0.0 --hidden-dropout 0.0 --weight-decay 0.1 --clip-grad 1.0
            --adam-beta1 0.9 --adam-beta2 0.95 --micro-batch-size 1 --global-batch-size 128
            --no-check-for-nan-in-loss-and-grad --train-iters 500 --log-interval 1
            --cross-entropy-loss-fusion --disable-bias-linear --optimizer adam
            --dataloader-type single --manual-gc --manual-gc-interval 500 --seed 28
            --init-method-std 0.008944 --lr 0.00022 --min-lr 0.000022 --lr-decay-style cosine
            --lr-warmup-iters 200 --save checkpoints --save-interval 250 --ckpt-format torch_dist
            --load checkpoints --async-save --bf16 --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce
            --overlap-param-gather --tokenizer-type HuggingFaceTokenizer
            --tokenizer-model swissai/tokenizer --split 100,0,0 --seq-length 8192 --num-workers 1
            --num-dataset-builder-threads 1 --data-path 1.0 text --data-cache-path cache""",
        ),
        (
            "gpt3_mcore_te_mfsdp_v2_cp2", "gpt",
            """--bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
            --context-parallel-size 2 --distributed-backend nccl --distributed-timeout-minutes 60
            --use-megatron-fsdp --megatron-fsdp-version 2
            --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor
            --no-gradient-accumulation-fusion --use-mcore-models
            --transformer-impl transformer_engine --attention-backend flash --micro-batch-size 4
            --global-batch-size 32 --train-iters 50 --seq-length 1024
            --max-position-embeddings 1024 --timing-log-level 0 --lr-decay-iters 320000
            --data-path text --data-cache-path cache --tokenizer-type NullTokenizer
            --vocab-size 50257 --split 949,50,1 --num-layers 12 --hidden-size 512
            --num-attention-heads 8 --attention-dropout 0.0 --hidden-dropout 0.0
            --attention-softmax-in-fp32 --clip-grad 1.0 --weight-decay 1e-2 --lr 0.00015
            --min-lr 1.0e-5 --lr-decay-style cosine --lr-warmup-fraction .01 --eval-interval 1000
            --eval-iters 10 --save-interval 10000 --log-interval 1 --log-params-norm
            --log-num-zeros-in-grad --log-memory-to-tensorboard --log-timers-to-tensorboard
            --log-validation-ppl-to-tensorboard --tensorboard-dir boards --exit-interval 50""",
        ),
        (
            "train_bert_340m_distributed.sh", "bert",
            """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
            --max-position-embeddings 512 --attention-backend auto --micro-batch-size 4
            --global-batch-size 32 --train-iters 1000000 --weight-decay 1e-2 --clip-grad 1.0 --fp16
            --lr 0.0001 --lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5
            --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0
            --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
            --data-path wiki_text_sentence --vocab-file bert-vocab.txt --split 949,50,1
            --log-interval 100 --save-interval 10000 --eval-interval 1000 --save checkpoints
            --load checkpoints --eval-iters 10 --tensorboard-dir boards""",
        ),
        (
            "train_t5_220m_distributed.sh", "t5",
            """--encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768
            --num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072
            --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512
            --micro-batch-size 64 --global-batch-size 512 --lr 0.0001 --train-iters 1000000
            --lr-decay-iters 1000000 --lr-decay-style linear --min-lr 0.00001 --weight-decay 1e-2
            --lr-warmup-fraction .01 --clip-grad 1.0 --bf16 --vocab-extra-ids 100
            --init-method-std 0.015 --transformer-impl transformer_engine
            --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
            --attention-backend auto --data-path wiki_text_sentence --vocab-file bert-vocab.txt
            --tokenizer-type BertWordPieceCase --split 99982,9,9 --log-interval 100
            --tensorboard-dir boards --save-interval 500 --eval-interval 1000 --eval-iters 10
            --distributed-backend nccl --save checkpoints --load checkpoints""",
        ),
        (
            "train_llama3_8b_h100_fp8.sh", "gpt",
            """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
            --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels
            128 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
            --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout
            0.0 --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
            --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
            --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
            --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
            --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
            --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
            --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
            --empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer
            --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid
            --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
            --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel
            --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path
            cache --tiktoken-pattern v2 --split 99,1,0 --no-create-attention-mask-in-dataloader
            --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval
            100 --save-interval 1000 --log-throughput --profile --profile-step-start 4
            --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save
            checkpoints --load checkpoints --tensorboard-dir boards""",
        ),
    )
}  # fmt: skip


# Flags of Megatron Core that no script above has, with a value that each takes.
CORE_FLAGS = """
    --cross-entropy-loss-fusion | --cross-entropy-fusion-impl te | --calculate-per-token-loss
    --manual-gc | --manual-gc-interval 100 | --grad-reduce-in-bf16 | --profile-ranks 0 1
    --use-pytorch-profiler | --moe-permute-fusion | --moe-router-fusion | --delay-wgrad-compute
    --moe-shared-expert-overlap | --moe-per-layer-logging | --moe-layer-recompute
    --moe-token-dispatcher-type flex | --moe-enable-deepep | --moe-flex-dispatcher-backend hybridep
    --moe-router-load-balancing-type none | --moe-router-force-load-balancing
    --moe-expert-capacity-factor 1.25 | --moe-pad-expert-input-to-capacity
    --moe-token-drop-policy position | --moe-input-jitter-eps 0.01 | --moe-apply-probs-on-input
    --recompute-modules core_attn moe | --tp-comm-overlap | --overlap-moe-expert-parallel-comm
    --use-torch-fsdp2 | --use-megatron-fsdp | --data-parallel-sharding-strategy optim_grads
    --use-precision-aware-optimizer | --main-grads-dtype fp32
    --ckpt-fully-parallel-save | --ckpt-fully-parallel-load | --ckpt-assume-constant-structure
    --use-persistent-ckpt-worker | --dist-ckpt-strictness log_all | --auto-detect-ckpt-format
    --ckpt-step 100 | --exit-on-missing-checkpoint | --log-progress | --wandb-entity us
    --lr-decay-style WSD | --lr-wsd-decay-style minus_sqrt | --lr-wsd-decay-iters 5
    --lr-wsd-decay-samples 5 | --lr-warmup-init 0.1 | --check-for-nan-in-loss-and-grad
    --no-check-for-nan-in-loss-and-grad | --rerun-mode disabled | --enable-cuda-graph
    --apply-query-key-layer-scaling | --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files | --legacy-tokenizer | --te-rng-tracker
    --disable-gloo-process-groups | --high-priority-stream-groups dp_cp ep | --no-one-logger
    --exit-signal-handler-for-dataloader | --enable-experimental | --logging-level 20
    --persistent-save-interval 5 | --num-distributed-optimizer-instances 2 | --optimizer dist_muon
    --torch-fsdp2-no-reshard-after-forward | --pipeline-model-parallel-layout Et
    --mla-down-proj-fusion | --cache-mla-latents | --recompute-modules mla_up_proj mlp
    --fp8-format e4m3 | --fp8-format hybrid | --fp8-recipe mxfp8 | --fp8-margin 0
    --fp8-interval 1 | --fp8-amax-history-len 1024 | --fp8-amax-compute-algo max
    --no-fp8-wgrad | --fp8-param-gather | --tp-only-amax-red | --first-last-layers-bf16
    --num-layers-at-start-in-bf16 2 | --num-layers-at-end-in-bf16 0
    --moe-router-padding-for-fp8 | --moe-router-padding-for-quantization
    --keep-fp8-transpose-cache | --keep-fp8-transpose-cache-when-using-custom-fsdp
    --reuse-grad-buf-for-mxfp8-param-ag | --save-retain-interval 5 | --moe-use-grouped-tensor
    --moe-paged-stash | --moe-paged-stash-page-size 64 | --tokenizer-library huggingface
    --rotary-interleaved
"""

# Core's examples/gptoss/02_train.sh, without --enable-gpt-oss, which cannot be honoured.
GPT_OSS = """--no-masked-softmax-fusion --transformer-impl transformer_engine --disable-bias-linear
    --untie-embeddings-and-output-weights --no-rope-fusion --normalization RMSNorm --num-layers 12
    --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 64 --group-query-attention
    --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --use-mcore-models
    --rotary-percent 1.0 --rope-type rope --position-embedding-type rope --rotary-base 10000
    --no-bias-gelu-fusion --export-force-local-attention --no-bias-dropout-fusion --quick-geglu
    --glu-linear-offset 1.0 --softmax-type learnable --window-attn-skip-freq 2
    --activation-func-clamp-value 7.0 --window-size 128,0 --num-experts 4 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
    --moe-ffn-hidden-size 2048 --moe-router-dtype fp32 --moe-z-loss-coeff 1e-3
    --moe-permute-fusion --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
    --data-cache-path cache --tiktoken-pattern v2 --split 99,1,0
    --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
    --micro-batch-size 1 --global-batch-size 128 --lr 1.0e-5 --train-samples 1953125000
    --lr-decay-samples 1949218748 --lr-decay-style cosine --min-lr 1.0e-6 --weight-decay 0.1
    --lr-warmup-fraction 0.05 --clip-grad 1.0 --bf16 --use-flash-attn --attention-softmax-in-fp32
    --accumulate-allreduce-grads-in-fp32 --disable-bf16-reduced-precision-matmul
    --recompute-activations --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --expert-model-parallel-size 1 --sequence-parallel --context-parallel-size 1
    --use-distributed-optimizer --log-interval 1 --save-interval 10000 --eval-interval 50000000
    --eval-iters 0 --save checkpoints --tensorboard-dir boards --moe-per-layer-logging
    --no-load-optim --no-load-rng --log-throughput --fp8-format hybrid --fp8-param-gather
    --fp8-amax-compute-algo max --fp8-amax-history-len 1024"""
