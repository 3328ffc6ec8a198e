"""Flags of Megatron and of others: translated, without effect, or refused with a reason."""

import re
from collections import Counter

import pytest
from mb_train.flags.command_line import parse, resolve, without_effect
from mb_train.flags.megatron_defaults import CORES
from mb_train.flags.parser import build_parser
from mb_train.flags.refused import _REASONS
from mb_train.flags.settled import SETTLED
from mb_train.flags.translated import TRANSLATED

RUN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "8", "--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3"),
]


def test_settled_flags_are_answered_in_one_note():
    arguments = []
    for name, (valued, _) in SETTLED.items():
        arguments += [name, "1"] if valued else [name]
    (note,) = parse(arguments).notes
    for name, (_, answer) in SETTLED.items():
        assert re.search(rf"{name}[,\w _-]* \({re.escape(answer)}\)", note), name
    assert parse(["--seed", "1"]).notes == ()
    assert not parse(arguments).values
    latent = ["--mla-down-proj-fusion", "--multi-latent-attention", "--cache-mla-latents"]
    (note,) = parse(latent).notes
    assert "here: --mla-down-proj-fusion (fusion is the kernels' own matter);" in note
    assert "--cache-mla-latents (it belongs to Megatron's text server, not to training)" in note


def test_what_core_turns_off_has_both_of_its_spellings():
    for off in ("manual-gc-eval", "tp-comm-bulk-wgrad", "ckpt-load-validate-sharding-integrity"):
        assert SETTLED[f"--no-{off}"] == SETTLED[f"--disable-{off}"]
    # This one has a meaning, GELU without its approximation, and one spelling in Megatron.
    assert "--disable-bias-gelu-fusion" not in SETTLED
    assert parse(["--exit-signal", "SIGTERM", "--lazy-mpu-init"]).values == {}
    with pytest.raises(ValueError, match="--exit-signal to be SIGTERM, got 'SIGINT'"):
        parse(["--exit-signal", "SIGINT"])
    words = ["--tokenizer-special-tokens", "<unk>", "<s>"]
    assert parse(words).values == {"tiktoken_special_tokens": ["<unk>", "<s>"]}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "--fp8-dot-product-attention --fp8-output-proj --te-precision-config-file x",
            r"--fp8-dot-product-attention, --fp8-output-proj cannot be .*: FP8 is of the products "
            r"with the weights of blocks.* --te-precision-config-file cannot be .*say --fp8-format",
        ),
        ("--deepspeed --topk 2", r"--deepspeed cannot be .* --topk cannot be .*--moe-router-topk"),
        (
            "--perform-rl-step --grpo-group-size 2 --no-rl-partial-rollouts --refit-method gloo",
            r"--perform-rl-step, --grpo-group-size, --no-rl-partial-rollouts, --refit-method "
            r"cannot be honoured: there is no reinforcement learning",
        ),
        (
            "--inference-max-requests 8 --flash-decode --num-tokens-to-generate 1",
            r"--inference-max-requests, --flash-decode, --num-tokens-to-generate cannot be .*: "
            r"mb-train generate RUN writes texts, and mb-train serve RUN",
        ),
        ("--export-quant-cfg x", r"--export-quant-cfg cannot be .* mb-train convert RUN"),
        ("--train-idx-path x --repeated-dataloader", r"--train-idx-path, --rep.*--data-cache-path"),
        ("--enable-zbh1-pipeline", r"--enable-zbh1-pipeline cannot .* interleaved-zero-bub"),
        ("--zero-bubble-v-schedule", r"--zero-bubble-v-schedule cannot .* interleaved-zero-bub"),
        (
            "--use-fused-rmsnorm --n-shared-experts 1 --first-k-dense-replace 1 --norm-topk-prob",
            r"--use-fused-rmsnorm .*leave it out.* --n-shared-experts .*: say --moe-shared-expert-i"
            r".* --first-k-dense-replace .*: say --moe-first-k-dense\. --norm-topk-prob cannot",
        ),
        ("--fp8-of-tomorrow x", r"--fp8-of-tomorrow cannot be .*: see --fp8-format"),
        (
            "--fp4-format e2m1 --enable-gpt-oss --tomorrow --mtp-use-repeated-layer "
            "--relative-attention-num-buckets 16",
            r"--fp4-format cannot .*--enable-gpt-oss cannot .*--recipe gpt-oss-20b.*Unknown flag "
            r"--tomorrow.*-num-buckets 16 cannot be honoured: T5 tells 32 distances",
        ),
        (
            "--mtp-loss-scaling-factor-decay 0.15 --mtp-loss-scaling-factor-decay-start 5",
            r"-decay, --mtp-loss-scaling-factor-decay-start cannot .*: --mtp-loss-s.* whole run",
        ),
        ("--mtp-use-repeated-layer", r"cannot be honoured: each module of --mtp-num-layers is a"),
        (
            "--use-multi-token-prediction --num-mtp-predictor 1",
            r"--use-multi-token-prediction, --num-mtp-predictor cannot .*: say --mtp-num-layers\.",
        ),
        ("--glu-linear-offset 1", r"with --quick-geglu alone: .*--activation 'swiglu\(limit=7\)'"),
        ("--swiglu --activation-func-clamp-value 7", r"with --quick-geglu alone: fused"),
        ("--quick-geglu --glu-linear-offset x", r"--glu-linear-offset to be a number, got x"),
        (
            "--window-size 127,1",
            r"--window-size to be the tokens .* as 127,0, .* got 127,1\. Leave",
        ),
        ("--window-size=-1,0", r"--window-size to be the tokens .* got -1,0\. Leave it out"),
        ("--window-attn-skip-freq [1,2]", r"1 for each layer with a window.* got \[1,2\]"),
        (
            "--num-layers 5 --window-attn-skip-freq [1,0]*2",
            r"--window-attn-skip-freq to be of --num-layers 5, got \[1,0\]\*2, which is of 4",
        ),
        ("--no-rope-freq [1,x]", r"--no-rope-freq to be 1 for each layer without .* got \[1,x\]"),
        (
            "--num-layers 5 --no-rope-freq ([0]*3+[1])*2",
            r"--no-rope-freq to be of --num-layers 5, got .*, which is of 8",
        ),
        (
            "--linear-attention-freq [1,0,0,1]",
            r"--linear-attention-freq to be states in all layers but every n-th.*\[1,0,0,1\]",
        ),
        (
            "--num-layers 5 --linear-attention-freq [1,0]*2",
            r"--linear-attention-freq to be of --num-layers 5, got \[1,0\]\*2, which is of 4",
        ),
        ("--experimental-attention-variant kda", "invalid choice: 'kda'"),
        ("--linear-attention-qk-norm l2norm", "or a state by --experimental-attention-variant"),
        ("--rotary-base-per-layer 1 2", r"--rotary-base-per-layer cannot .* have --rotary-base,"),
        (
            "--head-wise-attn-gate",
            r"cannot .* came before, its gate that of --attention-output-gate",
        ),
        ("--use-gated-attention", r"cannot be honoured: say --attention-output-gate"),
        ("--deepspeed --optimizer lion", r"--deepspeed cannot .* Argument --optimizer: invalid"),
        (
            "--moe-router-load-balancing-type aux_loss global_aux_loss",
            r"one --moe-router-load-balancing-type, .* got aux_loss global_aux_loss",
        ),
        ("--moe-aux-loss-coeff 1e-2 1e-3", r"one --moe-aux-loss-coeff, .* got 1e-2 1e-3"),
        ("--moe-aux-loss-coeff x", r"--moe-aux-loss-coeff to be a number, got x"),
        ("--qk-rope-head-dim=64", r"--qk-rope-head-dim cannot .*: say --qk-pos-emb-head-dim"),
        ("--cp-comm-type a2a --cp 2", r"--cp cannot be honoured: say --context-parallel-size"),
        ("--spec my.specs stack_spec --hybrid-layer-pattern M*", r"--spec cannot .* this library"),
        (
            "--is-hybrid-model",
            r"--is-hybrid-model cannot be honoured: say --hybrid-layer-pattern, with a letter",
        ),
        (
            "--num-layers 4 --hybrid-mlp-ratio 0.5 --hybrid-override-pattern M-M*",
            r"--hybrid-mlp-ratio cannot be honoured: say --hybrid-layer-pattern, .* in its shares",
        ),
        ("--num-layers 4 --hybrid-mlp-ratio x", r"--hybrid-mlp-ratio cannot be honoured: say --hy"),
        ("--hybrid-layer-pattern", r"--hybrid-override-pattern: expected one argument"),
        ("--mamba-training-ssm-states-dtype bf16", r"heads, groups and widths: see --mamba-num-h"),
        ("--hybrid-context-parallel", r"sequences are shared by as many ranks, see --context-par"),
        ("--moe-router-dtype bf16", r"--moe-router-dtype to be one of fp32, fp64, got 'bf16'"),
        ("--export-model-type T5", r"--export-model-type to be one of GPTModel, .* got 'T5'"),
        ("--moe-layer-freq [0]*4", r"--moe-layer-freq to be 1 for each layer with experts"),
        ("--moe-layer-freq ([1", r"--moe-layer-freq to be 1 for each layer with experts"),
        ("--moe-layer-freq ()*9[0]", r"--moe-layer-freq to be 1 for each layer with experts"),
        ("--num-layers 5 --moe-layer-freq [0,1]*2", r"--moe-layer-freq to be of --num-layers 5"),
        ("--encoder-num-layers 5 --moe-layer-freq [0]+[1]*5", r"-freq to be of --num-layers 5"),
        ("--moe-layer-freq [1]*1000000000000", "at most 10,000 layers of a list"),
        ("--moe-layer-freq ([1]*10000)*10000", "at most 10,000 layers of a list"),
        ("--no-rope-freq [0]*6000+[1]*6000", "at most 10,000 layers of a list"),
        ("--num-layers 1000000000000 --hybrid-mlp-ratio 0.5", "at most 10,000 layers of a list"),
        ("--moe-expert-capacity-factor x", r"--moe-expert-capacity-factor to be a number, got x"),
        (
            "--moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 2",
            r"--moe-router-pre-softmax with .* scores a group by the sum of its best 3 logits",
        ),
        (
            "--num-layers 2 --num-experts 8 --moe-grouped-gemm --moe-router-group-topk 1",
            r"--moe-router-pre-softmax with .* scores a group by the sum of its best 2 logits",
        ),
        (
            "--num-layers 9 --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 4",
            r"--num-virtual-stages-per-pipeline-rank that share 9 layers out over 2 stages, got 4: "
            r"of at most 2 layers there are 3",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            "at least 2 stages with --num-layers-per-virtual-pipe.*, got 1 stages, 2 layers",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
            r"--num-layers-per-virtual-pipeline-stage or --num-virtual.*, got both",
        ),
        ("--expert-tensor-parallel-size 0", r"to be a whole number above 0, got 0"),
        ("--expert-tensor-parallel-size x", r"to be a whole number above 0, got x"),
        (
            "--enable-shared-expert --num-shared-experts 2",
            r"--enable-shared-expert, --num-shared-experts cannot be honoured: say --moe-shared-",
        ),
        ("--extra-vocab-size 256", r"--extra-vocab-size 256 cannot be honoured: a tokenizer says"),
        ("--dataset MMAP --attention-sink-k 4", r"-sink-k 4 cannot be honoured: say --softmax"),
        ("--head-lr-mult 10", r"--head-lr-mult 10 cannot be honoured: say --decoupled-lr\."),
        ("--most-recent-k x", r"--most-recent-k to be a number, got x"),
        ("--mid-level-dataset-surplus 0.01", r"surplus 0\.01 cannot be .* 0\.5 % more samples"),
        (
            "--tensor-model-parallel-size 2 --muon-tp-mode blockwise",
            r"--muon-tp-mode duplicated with --tensor-model-parallel-size 2, got blockwise",
        ),
        ("--muon-tp-mode rowwise", r"--muon-tp-mode to be one of duplicated, .*, got 'rowwise'"),
        (
            "--tokenizer-library tiktoken",
            r"--tokenizer-library to be one of .* See --tokenizer-typ",
        ),
        ("--moe-expert-rank-capacity-factor all", "-capacity-factor to be a number, got all"),
        (
            "--expert-outer-dp-sharding-strategy optim",
            r"to be no_shard, got 'optim'\. Replicas share noth",
        ),
        (
            "--outer-dp-sharding-strategy optim",
            r"to be no_shard, got 'optim'\. Replicas share noth",
        ),
        (
            "--use_rms_norm --glu_activation swiglu --seq_length 8 --lr_decay_style linear",
            r"--use_rms_norm cannot .*: say --normalization RMSNorm\. --glu_activation cannot .* "
            r"Unknown: --seq_length, --lr_decay_style\. Flags have hyphens",
        ),
        (
            "--xielu --ademamix-alpha 8 --goldfish-k 50 --ap-sft-pack-samples --lr-scale-gate 0.25",
            r"--xielu cannot .* no xIELU\. --ademamix-alpha cannot .*: say --optimizer adam.* "
            r"--goldfish-k cannot .* --ap-sft-pack-samples cannot .*: mb-data chats writes .* "
            r"--lr-scale-gate 0\.25 cannot be honoured: say --moe-router-lr-mult",
        ),
        ("--exp-avg-dtype bf16", r"one dtype of --exp-avg-dtype and --exp-avg-sq-dtype"),
        (
            "--recompute-modules attn",
            r"--recompute-modules of core_attn, moe, moe_act, layernorm, mla_up_proj, mlp, "
            r"shared_experts, got 'attn'",
        ),
        (
            "--num-layers 5 --moe-layer-freq [0]+[1]*5",
            r"--moe-layer-freq to be of --num-layers 5, got \[0\]\+\[1\]\*5, which is of 6",
        ),
        ("--num-experts 4 --eval-iters -2", r"--eval-iters of at least 0, got -2"),
        (
            "--img-h 224 --retro-add-retriever --vision-model-type clip",
            r"--img-h, --vision-model-type cannot .*no models of images\. --retro-add-ret",
        ),
        (
            "--no-position-embedding --position-embedding-type learned_absolute",
            r"--no-position-embedding or --position-embedding-type learned, got both",
        ),
        ("--init-method-xavier-uniform", r"-uniform cannot be .* normal distribution, by --init-m"),
        ("--moe-layer-freq [01]", r"--moe-layer-freq to be 1 for each layer .*, got \[01\]"),
        (
            "--learning-rate 1e-3 --tp 2 --nproc_per_node 8",
            r"--learning-rate .*: say --lr\. --tp .*: say --tensor-model-parallel-size\. "
            r"--nproc_per_node .*: it is torchrun's, and stands before -m mb_train",
        ),
        (
            "--zero-reduce-bucket-size 5e8 --ds-sequence-parallel-size 2 --curriculum-learning-x",
            r"--zero-reduce-bucket-size .*: see --zero-stage.* --ds-sequence-parallel-size cannot "
            r".*: say --context-parallel-size, .* --curriculum-learning-x .*no curriculum",
        ),
        (
            "--train-weighted-split-paths-path x --kill-switch-path y",
            r"--train-weighted-split-paths-path .*say --train-data-path.*--kill-switch-path .*"
            r"SIGTERM",
        ),
        (
            "--cpu-optimizer --delay-offload-until-cuda-graph --reset-lr-state "
            "--activation-func-fp8-input-store --optimizer-cuda-graph",
            r"--cpu-optimizer .*--optimizer-cpu-offload.*--delay-offload-until-cuda-graph .*"
            r"--reset-lr-state .*--no-load-optim.*--activation-func-fp8-input-store .*-bits, of",
        ),
        (
            "--cpu-offloading-weights --mok-minibatch-size 4 --virtual-pipeline-model-parallel-size"
            " 2 --phase-transition-iterations 5 --moe-router-force-biased 1",
            r"--cpu-offloading-weights .*--mok-minibatch-size .*--moe-router-force-biased .*say "
            r"--moe-router-force-load-balancing",
        ),
    ],
)
def test_what_cannot_be_honoured_is_an_error_with_its_reason(typed, said):
    with pytest.raises(ValueError, match=said):
        resolve(parse([*RUN, *typed.split()]))


