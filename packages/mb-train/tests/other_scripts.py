"""Argument lists of further public scripts, of those that are accepted as they are.

Megatron Core's functional and release tests (tests/functional_tests/test_cases, whose arguments are
YAML), AMD's port (Llama 2 with FSDP, RECOMPUTE, TE_FP8 and ENABLE_PROFILING set to 1), LLM-jp and
Sea AI Lab's zero-bubble fork. Flags and values are the scripts' own, with the defaults of what they
read from the environment; paths are as in `launch_scripts`.
"""

from __future__ import annotations

_SMALL = """--hidden-size 512 --num-attention-heads 8 --log-params-norm --log-num-zeros-in-grad
    --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard
    --log-memory-to-tensorboard --tensorboard-dir boards --global-batch-size 32
    --seq-length 1024 --max-position-embeddings 1024 --lr-decay-iters 320000 --save
    checkpoints --load checkpoints --data-path text --vocab-file
    /mount/gpt2-vocab.json --merge-file /mount/gpt2-merges.txt --split 949,50,1
    --distributed-backend nccl --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5
    --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 1
    --eval-interval 1000 --eval-iters 10 --transformer-impl transformer_engine
    --deterministic-mode --no-gradient-accumulation-fusion --use-mcore-models
    --ckpt-format torch_dist --data-cache-path cache"""

_LATENT = """--distributed-timeout-minutes 60 --context-parallel-size 1
    --expert-tensor-parallel-size 1 --overlap-grad-reduce --overlap-param-gather
    --attention-backend unfused --use-mcore-models --sequence-parallel
    --disable-bias-linear --no-check-for-nan-in-loss-and-grad --no-rope-fusion
    --manual-gc --manual-gc-interval 100 --transformer-impl transformer_engine
    --data-cache-path cache --data-path text --vocab-file /mount/gpt2-vocab.json
    --merge-file /mount/gpt2-merges.txt --split 949,50,1 --kv-channels 128
    --position-embedding-type rope --rotary-base 10000 --normalization RMSNorm
    --norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights
    --multi-latent-attention --attention-dropout 0.0 --hidden-dropout 0.0
    --clip-grad 1.0 --weight-decay 0.1 --qk-layernorm --lr-warmup-fraction .01 --lr
    0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2
    0.95 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024
    --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 4
    --moe-token-dispatcher-type alltoall --moe-router-pre-softmax --moe-grouped-gemm
    --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 2 --moe-router-num-groups 4
    --moe-router-topk-scaling-factor 2.0 --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-dtype fp32 --moe-permute-fusion --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --mscale 1.0 --mscale-all-dim 1.0
    --eval-interval 200 --save-interval 25 --init-method-std 0.02
    --log-timers-to-tensorboard --log-memory-to-tensorboard --log-num-zeros-in-grad
    --log-params-norm --log-validation-ppl-to-tensorboard --log-throughput
    --log-interval 1 --tensorboard-dir boards --bf16 --exit-interval 50
    --train-iters 50"""

_PROXY = f"""{_LATENT} --expert-model-parallel-size 2 --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1 --use-megatron-fsdp --megatron-fsdp-version 2
    --data-parallel-sharding-strategy optim_grads_params --outer-dp-sharding-strategy
    no_shard --deterministic-mode --ckpt-format fsdp_dtensor
    --no-gradient-accumulation-fusion --micro-batch-size 32 --global-batch-size 256
    --exit-duration-in-mins 60 --seq-length 1024 --num-layers 8 --hidden-size 512
    --ffn-hidden-size 2048 --num-attention-heads 8 --max-position-embeddings 1024
    --make-vocab-size-divisible-by 64 --num-experts 8 --moe-layer-freq ([0]*3+[1]*5)
    --q-lora-rank 256 --kv-lora-rank 128 --rotary-scaling-factor 1.0 --eval-iters 10
    --logging-level 10"""

_SINKHORN = f"""{_SMALL} --num-layers 12 --micro-batch-size 4 --timing-log-level 0
    --attention-softmax-in-fp32 --bf16 --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 1 --expert-model-parallel-size 2 --sequence-parallel
    --num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-router-topk 1
    --disable-bias-linear --no-bias-gelu-fusion"""