def test_a_list_of_layers_is_counted_wherever_their_number_was_said(tmp_path):
    (tmp_path / "run.toml").write_text("num_layers = 5\n")
    typed = ["--train-iters", "1", "--num-experts", "4", "--moe-layer-freq", "[0]+[1]*5"]
    said = r"--moe-layer-freq to be of --num-layers {}, got \[0\]\+\[1\]\*5, which is of 6"
    with pytest.raises(ValueError, match=said.format(4)):
        resolve(parse(typed), {"num_layers": 4})
    with pytest.raises(ValueError, match=said.format(5)):
        resolve(parse([*typed, "--config", str(tmp_path / "run.toml")]))
    with pytest.raises(ValueError, match=said.format(12)):
        resolve(parse([*typed, "--recipe", "dmoe-125m"]))
    config = resolve(parse([*typed, "--recipe", "dmoe-46m"]), {"num_layers": 4})
    assert (config.num_layers, config.moe_first_k_dense) == (6, 1)


def test_a_refused_flag_has_one_reason_whose_flags_there_are():
    """The last of two would be told; that of a flag that is taken, never."""
    refused = Counter(name for names in _REASONS.values() for name in names.split())
    assert [name for name, reasons in refused.items() if reasons > 1] == []
    taken = {name for action in build_parser()._actions for name in action.option_strings}
    assert refused.keys() & taken <= TRANSLATED.keys()  # there by a number that asks for nothing
    ours = {flag for why in _REASONS for flag in re.findall(r"--[a-z][\w-]*", why)}
    # Of mb-train eval and finetune.
    assert ours - taken == {"--strict", "--stride", "--epochs"}


@pytest.mark.parametrize(
    "typed",
    [
        "--head-lr-mult 1.0 --lr-scale-gate 1 --mlp-chunks-for-training 1 --most-recent-k -1",
        "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-n-hash-layers 0",
        "--moe-upcycling-granularity 1 --num-residual-streams 1 --mid-level-dataset-surplus 0.005",
        "--encoder-tensor-model-parallel-size 0 --relative-attention-max-distance 128",
        "--wandb-project= --wandb-exp-name= --wandb-entity= --wandb-save-dir=",
        "--rotary-seq-len-interpolation-factor 1",
        "--muon-tp-mode blockwise --tensor-model-parallel-size 1",
        # One group of one: every expert can be chosen.
        "--num-experts 4 --moe-router-topk 2 --moe-loss-weight 0.01 --moe-router-num-groups 1 "
        "--moe-router-group-topk 1",
    ],
)
def test_what_asks_for_nothing_is_accepted_in_silence(typed):
    command = parse([*RUN, *typed.split()])
    config = resolve(command)
    assert (*command.notes, *without_effect(command, config)) == ()
    assert config.wandb_project is config.wandb_save_dir is None


def test_what_is_done_in_another_way_is_said():
    words = "--recompute-modules layernorm core_attn mlp --expert-tensor-parallel-size 2"
    assert parse(words.split()).notes == (
        "--expert-tensor-parallel-size 2: as many ranks share the experts, which stay whole while "
        "there are enough of them",
        "--recompute-modules: without layernorm, mlp, which keep what they compute",
    )
    assert parse(["--recompute-modules", "moe", "--expert-tensor-parallel-size", "1"]).notes == ()


def test_a_flag_that_the_fields_own_overrules_is_said():
    words = (
        "--recompute-granularity full --recompute-activations --use-torch-fsdp2 --zero-stage 3 "
        "--moe-aux-loss-coeff 0.2 --moe-loss-weight 0.2"
    )
    command = parse(words.split())
    assert command.values["recompute_granularity"] == "full"
    assert command.notes == (
        "no effect beside --recompute-granularity full: --recompute-activations",
        "no effect beside --moe-loss-weight 0.2: --moe-aux-loss-coeff",
    )