_AMD = """--untie-embeddings-and-output-weights --position-embedding-type rope --swiglu
    --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0
    --normalization RMSNorm --train-iters 10
    --no-async-tensor-model-parallel-allreduce --bf16 --dataloader-type cyclic
    --tensorboard-dir boards --log-interval 1 --num-workers 8 --mock-data
    --log-throughput --eval-iters -1 --no-gradient-accumulation-fusion
    --overlap-grad-reduce --use-flash-attn --use-mcore-models --lr-decay-style
    cosine --clip-grad 1.0 --pipeline-model-parallel-size 1"""

# By script: the model whose pretrain_*.py it starts, and the arguments.
OTHERS: dict[str, tuple[str, list[str]]] = {
    name: (model, text.split())
    for name, model, text in (
        (
            "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph", "gpt",
            f"""{_SMALL} --num-layers 13 --micro-batch-size 2 --timing-log-level 0 --save-interval
            50 --attention-softmax-in-fp32 --bf16 --mtp-num-layers 1 --position-embedding-type
            rope --rotary-base 10000 --untie-embeddings-and-output-weights --disable-bias-linear
            --attention-dropout 0.0 --hidden-dropout 0.0 --train-iters 100
            --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
            --expert-model-parallel-size 2 --expert-tensor-parallel-size 2
            --pipeline-model-parallel-layout Et|(tt|)*6mL --sequence-parallel --num-experts 8
            --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
            --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type
            global_aux_loss --moe-router-topk 2 --moe-router-dtype fp32 --moe-router-fusion
            --no-moe-router-aux-loss-fusion --moe-router-enable-expert-bias
            --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-ffn-hidden-size
            1024 --moe-shared-expert-intermediate-size 512 --moe-grouped-gemm --moe-layer-freq
            ([0]*4+[1]*9) --moe-permute-fusion --use-checkpoint-opt_param-scheduler --fp8-format
            hybrid --fp8-recipe blockwise --first-last-layers-bf16 --no-bias-gelu-fusion
            --recompute-granularity selective --recompute-modules moe_act --cuda-graph-impl
            transformer_engine --cuda-graph-modules attn mlp moe_router moe_preprocess
            --ckpt-fully-parallel-load --ckpt-assume-constant-structure --async-save
            --use-persistent-ckpt-worker""",
        ),
        (
            "gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon", "gpt",
            f"""{_SMALL} --num-layers 12 --micro-batch-size 4 --timing-log-level 0 --save-interval
            50 --attention-softmax-in-fp32 --bf16 --disable-bias-linear --train-iters 100
            --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
            --expert-model-parallel-size 8 --num-experts 8 --moe-token-dispatcher-type allgather
            --moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-router-dtype
            fp32 --moe-ffn-hidden-size 1024 --moe-grouped-gemm --ckpt-fully-parallel-load
            --use-checkpoint-opt_param-scheduler --ckpt-assume-constant-structure
            --no-bias-gelu-fusion --optimizer dist_muon --muon-momentum 0.9
            --muon-extra-scale-factor 0.2 --muon-scale-mode spectral""",
        ),
        (
            "gpt3_mcore_te_tp1_pp1_dist_optimizer_fim_dataset", "gpt",
            f"""{_SMALL} --num-layers 12 --micro-batch-size 4 --timing-log-level 0 --save-interval
            10000 --attention-softmax-in-fp32 --bf16 --train-iters 50
            --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
            --use-distributed-optimizer --dist-ckpt-strictness log_all --attention-backend
            unfused --fim-data --fim-rate 0.5 --fim-spm-rate 0.5 --async-save
            --use-persistent-ckpt-worker""",
        ),
        (
            "gpt3_345m_nightly_dgx_a100_1N8G_mcore_tp1_pp1_fsdp2_resume_torch_dist_te", "gpt",
            f"""{_SMALL} --num-layers 12 --micro-batch-size 4 --timing-log-level 2 --save-interval
            50 --fp16 --train-iters 100 --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 1 --use-torch-fsdp2
            --no-async-tensor-model-parallel-allreduce --use-checkpoint-opt_param-scheduler
            --dist-ckpt-optim-fully-reshardable --dist-ckpt-strictness log_all
            --apply-query-key-layer-scaling""",
        ),
        (
            "gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph", "gpt",
            f"""{_LATENT} --expert-model-parallel-size 4 --tensor-model-parallel-size 2
            --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4
            --use-distributed-optimizer --micro-batch-size 4 --global-batch-size 32
            --exit-duration-in-mins 230 --cross-entropy-loss-fusion --cross-entropy-fusion-impl
            native --seq-length 4096 --num-layers 16 --hidden-size 512 --ffn-hidden-size 4096
            --num-attention-heads 32 --max-position-embeddings 4096
            --make-vocab-size-divisible-by 3232 --num-experts 32 --moe-layer-freq ([0]*1+[1]*15)
            --q-lora-rank 1536 --kv-lora-rank 512 --rotary-scaling-factor 40 --eval-iters 32
            --save checkpoints --load checkpoints --logging-level 40
            --dist-ckpt-optim-fully-reshardable --cuda-graph-impl transformer_engine
            --cuda-graph-scope attn --cuda-graph-warmup-steps 0 --te-rng-tracker --fp8-format
            hybrid --fp8-recipe tensorwise --async-save --use-persistent-ckpt-worker""",
        ),
        (
            "gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental", "gpt",
            f"""{_LATENT} --expert-model-parallel-size 4 --tensor-model-parallel-size 2
            --pipeline-model-parallel-size 2 --use-distributed-optimizer --micro-batch-size 4
            --global-batch-size 32 --exit-duration-in-mins 230 --cross-entropy-loss-fusion
            --cross-entropy-fusion-impl native --seq-length 4096 --num-layers 16 --hidden-size
            1024 --ffn-hidden-size 4096 --num-attention-heads 32 --max-position-embeddings 4096
            --make-vocab-size-divisible-by 3232 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
            --num-experts 32 --moe-layer-freq ([0]*3+[1]*13) --q-lora-rank 1536 --kv-lora-rank
            512 --rotary-scaling-factor 40 --eval-iters 32 --save checkpoints --load checkpoints
            --logging-level 40 --recompute-granularity selective --recompute-modules layernorm
            mla_up_proj mlp moe_act --pipeline-model-parallel-layout Et*3|(tt|)*6tmL
            --overlap-moe-expert-parallel-comm --async-save --use-persistent-ckpt-worker""",
        ),
        (
            "gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_fine_grained_offloading", "gpt",
            f"""{_LATENT} --expert-model-parallel-size 4 --tensor-model-parallel-size 2
            --pipeline-model-parallel-size 2 --use-distributed-optimizer --micro-batch-size 1
            --global-batch-size 8 --exit-duration-in-mins 230 --cross-entropy-loss-fusion
            --cross-entropy-fusion-impl native --seq-length 4096 --num-layers 15 --hidden-size
            1024 --ffn-hidden-size 4096 --num-attention-heads 32 --max-position-embeddings 4096
            --make-vocab-size-divisible-by 3232 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
            --num-experts 32 --moe-layer-freq ([0]*3+[1]*12) --q-lora-rank 1536 --kv-lora-rank
            512 --rotary-scaling-factor 40 --eval-iters 32 --save checkpoints --load checkpoints
            --logging-level 40 --recompute-granularity selective --recompute-modules layernorm
            mla_up_proj mlp moe_act --fine-grained-activation-offloading --offload-modules
            expert_fc1 moe_act attn_norm mlp_norm qkv_linear core_attn attn_proj
            --pipeline-model-parallel-layout Et*3|(tt|)*6mL --overlap-moe-expert-parallel-comm""",
        ),
        (
            "deepseek_proxy_mfsdp_v2_ep2", "gpt", _PROXY,
        ),
        (
            "deepseek_proxy_mfsdp_v2_ep2_bf16_cg", "gpt",
            f"""{_PROXY} --cuda-graph-impl=full_iteration --moe-paged-stash
            --moe-expert-rank-capacity-factor=1.5 --moe-use-grouped-tensor
            --use-transformer-engine-op-fuser""",
        ),
        (
            "gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer", "gpt",
            f"""{_SINKHORN} --distributed-backend nccl2 --train-iters 100 --save-interval 50
            --use-distributed-optimizer --ckpt-fully-parallel-load
            --use-checkpoint-opt_param-scheduler --dist-ckpt-optim-fully-reshardable
            --dist-ckpt-strictness log_all --ckpt-assume-constant-structure --async-save
            --use-persistent-ckpt-worker --verify-integrity""",
        ),
        (
            "gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_"
            "instances", "gpt",
            f"""{_SINKHORN} --train-iters 100 --save-interval 50 --use-distributed-optimizer
            --ckpt-fully-parallel-load --use-checkpoint-opt_param-scheduler
            --dist-ckpt-strictness log_all --ckpt-assume-constant-structure
            --num-distributed-optimizer-instances 2 --async-save --use-persistent-ckpt-worker""",
        ),
        (
            "gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_groupedGEMM", "gpt",
            f"""{_SINKHORN} --train-iters 100 --save-interval 50 --moe-grouped-gemm
            --use-checkpoint-opt_param-scheduler""",
        ),
        (
            "gpt3_mcore_te_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_"
            "groupedGEMM", "gpt",
            f"""{_SINKHORN} --train-iters 50 --save-interval 10000 --no-ckpt-fully-parallel-save
            --moe-grouped-gemm --use-distributed-optimizer --overlap-grad-reduce
            --overlap-param-gather --dist-ckpt-save-pre-mcore-014 --dist-ckpt-strictness log_all
            --attention-backend unfused""",
        ),
        (
            "gpt3_mcore_te_tp1_pp1_mup", "gpt",
            f"""{_SMALL} --num-layers 12 --micro-batch-size 4 --train-iters 50 --timing-log-level 0
            --save-interval 10000 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
            --use-distributed-optimizer --no-mmap-bin-files --attention-softmax-in-fp32
            --dist-ckpt-strictness log_all --bf16 --attention-backend unfused --use-mup
            --mup-base-hidden-size 256 --async-save --use-persistent-ckpt-worker""",
        ),
        (
            "train_llama2.sh", "gpt",
            f"""{_AMD} --context-parallel-size 1 --num-layers 80 --hidden-size 8192
            --ffn-hidden-size 28672 --num-attention-heads 64 --seq-length 4096
            --max-position-embeddings 32000 --no-position-embedding --init-method-std 0.02
            --micro-batch-size 2 --global-batch-size 8 --no-masked-softmax-fusion
            --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok --split 99990,8,2
            --save-interval 200000 --eval-interval 320000 --eval-iters 10 --data-cache-path
            cache --save-interval 5000 --no-save-optim --group-query-attention
            --num-query-groups 8 --distributed-backend nccl --distributed-timeout-minutes 120
            --lr 1e-4 --min-lr 1e-5 --lr-decay-iters 320000 --weight-decay 1.0e-1 --ckpt-format
            torch_dist --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95
            --tensor-model-parallel-size 1 --use-torch-fsdp2 --recompute-num-layers 80
            --recompute-granularity full --recompute-method block
            --transformer-impl=transformer_engine --fp8-margin=0 --fp8-format=hybrid
            --fp8-interval=1 --fp8-amax-history-len=1024 --fp8-amax-compute-algo=max
            --attention-softmax-in-fp32 --profile --use-pytorch-profiler""",
        ),
        (
            "train_qwen_moe.sh", "gpt",
            f"""{_AMD} --tensor-model-parallel-size 8 --context-parallel-size 1
            --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --num-layers 24
            --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --seq-length 2048
            --max-position-embeddings 8192 --no-position-embedding --init-method-std 0.02
            --micro-batch-size 2 --global-batch-size 8 --no-masked-softmax-fusion --add-qkv-bias
            --rotary-percent 1.0 --rotary-base 1000000 --rotary-seq-len-interpolation-factor 1
            --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen2-1.5B
            --save-interval 200000 --eval-interval 320000 --eval-iters 10 --no-save-optim
            --no-save-rng --group-query-attention --num-query-groups 16 --distributed-backend
            nccl --distributed-timeout-minutes 120 --use-distributed-optimizer
            --overlap-param-gather --sequence-parallel --lr 1e-4 --min-lr 1e-5 --lr-decay-iters
            320000 --weight-decay 1.0e-1 --optimizer adam --num-experts 60 --moe-router-topk 8
            --moe-ffn-hidden-size 1408 --num-shared-experts 4 --moe-router-load-balancing-type
            aux_loss --moe-aux-loss-coeff 1e-3 --moe-shared-expert-intermediate-size 5632
            --enable-shared-expert --transformer-impl transformer_engine --moe-grouped-gemm
            --moe-use-legacy-grouped-gemm --moe-token-dispatcher-type alltoall
            --moe-shared-expert-overlap --overlap-param-gather --rotary-base 10000
            --moe-layer-freq 1 --moe-router-force-load-balancing""",
        ),
        (
            "train_deepseekv3.sh", "gpt",
            f"""{_AMD} --moe-router-num-groups 1 --q-lora-rank 512 --moe-router-dtype fp32
            --multi-latent-attention --qk-layernorm --rerun-mode disabled --attention-sink-k 0
            --moe-ffn-hidden-size 1408 --enable-shared-expert --moe-layer-freq ([0]*3+[1]*24)
            --num-shared-experts 2 --moe-shared-expert-intermediate-size 2816
            --moe-router-load-balancing-type seq_aux_loss --moe-router-topk 6 --num-experts 64
            --moe-router-pre-softmax --mscale 1.0 --mscale-all-dim 1.0 --moe-aux-loss-coeff 1e-2
            --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --kv-lora-rank 512
            --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128
            --no-rope-fusion --moe-token-dispatcher-type alltoall --moe-shared-expert-overlap
            --ddp-bucket-size 629145600 --overlap-param-gather --moe-grouped-gemm
            --moe-use-legacy-grouped-gemm --use-distributed-optimizer --train-mode pretrain
            --data-cache-path cache --lr 1e-5 --min-lr 1e-6 --adam-beta1 0.9 --adam-beta2 0.95
            --weight-decay 0.1 --init-method-std 0.008 --lr-decay-iters 8 --lr-warmup-iters 2
            --micro-batch-size 1 --global-batch-size 128 --num-layers 27 --hidden-size 2048
            --num-attention-heads 16 --ffn-hidden-size 10944 --seq-length 4096
            --max-position-embeddings 4096 --max-padding-length 4096 --eval-interval 10000
            --save-interval 500000 --ckpt-format torch --tensorboard-queue-size 1
            --log-timers-to-tensorboard --log-batch-size-to-tensorboard
            --log-validation-ppl-to-tensorboard --tensor-model-parallel-size 1
            --extra-vocab-size 0 --tokenizer-type DeepSeekV3Tokenizer --tokenizer-model
            deepseek-ai/DeepSeek-V3 --legacy-tokenizer --dataset LLama-Pretrain-Idxmap
            --norm-epsilon 1e-06 --use-rotary-position-embeddings --rotary-base 10000
            --rotary-scaling-factor 40 --transformer-impl transformer_engine --eod-mask-loss""",
        ),
        (
            "gpt3_15b_8t_release", "gpt",
            """--distributed-timeout-minutes 60 --tensor-model-parallel-size 8
            --pipeline-model-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce
            --overlap-param-gather --use-mcore-models --sequence-parallel --disable-bias-linear
            --micro-batch-size 4 --rampup-batch-size 384 384 97656250 --global-batch-size 1152
            --train-samples 19531250 --manual-gc --transformer-impl transformer_engine
            --data-cache-path cache --tokenizer-library sentencepiece --tokenizer-model
            nemotron.model --data-path text --split 99,1,0 --no-mmap-bin-files --num-workers 6
            --apply-layernorm-1p --untie-embeddings-and-output-weights --position-embedding-type
            rope --no-rope-fusion --rotary-percent 0.5 --squared-relu --num-layers 32
            --hidden-size 6144 --num-attention-heads 48 --group-query-attention
            --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096
            --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1
            --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 4.5e-4 --min-lr
            4.5e-5 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
            --adam-beta1 0.9 --adam-beta2 0.95 --eval-iters 32 --eval-interval 2000 --save
            checkpoints --load checkpoints --save-interval 1000 --save-retain-interval 5000
            --init-method-std 0.0134 --log-timers-to-tensorboard --log-memory-to-tensorboard
            --log-num-zeros-in-grad --log-params-norm --log-validation-ppl-to-tensorboard
            --log-throughput --log-interval 100 --tensorboard-dir boards --wandb-project p
            --wandb-entity adlr --wandb-exp-name e --bf16 --exit-interval 51000 --wandb-save-dir
            w --async-save""",
        ),
        (
            "16expert_4granularity_2shared_top6_18b_active2.9b", "gpt",
            """--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings
            4096 --num-layers 24 --hidden-size 2048 --ffn-hidden-size 1792 --num-attention-heads
            16 --init-method-std 0.02 --attention-dropout 0.0 --hidden-dropout 0.0
            --normalization RMSNorm --norm-epsilon 1e-5 --position-embedding-type rope --swiglu
            --untie-embeddings-and-output-weights --num-query-groups 16
            --no-masked-softmax-fusion --rotary-base 10000 --num-experts 64
            --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
            --moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather
            --overlap-grad-reduce --tokenizer-type Llama2Tokenizer --tokenizer-model llmjp.model
            --data-path 14486363187 text 12799385151 text --data-cache-path cache --split 1,0,0
            --global-batch-size 1024 --train-iters 492120 --lr-decay-iters 492120
            --lr-decay-style cosine --weight-decay 0.1 --lr-warmup-iters 2000 --clip-grad 1
            --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --bf16
            --use-flash-attn --transformer-impl transformer_engine --attention-softmax-in-fp32
            --accumulate-allreduce-grads-in-fp32 --micro-batch-size 1 --lr 3e-4 --min-lr 3e-5
            --moe-router-topk 6 --moe-shared-expert-intermediate-size 3584
            --moe-shared-expert-overlap --tensor-model-parallel-size 1
            --pipeline-model-parallel-size 1 --expert-model-parallel-size 8""",
        ),
        (
            "pretrain_zero_bubble.sh", "gpt",
            """--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 8
            --hidden-size 8192 --num-attention-heads 64 --exit-interval 1000 --seq-length 4096
            --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 8
            --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105
            --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 10 --eval-iters
            40 --eval-interval 10000 --data-path text --tokenizer-type GPTSentencePieceTokenizer
            --tokenizer-model t.model --split 98,2,0 --clip-grad 8.0 --weight-decay 0.1
            --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
            --no-barrier-with-level-1-timing --profile-step-start 150 --profile-step-end 170
            --untie-embeddings-and-output-weights --use-legacy-models --sequence-parallel
            --use-flash-attn --transformer-impl local --use-distributed-optimizer
            --no-overlap-p2p-communication --profile-ranks 0 1 2 3 --fp16""",
        ),
        (
            "bert_release", "bert",
            """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
            --max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32
            --train-iters 20000 --weight-decay 1e-2 --clip-grad 1.0 --fp16 --lr 0.0001
            --lr-decay-style linear --min-lr 1.0e-5 --lr-warmup-fraction .01
            --bert-no-binary-head --tensor-model-parallel-size 8 --pipeline-model-parallel-size
            8 --data-path text --vocab-file bert-vocab.txt --split 949,50,1 --data-cache-path
            cache --log-interval 100 --save-interval 2000 --save-retain-interval 10000
            --eval-interval 1000 --save checkpoints --load checkpoints --eval-iters 10
            --log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard
            --log-timers-to-tensorboard --log-memory-to-tensorboard --tensorboard-dir boards
            --wandb-project p --wandb-entity adlr --wandb-exp-name e --attention-backend unfused
            --exit-interval 20000 --wandb-save-dir w""",
        ),
        (
            "t5_release", "t5",
            """--encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768
            --num-attention-heads 12 --kv-channels 64 --ffn-hidden-size 3072
            --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512
            --init-method-std 0.015 --attention-backend unfused --micro-batch-size 32
            --global-batch-size 512 --train-iters 100000 --exit-interval 100000 --weight-decay
            1e-2 --clip-grad 1.0 --bf16 --lr 0.0001 --lr-decay-style linear --min-lr 1.0e-5
            --lr-warmup-fraction .01 --distributed-backend nccl2 --use-mcore-models
            --transformer-impl transformer_engine --tensor-model-parallel-size 4
            --pipeline-model-parallel-size 1 --data-path text --vocab-file bert-vocab.txt
            --tokenizer-type BertWordPieceCase --split 99982,9,9 --data-cache-path cache
            --vocab-extra-ids 100 --log-interval 100 --save-interval 2000 --eval-interval 1000
            --save-retain-interval 10000 --save checkpoints --load checkpoints --eval-iters 10
            --log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard
            --log-timers-to-tensorboard --log-memory-to-tensorboard --tensorboard-dir boards
            --timing-log-level 0 --wandb-project p --wandb-entity adlr --wandb-exp-name e
            --wandb-save-dir w""",
        ),
    )
}  # fmt: skip