@pytest.mark.parametrize("kind", ["learned", "none", "rope"])
def test_the_older_flag_of_rotary_positions_overrules_the_newer_as_in_megatron(kind):
    newer = ["--position-embedding-type", kind]
    command = parse([*RUN, *newer, "--use-rotary-position-embeddings"])
    assert resolve(command).position_embedding_type == "rope"
    assert command.notes == (
        () if kind == "rope"
        else (f"no effect beside --use-rotary-position-embeddings: {' '.join(newer)}",)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--position-embedding-type none", True),
        ("--no-position-embedding", True),
        ("--no-position-embedding --position-embedding-type rope", False),
        ("", False),
    ],
)
def test_latent_attention_has_rotary_positions_whatever_a_script_says(typed, told):
    latent = ["--position-embedding-type", "rope"] if not typed else []
    command = parse([*RUN, "--multi-latent-attention", *latent, *typed.split()])
    assert resolve(command).position_embedding_type == "rope"
    assert any("rotary positions all the same" in note for note in command.notes) == told


def test_chunks_are_counted_in_layers_that_are_said():
    words = ["--pipeline-model-parallel-size=2", "--num-virtual-stages-per-pipeline-rank=2"]
    with pytest.raises(ValueError, match="Expected --num-layers with --num-virtual-stages-per-pip"):
        parse(["--recipe=dense-46m", *words])


def test_what_is_computed_in_fp32_here_is_said():
    command = parse([*RUN, "--num-experts=4", "--moe-router-dtype=fp64"])
    assert resolve(command).moe_router_fp32
    assert "--moe-router-dtype fp64: routers compute in fp32" in command.notes


def test_older_spellings_mean_what_they_meant():
    line = "--activations-checkpoint-method uniform --encoder-seq-length 8 --bert-no-binary-head"
    assert parse(line.split()).values == {
        "recompute_granularity": "full", "recompute_method": "uniform", "seq_length": 8,
        "bert_binary_head": False,
    }  # fmt: skip
    fused = "--bias-gelu-fusion --scaled-upper-triang-masked-softmax-fusion --fp32-allreduce"
    chunks = parse(f"--checkpoint-activations --checkpoint-num-layers 1 {fused}".split())
    assert chunks.values == {"recompute_granularity": "full", "recompute_num_layers": 1}
    typed = parse(["--recompute-activations", "--recompute-granularity", "full"]).values
    assert typed == {"recompute_granularity": "full"}
    assert parse(["--no-compile"]).values == {"compile": False}
    assert parse(["--rampup-batch-size", "16", "16", "5859"]).values == {
        "rampup_batch_size": [16, 16, 5859]
    }


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("--position-embedding-type learned_absolute", {"position_embedding_type": "learned"}),
        ("--no-position-embedding", {"position_embedding_type": "none"}),
        (
            "--no-position-embedding --use-rotary-position-embeddings",
            {"position_embedding_type": "rope"},
        ),
        (
            "--no-position-embedding --position-embedding-type rope",
            {"position_embedding_type": "rope"},
        ),
        ("--softmax-scale 0.125", {"attention_scale": 0.125}),
        ("--moe-router-topk 1", {"moe_top_k": 1}),
        ("--moe-router-topk 2", {"moe_top_k": 2, "moe_renormalize": True}),
        (
            "--moe-router-topk 2 --moe-router-pre-softmax",
            {"moe_top_k": 2, "moe_renormalize": False},
        ),
        (
            "--moe-router-topk=2 --moe-router-pre-softmax --moe-router-score-function sigmoid",
            {"moe_top_k": 2, "moe_renormalize": True, "moe_router_score_function": "sigmoid"},
        ),
        ("--moe-top-k 2 --moe-router-topk 4", {"moe_top_k": 4, "moe_renormalize": True}),
        (
            "--moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 2 "
            "--moe-router-pre-softmax",
            {
                "moe_top_k": 6,
                "moe_renormalize": False,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 2,
                "moe_router_group_score_top": 3,
            },
        ),
        ("--moe-router-topk 2 --no-moe-renormalize", {"moe_top_k": 2, "moe_renormalize": False}),
        (
            "--moe-router-load-balancing-type aux_loss",
            {"moe_loss_weight": 0.0, "moe_balance_over": "micro_batch", "moe_router_type": "topk"},
        ),
        (
            "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss",
            {"moe_loss_weight": 0.01, "moe_balance_over": "sequence", "moe_router_type": "topk"},
        ),
        (
            "--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.01",
            {"moe_loss_weight": 0.0, "moe_router_type": "topk"},
        ),
        ("--moe-token-dispatcher-type allgather", {"moe_dispatcher": "all_gather"}),
        ("--moe-token-dispatcher-type alltoall_seq", {"moe_dispatcher": "all_to_all"}),
        ("--moe-layer-freq 2", {"moe_layer_freq": 2}),
        ("--moe-layer-freq ([0]*3+[1]*24)", {"moe_first_k_dense": 3, "moe_layer_freq": 1}),
        ("--moe-layer-freq=[0,1,1]", {"moe_first_k_dense": 1, "moe_layer_freq": 1}),
        ("--moe-layer-freq ([1]*1+[0]*1)*3", {"moe_first_k_dense": 0, "moe_layer_freq": 2}),
        ("--moe-layer-freq [0]*2+([1]+[0])*4", {"moe_first_k_dense": 2, "moe_layer_freq": 2}),
        ("--moe-layer-freq [1]*4", {"moe_first_k_dense": 0, "moe_layer_freq": 1}),
        ("--moe-layer-freq [0]*3+2*[1,]*2", {"moe_first_k_dense": 3, "moe_layer_freq": 1}),
        (
            "--num-layers 9 --moe-layer-freq [0]*3+[1]*6 --num-layers 2 --moe-layer-freq [0,1]",
            {"num_layers": 2, "moe_first_k_dense": 1, "moe_layer_freq": 1},
        ),
        ("--moe-layer-freq=[0,1] --moe-layer-freq 2", {"moe_layer_freq": 2}),
        ("--moe-layer-freq [0,1]*2", {"moe_layers": [0, 1, 0, 1]}),
        ("--moe-layer-freq 3 --moe-layer-freq [1,0,0,1,1]", {"moe_layers": [1, 0, 0, 1, 1]}),
        (
            "--moe-expert-capacity-factor 1.25",
            {"moe_capacity_factor": 1.25, "moe_drop_policy": "probability"},
        ),
        (
            "--moe-expert-rank-capacity-factor 1.5 --moe-paged-stash",
            {"moe_row_policy": "budget", "moe_row_budget": 1.5},
        ),
        (
            "--moe-token-drop-policy position --moe-expert-capacity-factor -1",
            {"moe_capacity_factor": 0.0, "moe_drop_policy": "position"},
        ),
        (
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-params-dtype fp32",
            {"optimizer_state_dtype": "bf16"},
        ),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-"
            "optimizer --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads",
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        ),
        ("--offload-optimizer-states", {"optimizer_cpu_offload": True}),
        ("--recompute-modules core_attn layernorm moe_act", {"moe_recompute": True}),
        ("--recompute-modules mlp shared_experts", {}),
        (
            "--expert-model-parallel-size 4 --expert-tensor-parallel-size 2",
            {"expert_model_parallel_size": 8},
        ),
        ("--expert-tensor-parallel-size 2", {"expert_model_parallel_size": 2}),
        (
            "--num-layers 24 --pipeline-model-parallel-size 4 "
            "--num-virtual-stages-per-pipeline-rank 3",
            {
                "num_layers": 24,
                "pipeline_model_parallel_size": 4,
                "num_layers_per_virtual_pipeline_stage": 2,
            },
        ),
        (  # of Qwen3-235B-A22B: the last two of 48 stages have one layer
            "--num-layers 94 --pipeline-model-parallel-size 4 "
            "--num-virtual-stages-per-pipeline-rank 12",
            {
                "num_layers": 94,
                "pipeline_model_parallel_size": 4,
                "num_layers_per_virtual_pipeline_stage": 2,
            },
        ),
        (
            "--num-layers 8 --decoder-num-layers 4 --model t5 --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 3",
            {
                "num_layers": 8,
                "decoder_num_layers": 4,
                "model": "t5",
                "pipeline_model_parallel_size": 2,
                "num_layers_per_virtual_pipeline_stage": 2,
            },
        ),
        ("--num-virtual-stages-per-pipeline-rank 1", {}),
        (
            "--moe-shared-expert-intermediate-size 32 --enable-shared-expert "
            "--num-shared-experts 2",
            {"moe_shared_expert_intermediate_size": 32},
        ),
        ("--extra-vocab-size 0 --attention-sink-k 0 --dataset LLama-Pretrain-Idxmap", {}),
        (
            "--tokenizer-library sentencepiece",
            {"tokenizer_type": "GPTSentencePieceTokenizer"},
        ),
        ("--tokenizer-type DeepSeekV3Tokenizer", {"tokenizer_type": "HuggingFaceTokenizer"}),
        ("--tokenizer-type SFTTokenizer", {"tokenizer_type": "HuggingFaceTokenizer"}),
        (
            "--wandb-name a --save-retain-interval 9",
            {"wandb_exp_name": "a", "save_retain_interval": 9},
        ),
        ("--use-torch-fsdp2", {"zero_stage": 3}),
        ("--export-model-type MambaModel", {}),
        ("--tokenizer-type DeepSeekV2Tokenizer", {"tokenizer_type": "HuggingFaceTokenizer"}),
        ("--data-parallel-sharding-strategy optim", {"zero_stage": 1}),
        ("--data-parallel-sharding-strategy no_shard", {}),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", {"zero_stage": 2}),
        ("--num-distributed-optimizer-instances 2", {"data_parallel_replicas": 2}),
        (
            "--optimizer dist_muon --muon-momentum 0.95 --muon-scalar-optimizer adam",
            {"optimizer": "muon", "muon_momentum": 0.95},
        ),
        (
            "--muon-use-nesterov --muon-num-ns-steps 6 --muon-extra-scale-factor 0.1",
            {"muon_nesterov": True, "muon_num_ns_steps": 6, "muon_extra_scale_factor": 0.1},
        ),
        (
            "--muon-coefficient-type polar_express --muon-num-ns-steps 8",
            {"muon_coefficient_type": "polar_express", "muon_num_ns_steps": 8},
        ),
        (
            "--context-parallel-size 1 --expert-tensor-parallel-size 1",
            {"context_parallel_size": 1},
        ),
        ("--context-parallel-size 2 --cp-comm-type p2p", {"context_parallel_size": 2}),
        ("--context-parallel-size 2 --linear-cp-mode chunkwise", {"context_parallel_size": 2}),
        ("--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", {}),
        (
            "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3",
            {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3},
        ),
        ("--rope-type rope --glu-linear-offset 0.0", {"rope_type": "rope"}),
        ("--quick-geglu", {"activation": "swiglu(alpha=1.702)"}),
        (
            "--activation-func-clamp-value 7 --quick-geglu --glu-linear-offset 1.0",
            {"activation": "swiglu(alpha=1.702, offset=1.0, limit=7.0)"},
        ),
        ("--quick-geglu --activation swiglu", {"activation": "swiglu"}),
        (
            "--window-size 127,0 --softmax-type learnable",
            {"window_size": 127, "softmax_type": "learnable"},
        ),
        ("--window-size (128,0) --window-size 31", {"window_size": 31}),
        ("--window-size 0", {"window_size": 0}),
        (
            "--num-layers 4 --window-attn-skip-freq [1,0]*2",
            {"num_layers": 4, "window_attn_skip_freq": 2},
        ),
        ("--window-attn-skip-freq ([1]*3+[0])*2+[1]", {"window_attn_skip_freq": 4}),
        ("--window-attn-skip-freq [1]*5", {"window_attn_skip_freq": 6}),
        ("--window-attn-skip-freq [0]*5", {"window_attn_skip_freq": 1}),
        ("--window-attn-skip-freq [0,1]*2", {"window_layers": [0, 1, 0, 1]}),
        ("--window-attn-skip-freq 3 --window-attn-skip-freq [0,1]", {"window_layers": [0, 1]}),
        ("--no-rope-freq=[1,0]*2", {"rope_layers": [0, 1, 0, 1]}),
        ("--window-attn-skip-freq [1,0]*3 --window-attn-skip-freq=3", {"window_attn_skip_freq": 3}),
        ("--attention-output-gate", {"attention_output_gate": True}),
        (
            "--experimental-attention-variant gdn --linear-attention-freq ([1]*3+[0])*3",
            {
                "experimental_attention_variant": "gated_delta_net",
                "linear_attention_freq": 4,
            },
        ),
        (
            "--linear-attention-type gated_delta_net --linear-attention-freq 2",
            {
                "experimental_attention_variant": "gated_delta_net",
                "linear_attention_freq": 2,
            },
        ),
        ("--linear-attention-freq [1]*3", {"linear_attention_freq": 4}),
        ("--linear-attention-freq 3", {"linear_attention_freq": 3}),
        ("--no-rope-freq 4", {"no_rope_freq": 4}),
        (
            "--spec megatron.core.ssm.mamba_layer_specs mamba_stack_spec "
            "--hybrid-override-pattern=M*-M --mamba-state-dim 64",
            {"hybrid_layer_pattern": "M*-M", "num_layers": 4, "mamba_state_dim": 64},
        ),
        (
            "--num-layers 4 --is-hybrid-model --hybrid-mlp-ratio 0.5"
            " --hybrid-override-pattern=-M-M",
            {"hybrid_layer_pattern": "-M-M", "num_layers": 4},
        ),
        (
            "--num-layers 2 --hybrid-attention-ratio 0.0 --hybrid-override-pattern M*",
            {"hybrid_layer_pattern": "M*", "num_layers": 2},
        ),
        ("--num-layers 2 --hybrid-attention-ratio 0.0 --hybrid-mlp-ratio=0", {"num_layers": 2}),
        (
            "--num-layers 4 --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
            {"hybrid_layer_pattern": "MMMM", "num_layers": 4},
        ),
        (
            "--hybrid-layer-pattern -M|M*",  # of two stages
            {"hybrid_layer_pattern": "-MM*", "num_layers": 4},
        ),
        (
            "--hybrid-layer-pattern -M|*/-M/-M",
            {
                "hybrid_layer_pattern": "-M*",
                "num_layers": 3,
                "mtp_num_layers": 2,
                "mtp_hybrid_override_pattern": "-M",
            },
        ),
        (
            "--hybrid-override-pattern=M*- --mtp-hybrid-override-pattern -* --mtp-num-layers 1",
            {
                "hybrid_layer_pattern": "M*-",
                "num_layers": 3,
                "mtp_num_layers": 1,
                "mtp_hybrid_override_pattern": "-*",
            },
        ),
        (
            "--hybrid-layer-pattern -*E",
            {"hybrid_layer_pattern": "-*E", "num_layers": 3},
        ),
        (
            "--hybrid-layer-pattern M- --num-layers 2 --hybrid-layer-pattern *E",
            {"hybrid_layer_pattern": "*E", "num_layers": 2},
        ),
        ("--no-rope-freq ([0]*3+[1]*1)*3", {"no_rope_freq": 4}),
        ("--no-rope-freq=[0]*5", {"no_rope_freq": 6}),
        ("--no-rope-freq [1]*5 --no-rope-freq=3", {"no_rope_freq": 3}),
        ("--eval-iters -1", {"eval_iters": 0}),
        (
            "--exit-interval 0 --exit-duration-in-mins 0 --moe-shared-expert-intermediate-size 0",
            dict.fromkeys(
                ("exit_interval", "exit_duration_in_mins", "moe_shared_expert_intermediate_size")
            ),
        ),
        ("--loss-scale 0", {"loss_scale": None}),  # one that adapts
    ],
)
def test_what_later_megatrons_say_means_the_same_here(typed, wanted):
    assert parse(typed.split()).values == wanted


@pytest.mark.parametrize(
    ("typed", "layers"),
    [
        ("--num-layers 5", 5),
        ("--num-layers 5 --moe-layer-freq [0]+[1]*4", 4),
        ("--num-layers 5 --moe-layer-freq 2", 3),
        ("--num-layers 3 --model t5 --decoder-num-layers 2 --decoder-seq-length 8", 5),
        ("--num-layers 3 --model ict", 6),
    ],
)
def test_the_losses_of_megatron_core_weigh_in_every_layer(typed, layers):
    # There each layer's loss is added as it is, here their mean: see `ExpertReports`.
    run = [*RUN, *typed.split(), "--moe-num-experts", "4"]
    line = parse([*run, "--moe-aux-loss-coeff", "0.25", "--moe-z-loss-coeff", "0.5"])
    for loaded in None, {"moe_loss_weight": 3.0}:
        config = resolve(line, loaded)
        assert (config.moe_loss_weight, config.moe_z_loss_weight) == (0.25 * layers, 0.5 * layers)
    config = resolve(parse([*run, "--moe-loss-weight", "0.25"]))
    assert (config.moe_loss_weight, config.num_moe_layers) == (0.25, layers)


@pytest.mark.parametrize(
    ("typed", "top_k", "renormalized", "weight"),
    [
        ("--moe-num-experts 8", 1, False, 0.1),  # MegaBlocks' spelling
        ("--num-experts 8", 1, False, 0.0),  # Megatron-LM's, a Switch without a loss
        ("--num-experts 8 --moe-grouped-gemm", 2, True, 0.0),  # Core's, whose default is 2
        ("--num-experts 8 --use-mcore-models", 2, True, 0.0),
        ("--num-experts 8 --moe-aux-loss-coeff 0.5", 2, True, 1.0),
        ("--num-experts 8 --moe-router-score-function sigmoid", 2, True, 0.0),
        ("--num-experts 8 --moe-shared-expert-overlap", 2, True, 0.0),
        ("--num-experts 8 --moe-capacity-factor 2 --moe-jitter-eps 0.1", 1, False, 0.0),
        ("--num-experts 8 --moe-expert-capacity-factor 1.25", 2, True, 0.0),
        ("--num-experts 8 --moe-grouped-gemm --moe-router-pre-softmax", 2, False, 0.0),
        ("--num-experts 8 --moe-grouped-gemm --moe-top-k 3 --moe-loss-weight 0.2", 3, False, 0.2),
        ("--num-experts 8 --moe-router-topk 1 --moe-aux-loss-coeff 0.5", 1, False, 1.0),
        ("--num-experts 8 --recipe dmoe-46m --moe-grouped-gemm", 1, False, 0.1),
        (
            "--num-experts 8 --multi-latent-attention --position-embedding-type rope",
            2,
            True,
            0.0,
        ),
    ],
)
def test_experts_have_the_defaults_of_whose_spelling_it_is(typed, top_k, renormalized, weight):
    line = parse([*RUN, "--num-layers", "2", *typed.split()])
    config = resolve(line)
    found = config.moe_top_k, config.moe_renormalize, config.moe_loss_weight
    assert found == (top_k, renormalized, weight)
    assert any("no load-balancing loss" in note for note in line.notes) == (weight == 0)
    assert any("2 experts for a token without" in note for note in line.notes) == (top_k == 2)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--moe-router-topk 1", True),
        ("--moe-router-topk 1 --moe-router-pre-softmax", False),
        ("--moe-router-topk 1 --moe-router-score-function sigmoid", False),
        ("--moe-router-topk 1 --no-moe-renormalize", False),
        ("--moe-router-topk 2", False),
        ("--moe-top-k 1", False),
        ("--moe-router-topk 1 --num-experts 0", False),
    ],
)
def test_the_weight_of_one_expert_is_said(typed, told):
    """Of a softmax over what was chosen it would be 1, whatever the router says."""
    notes = parse(["--num-experts", "4", *typed.split()]).notes
    assert any(note.startswith("an expert's weight is its probability") for note in notes) == told


def test_every_flag_for_experts_is_known_as_cores_megablocks_or_ours():
    """One of Core's that is missing among `CORES` would leave its scripts without their top-k."""
    top_k = "--moe-top-k --moe-router-topk"  # one that is typed needs no default
    megablocks = """
        --moe-num-experts --moe-capacity-factor --moe-loss-weight --moe-lbl-in-fp32
        --moe-jitter-eps --moe-use-megatron-switch --moe-expert-model-parallelism
    """
    theirs = {
        name
        for action in build_parser()._actions
        for name in action.option_strings
        if name.startswith("--moe-") and "(ours)" not in (action.help or "")
    }
    assert theirs - CORES == {*top_k.split(), *megablocks.split()}


@pytest.mark.parametrize(
    ("typed", "biases"),
    [
        ("--moe-num-experts 8", False),
        ("--num-experts 8", True),
        ("--num-experts 8 --disable-bias-linear", False),
        ("--num-experts 8 --no-moe-mlp-bias", False),
        ("--num-experts 8 --recipe dmoe-46m", False),
    ],
)
def test_megatrons_experts_have_biases_like_its_other_maps(typed, biases):
    config = resolve(parse([*RUN, "--num-layers", "2", *typed.split()]))
    assert config.moe_mlp_bias == biases
    routers = biases or "--no-moe-mlp-bias" in typed
    assert config.moe_router_bias == routers


@pytest.mark.parametrize(
    ("typed", "activation"),
    [
        ("", "gelu_tanh"),
        ("--disable-bias-linear", "gelu"),
        ("--no-bias-gelu-fusion --num-experts 8", "gelu"),
        ("--disable-bias-linear --swiglu", "swiglu"),
        ("--disable-bias-linear --activation gelu_tanh", "gelu_tanh"),
        ("--no-bias-gelu-fusion --openai-gelu", "gelu_tanh"),
        ("--disable-bias-linear --use-te-activation-func", "gelu_tanh"),
        ("--disable-bias-linear --use-transformer-engine-op-fuser", "gelu_tanh"),
        ("--disable-bias-linear --use-transformer-engine-op-fuser --num-experts 8", "gelu"),
        ("--no-bias-gelu-fusion --moe-num-experts 8", "gelu_tanh"),  # MegaBlocks' experts
        ("--disable-bias-linear --recipe dense-46m", "gelu_tanh"),
    ],
)
def test_gelu_is_exact_where_megatron_does_not_fuse_it_with_a_bias(typed, activation):
    line = parse([*RUN, *typed.split()])
    assert resolve(line).activation_name == activation
    assert any("exact GELU, as in Megatron" in note for note in line.notes) == (
        activation == "gelu"
    )


@pytest.mark.parametrize(
    ("typed", "nesterov", "factor", "said"),
    [
        ("--optimizer dist_muon", False, 1.0,
         ("no --muon-nesterov", "five times", "quintic", "learned positions")),
        ("--optimizer muon --muon-extra-scale-factor 0.1 --muon-coefficient-type simple --swiglu "
         "--use-rotary-position-embeddings", False, 0.1, ("no --muon-nesterov", "gate and up")),
        ("--optimizer muon --muon-extra-scale-factor 0.2 --muon-nesterov --no-position-embedding",
         True, 0.2, ("quintic",)),
        ("--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2 --muon-coefficient-type "
         "simple --position-embedding-type rope --multi-latent-attention", True, 0.2,
         ("takes apart",)),
        ("--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2 --muon-coefficient-type "
         "simple --position-embedding-type rope --multi-latent-attention --muon-no-split-qkv",
         True, 0.2, ()),
        ("--optimizer muon --muon-nesterov --muon-extra-scale-factor 0.2 --muon-coefficient-type "
         "simple --tensor-model-parallel-size 2 --use-rotary-position-embeddings", True, 0.2,
         ("whole matrices",)),
        ("--optimizer muon --recipe dense-46m", True, 0.2, ()),
        ("--optimizer adam", True, 0.2, ()),
    ],
)  # fmt: skip
def test_a_script_has_megatrons_numbers_of_muon(typed, nesterov, factor, said):
    line = parse([*RUN, *typed.split()])
    config = resolve(line)
    assert (config.muon_nesterov, config.muon_extra_scale_factor) == (nesterov, factor)
    assert config.muon_coefficient_type == ("quintic" if "quintic" in said else "simple")
    assert without_effect(line, config) == []
    several = ("no --muon-nesterov", "five times", "quintic", "takes apart", "whole matrices")
    for words in (*several, "gate and up", "learned positions"):
        assert any(words in note for note in line.notes) == (words in said)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--rotary-scaling-factor 40", ("--mscale-all-dim is 0",)),
        ("--rotary-scaling-factor 40 --mscale-all-dim 1", ()),
        (
            "--rotary-scaling-factor 40 --max-position-embeddings 163840",
            ("--mscale-all-dim is 0", "--original-max-position-embeddings 163840"),
        ),
        (
            "--rotary-scaling-factor 40 --mscale-all-dim 1 --max-position-embeddings 163840 "
            "--original-max-position-embeddings 4096",
            (),
        ),
        ("--rotary-scaling-factor 40 --max-position-embeddings 4096", ("--mscale-all-dim is 0",)),
        ("--rotary-scaling-factor 1 --max-position-embeddings 163840", ()),
        ("--rope-type rope --max-position-embeddings 163840", ()),
    ],
)
def test_what_yarn_meant_early_in_2025_is_said(typed, said):
    latent = ["--multi-latent-attention", "--position-embedding-type", "rope"]
    notes = parse([*RUN, *latent, *typed.split()]).notes
    for words in "--mscale-all-dim is 0", "--original-max-position-embeddings 163840":
        assert any(words in note for note in notes) == (words in said)


@pytest.mark.parametrize(
    ("typed", "momentum", "told"),
    [
        ("--muon-nesterov", 0.95, False),
        ("--muon-use-nesterov", 0.9, True),
        ("--muon-use-nesterov --muon-momentum 0.95", 0.95, False),
        ("--muon-use-nesterov --recipe dense-46m", 0.95, False),
    ],
)
def test_a_script_of_the_first_megatron_with_muon_has_its_momentum(typed, momentum, told):
    line = parse([*RUN, "--optimizer", "dist_muon", *typed.split()])
    assert (resolve(line).muon_momentum, resolve(line).muon_nesterov) == (momentum, True)
    assert any("a momentum of 0.9, having no" in note for note in line.notes) == told


@pytest.mark.parametrize(
    ("typed", "others"),
    [
        ("--moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-4", True),
        ("--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-aux-loss-coeff 1e-4", True),
        ("--moe-router-enable-expert-bias --moe-aux-loss-coeff 0", False),
        ("--moe-router-enable-expert-bias", False),
        ("--moe-aux-loss-coeff 1e-4", False),
    ],
)
def test_a_balancing_loss_beside_a_bias_or_groups_counts_the_best_as_in_megatron(typed, others):
    sigmoid = ["--moe-router-score-function", "sigmoid"]
    words = ["--num-experts", "8", "--moe-router-topk", "4", *sigmoid, *typed.split()]
    line = parse([*RUN, *words])
    assert any("without bias and groups" in note for note in line.notes) == others
    if others:
        assert resolve(line).moe_balance_by == "scores"
        as_here = parse([*RUN, *words, "--moe-balance-by", "visits"])
        assert resolve(as_here).moe_balance_by == "visits"
        assert not any("without bias and groups" in note for note in as_here.notes)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--num-experts 8", True),
        ("--num-experts 8 --moe-top-k 1", False),
        ("--num-experts 0", False),
        ("--moe-num-experts 8", False),  # MegaBlocks' spelling
        ("--num-experts 8 --recipe dmoe-46m", False),
    ],
)
def test_a_lone_expert_is_told_where_nobody_says_how_many(typed, told):
    line = parse([*RUN, *typed.split()])
    assert any("one expert for a token without" in note for note in line.notes) == told
    assert not any("one expert" in note for note in line.going_on().notes)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--num-experts 8", True),
        ("--num-experts 8 --use-mcore-models --expert-model-parallel-size 2", True),
        ("--num-experts 8 --moe-router-topk 2", False),
        ("--num-experts 8 --moe-aux-loss-coeff 0.01", False),  # of a later Megatron
        ("--num-experts 8 --moe-router-load-balancing-type aux_loss", False),
        ("--num-experts 8 --moe-router-load-balancing-type sinkhorn", False),
        ("--num-experts 8 --use-legacy-models", False),
        ("--num-experts 0", False),
        ("--moe-num-experts 8", False),
    ],
)
def test_how_experts_were_chosen_at_the_end_of_2023_is_said(typed, told):
    line = parse([*RUN, *typed.split()])
    assert any("at the end of 2023" in note for note in line.notes) == told
    assert not any("2023" in note for note in line.going_on().notes)


@pytest.mark.parametrize(
    ("typed", "biased"),
    [
        ("--moe-num-experts 8", True),
        ("--moe-num-experts 8 --disable-bias-linear", False),
        ("--moe-num-experts 8 --no-moe-output-bias", False),
        ("--moe-num-experts 8 --moe-mlp-bias", False),  # GPT-OSS's
        ("--moe-num-experts 8 --recipe dmoe-46m", False),
        ("--num-experts 8", False),  # Megatron's spelling
        ("--moe-num-experts 0", False),
    ],
)
def test_megablocks_experts_have_a_bias_on_their_output(typed, biased):
    line = parse([*RUN, *typed.split()])
    assert resolve(line).moe_output_bias == biased
    assert any("bias on the experts' output" in note for note in line.notes) == biased
    assert not resolve(line.going_on(), {"moe_output_bias": False}).moe_output_bias


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--glu", True),
        ("--glu --moe-num-experts 8 --moe-capacity-factor 1", True),
        ("--glu --moe-num-experts 8", False),
        ("--glu --moe-num-experts 8 --moe-capacity-factor 0", False),
        ("--glu --swiglu", False),
        ("--glu --recipe dense-46m", False),
        ("--moe-num-experts 8 --moe-capacity-factor 1", False),
    ],
)
def test_a_gate_that_megablocks_fork_passes_over_is_said(typed, told):
    notes = parse([*RUN, *typed.split()]).notes
    assert any("--glu gates every feed-forward" in note for note in notes) == told


@pytest.mark.parametrize(
    ("typed", "biased"),
    [
        ([*RUN, "--model", "t5", "--position-embedding-type", "rope"], True),
        ([*RUN, "--model", "t5", "--use-rotary-position-embeddings"], True),
        (
            [*RUN, *("--model", "t5"), "--use-rotary-position-embeddings",
             "--untie-embeddings-and-output-weights"], False,
        ),
        ([*RUN, "--model", "t5", "--position-embedding-type", "rope", "--no-head-bias"], False),
        ([*RUN, "--model", "t5", "--position-embedding-type", "relative"], False),
        ([*RUN, "--position-embedding-type", "rope"], False),
        (["--recipe", "t5-220m", "--position-embedding-type", "rope"], False),
    ],
)  # fmt: skip
def test_scores_of_a_t5_with_rotary_positions_have_a_bias(typed, biased):
    command = parse([*typed, "--decoder-seq-length", "8"])
    assert resolve(command).head_bias == biased
    assert any("a bias for each token on its score" in n for n in command.notes) == biased


def test_a_method_of_recomputing_alone_recomputes_nothing_as_in_megatron():
    line = parse([*RUN, "--recompute-method", "uniform"])
    config = resolve(line)
    assert config.recompute_granularity is None
    (note,) = without_effect(line, config)
    assert note == "no effect without --recompute-granularity full: --recompute-method"


def test_no_experts_are_a_dense_model():
    line = parse([*RUN, "--num-experts", "0", "--moe-grouped-gemm"])
    config = resolve(line)
    assert (config.moe_num_experts, config.moe_top_k) == (None, 1)
    assert line.notes == parse([*RUN, "--moe-grouped-gemm"]).notes


def test_what_no_experts_would_do_is_no_matter():
    """Neither refused, nor told of as if there were some, nor with defaults that nobody typed."""
    words = (
        "--moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
    )
    for experts in (["--num-experts", "0"], ["--recipe", "quickstart", "--moe-num-experts", "0"]):
        line = parse([*RUN, *words.split(), *experts])
        assert line.notes == ()
        assert without_effect(line, resolve(line)) == [
            "no effect without --moe-num-experts: --moe-top-k, --moe-loss-weight, "
            "--moe-router-num-groups, --moe-router-group-topk"
        ]


def test_a_file_has_its_say_beside_megatrons_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("moe_loss_weight = 0.25\n")
    typed = ["--num-layers", "2", "--num-experts", "8", "--config", str(path)]
    assert resolve(parse([*RUN, *typed])).moe_loss_weight == 0.25
