"""Every launch script of MegaBlocks and of Megatron's examples describes the run it means."""

import gzip
import json
import math
from dataclasses import fields
from importlib import resources
from pathlib import Path

import mb_data
import mb_train
import numpy as np
import pytest
from launch_scripts import (
    CORE,
    CORE_FLAGS,
    EARLIER,
    EXAMPLES,
    FORK_FLAGS,
    GPT_OSS,
    MEGABLOCKS,
)
from mb_data.tokenizer.readable_bpe import byte_to_letter
from mb_train.assembly.layout import stage_layers
from mb_train.cli import main
from mb_train.config import TrainConfig
from mb_train.config.recipes import recipe
from mb_train.config.toml_file import to_toml
from mb_train.data.tokenizers import load_tokenizer
from mb_train.flags.command_line import parse, resolve, without_effect
from mb_train.flags.parser import build_parser
from mb_train.flags.settled import NO_FUSED_GELU
from mb_train.flags.translated import TRANSLATED
from mb_train.models.config import MambaSizes
from mb_train.tasks.architecture import transformer_config
from other_scripts import OTHERS

SCRIPTS = (
    [(f"exp/{name}", "gpt", words) for name, words in (MEGABLOCKS | EARLIER).items()]
    + [(f"examples/{name}", model, words) for name, (model, words) in EXAMPLES.items()]
    + [(f"core/{name}", model, words) for name, (model, words) in CORE.items()]
    + [(f"others/{name}", model, words) for name, (model, words) in OTHERS.items()]
    + [("core/gptoss/02_train.sh", "gpt", GPT_OSS.split())]
)  # fmt: skip
ONE_BY_ONE = [
    words.split()
    for flags in (FORK_FLAGS, CORE_FLAGS)
    for words in flags.replace("\n", "|").split("|")
    if words.strip()
]


def test_there_are_as_many_as_people_have():
    assert (len(MEGABLOCKS), len(EXAMPLES), len(CORE), len(OTHERS)) == (17, 11, 13, 22)
    page = Path(mb_train.__file__).parents[2] / "docs" / "configuration.md"
    words = f"17 of 17 and 11 of 11, and {len(CORE) + len(OTHERS)} for Megatron Core"
    assert words in page.read_text("utf-8")


@pytest.mark.parametrize(("name", "model", "words"), SCRIPTS, ids=[name for name, *_ in SCRIPTS])
def test_a_script_is_accepted_verbatim(tmp_path, name, model, words):
    command = parse([*words, "--model", model] if model != "gpt" else words)
    config = resolve(command)
    typed = {word.split("=")[0] for word in words if word.startswith("--")}
    fields_of = {o: a.dest for a in build_parser()._actions for o in a.option_strings}
    names = {f.name for f in fields(TrainConfig)}
    if any(note.startswith("the exact GELU") for note in command.notes):
        typed.discard(NO_FUSED_GELU)  # it has an effect
    # Nothing that is typed is lost: it is in the configuration, or in the one note.
    settled = {flag for flag in typed if fields_of[flag] not in names} - set(TRANSLATED)
    notes = [note for note in command.notes if "without effect" in note]
    assert len(notes) == bool(settled)
    assert all(flag in notes[0] for flag in settled)
    assert all(fields_of[flag] in command.values for flag in typed - settled - set(TRANSLATED))
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config))
    assert resolve(parse(["--config", str(file)])) == config


def test_a_mixtral_of_megatron_core_is_the_model_it_is():
    config = resolve(parse(CORE["train_mixtral_8x7b_distributed.sh"][1]))
    assert (config.activation_name, config.expert_ffn_size, config.kv_heads) == ("swiglu", 14336, 8)
    assert (config.moe_top_k, config.moe_renormalize, config.moe_loss_weight) == (2, True, 0.32)
    assert (config.position_embedding_type, config.moe_dispatcher) == ("rope", "all_to_all")


def test_a_qwen3_of_megatron_core_is_the_model_it_is():
    config = resolve(parse(CORE["train_qwen3.sh"][1]))
    assert (config.activation_name, config.expert_ffn_size, config.kv_heads) == ("swiglu", 768, 4)
    assert (config.moe_num_experts, config.moe_top_k, config.moe_renormalize) == (128, 8, True)
    assert (config.moe_loss_weight, config.qk_layernorm, config.head_size) == (0.048, True, 128)
    assert (config.mock_data, config.eval_iters, config.log_throughput) == (True, 0, True)


def test_a_deepseek_v3_of_megatron_core_is_the_model_it_is():
    command = parse(CORE["DeepSeek-V3.yaml"][1])
    config = resolve(command)
    assert config.latent_sizes == [1536, 512, 128, 64, 128]
    assert config.rope_scaling == ("yarn", 40.0, 4096, 32.0, 1.0, 1.0, 1.0, True)
    assert (config.moe_first_k_dense, config.moe_router_group_score_top) == (3, 2)
    assert "no effect without --multi-latent-attention left out: --kv-channels" in without_effect(
        command, config
    )
    model = transformer_config(config, 129_280)
    assert (model.head_size, model.value_size, model.qk_norm) == (192, 128, "latent")


def test_a_gpt_oss_of_megatron_core_is_the_model_it_is():
    with pytest.raises(ValueError, match=r"^--enable-gpt-oss cannot .*--recipe gpt-oss-20b"):
        parse(f"{GPT_OSS} --enable-gpt-oss".split())
    command = parse(GPT_OSS.split())
    assert not any("the exact GELU, as in Megatron" in note for note in command.notes)
    config = resolve(command)
    assert config.activation_name == "swiglu(alpha=1.702, offset=1.0, limit=7.0)"
    assert (config.windows, config.softmax_type) == ((128, 2), "learnable")
    assert (config.moe_renormalize, config.moe_mlp_bias, config.add_bias_linear) == (
        True,
        False,
        False,
    )
    model = transformer_config(config, 128_256)
    assert model.in_fp8(0)
    assert (model.window_of(0), model.window_of(1), model.has_sinks) == (128, None, True)


def test_a_llama_of_megatron_core_in_fp8_is_the_run_it_is():
    command = parse(CORE["train_llama3_8b_h100_fp8.sh"][1])
    config = resolve(command)
    assert (config.fp8_spares, config.rates_of_ends) == ((0, 0), (5e-4, 4.5e-5))
    (note,) = (note for note in command.notes if "without effect" in note)
    assert "--fp8-amax-history-len, --fp8-amax-compute-algo (in FP8 each row" in note
    assert "--apply-layernorm-1p (norms have no weight decay" in note
    model = transformer_config(config, 128_256)
    assert all(map(model.in_fp8, range(32)))


def test_experts_of_a_script_are_chosen_by_sinkhorns_balance():
    scripts = [words for _, words in OTHERS.values() if "sinkhorn" in words]
    assert len(scripts) == 4
    for words in scripts:
        command = parse(words)
        config = resolve(command)
        assert (config.moe_router_type, config.moe_top_k, config.moe_loss_weight) == (
            "sinkhorn",
            1,
            0.0,
        )
        assert (config.moe_router_score_function, config.moe_renormalize) == ("sigmoid", False)
        assert transformer_config(config, 50_304).router == "sinkhorn"


def test_experts_in_parts_are_shared_by_as_many_ranks():
    command = parse(OTHERS["gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph"][1])
    config = resolve(command)
    assert config.expert_parallel_size(8) == 4
    assert (config.moe_balance_over, config.moe_loss_weight) == ("global_batch", 0.0)
    assert any(
        note.startswith("--expert-tensor-parallel-size 2: as many") for note in command.notes
    )


def test_a_pipeline_of_so_many_chunks_has_them():
    words = OTHERS["gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph"][1]
    config = resolve(parse(words))
    assert config.num_layers_per_virtual_pipeline_stage == 2  # 16 layers, 2 ranks, 4 chunks each
    assert list(map(len, stage_layers(config, 16, 2))) == [2] * 8


def test_amds_deepseek_has_the_shared_experts_of_their_width():
    config = resolve(parse(OTHERS["train_deepseekv3.sh"][1]))
    assert (config.moe_shared_expert_intermediate_size, config.moe_top_k) == (2816, 6)
    assert (config.moe_renormalize, config.tokenizer_type) == (False, "HuggingFaceTokenizer")
    # Its groups are as many as expert-parallel ranks, and a token chooses among all of them.
    assert config.moe_arguments()["num_expert_groups"] is None
    assert transformer_config(config, 129_280).moe is not None


def test_ranks_of_megatron_core_share_sequences():
    config = resolve(parse(CORE["gpt3_mcore_te_mfsdp_v2_cp2"][1]))
    assert (config.context_parallel_size, config.zero_stage, config.batch_size(4)) == (2, 3, 32)
    assert (config.data_parallel_size(8), config.expert_parallel_size(8)) == (4, 1)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("words", ONE_BY_ONE, ids=lambda words: " ".join(words[:2]))
def test_every_flag_of_the_fork_and_of_megatron_core_is_accepted(words):
    command = parse(words)
    assert bool(command.values) != bool(command.notes)


@pytest.mark.parametrize("name", MEGABLOCKS)
def test_the_recipes_are_the_scripts(name):
    kind, size = Path(name).stem.split("_")[:2]
    alone = name.endswith("1gpu.sh")
    named = f"{kind.replace('gpt2', 'dense')}-{size}" + ("-1gpu" if alone else "")
    script = resolve(parse(MEGABLOCKS[name]))
    ours = TrainConfig(**recipe(named))
    # The recipes compute in bf16, compile, and know no path.
    apart = {
        "fp16",
        "bf16",
        "compile",
        "data_path",
        "vocab_file",
        "merge_file",
        "save",
        "optimizer",
    }
    apart |= {"lr_decay_iters", "moe_expert_model_parallelism", "moe_capacity_factor"}
    # Nor have they MegaBlocks' bias on the experts' output: their dated results are without.
    apart.add("moe_output_bias")
    assert script.moe_output_bias == (script.moe_num_experts is not None)
    for f in fields(TrainConfig):
        if f.name not in apart:
            here, there = getattr(ours, f.name), getattr(script, f.name)
            close = isinstance(here, float) and math.isclose(here, there, rel_tol=1e-9)
            assert close or here == there, f.name
    assert ours.decay_length == script.decay_length


def test_a_script_of_deepseek_v3_predicts_further_tokens():
    """The modules' experts are weighed as those of the other layers."""
    _, words = CORE["DeepSeek-V3.yaml"]
    plain = resolve(parse(words))
    config = resolve(parse([*words, "--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.3"]))
    assert (plain.mtp_num_layers, plain.mtp_loss_scaling_factor) == (0, 0.1)
    assert (config.mtp_num_layers, config.mtp_loss_scaling_factor) == (1, 0.3)
    assert (plain.moe_loss_weight, config.moe_loss_weight) == pytest.approx((58e-4, 59e-4))


def test_vocabulary_and_merges_make_the_tokenizer_together(tmp_path):
    gpt2 = mb_data.load_tokenizer("gpt2")
    vocab, merges = write_gpt2(tmp_path)
    words = MEGABLOCKS["dmoe/dmoe_125m_8gpu.sh"]
    words = [{"/mount/gpt2-vocab.json": vocab, "/mount/gpt2-merges.txt": merges}.get(w, w)
             for w in words]  # fmt: skip
    tokenizer = load_tokenizer(resolve(parse(words)))
    text = "Vocabulary and merges, café <|endoftext|>"
    assert tokenizer.encode(text) == gpt2.encode(text)
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, gpt2.eod)
    with pytest.raises(OSError, match="no such file"):
        load_tokenizer(resolve(parse(MEGABLOCKS["dmoe/dmoe_125m_8gpu.sh"])))
    with pytest.raises(ValueError, match="needs both --vocab-file and --merge-file"):
        load_tokenizer(resolve(parse(["--vocab-file", vocab])))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Where each path that a script names is, tiny: GPT-2's vocabulary, tokens, sentences."""
    folder = tmp_path_factory.mktemp("files")
    vocab, merges = write_gpt2(folder)
    with mb_data.IndexedDatasetBuilder(folder / "text", np.uint16) as builder:
        for n in range(20):
            builder.add_document(np.random.default_rng(n).integers(0, 50_000, 64))
    lines = [
        {"text": " ".join(f"Number {i} of {n} is here and now." for i in range(8)), "title": f"{n}"}
        for n in range(40)
    ]
    (folder / "s.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = {"tokenizer": mb_data.load_tokenizer("bert-base-uncased"), "workers": 1}
    mb_data.preprocess(folder / "s.jsonl", folder / "s", json_keys=("title",), **common)
    mb_data.preprocess(folder / "s.jsonl", folder / "s", split_sentences=True, **common)
    packed = resources.files("mb_data") / "vocabularies" / "bert_base_uncased_vocab.txt.gz"
    (folder / "bert-vocab.txt").write_bytes(gzip.decompress(packed.read_bytes()))
    return {
        "/mount/gpt2-vocab.json": vocab,
        "/mount/gpt2-merges.txt": merges,
        "bert-vocab.txt": str(folder / "bert-vocab.txt"),
        "text": str(folder / "text"),
        "wiki_text_sentence": str(folder / "s_text_sentence"),
        "titles": str(folder / "s_title_document"),
    }


# One of each family, with what makes it tiny.
_GPT_SIZES = "--data-path 1.0 text 2.0 text --split 80,20,0 --seq-length 16"
_GPT_SIZES += " --max-position-embeddings 16"
_BERT_SIZES = "--seq-length 64 --max-position-embeddings 64"
_LATENT_SIZES = """--seq-length 16 --max-position-embeddings 16 --num-experts 8
    --ffn-hidden-size 16 --moe-ffn-hidden-size 16 --moe-layer-freq 1 --q-lora-rank 16
    --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8
    --moe-shared-expert-intermediate-size 16 --expert-model-parallel-size 1"""
FAMILIES = {
    "gpt2/gpt2_125m_8gpu.sh": _GPT_SIZES,
    "moe/moe_125m_8gpu.sh": f"{_GPT_SIZES} --moe-num-experts 2",
    "dmoe/dmoe_125m_8gpu.sh": f"{_GPT_SIZES} --moe-num-experts 2",
    "pretrain_bert.sh": _BERT_SIZES,
    "pretrain_t5.sh": "--kv-channels 16 --ffn-hidden-size 32 --decoder-seq-length 32 "
    + _BERT_SIZES.replace("--seq", "--encoder-seq"),
    "pretrain_ict.sh": _BERT_SIZES,
    "train_qwen3.sh": "--seq-length 16 --max-position-embeddings 16 --num-experts 8 "
    "--tokenizer-type NullTokenizer --vocab-size 500 --ffn-hidden-size 16 --kv-channels 16 "
    "--moe-ffn-hidden-size 16 --num-query-groups 1 --expert-model-parallel-size 1",
    "train_deepseekv3.sh": f"{_LATENT_SIZES} --tokenizer-type NullTokenizer --vocab-size 500",
    "gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph": f"{_LATENT_SIZES} "
    "--tensor-model-parallel-size 1 --no-sequence-parallel --pipeline-model-parallel-size 1 "
    "--make-vocab-size-divisible-by 64",
    "gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_groupedGEMM": "--num-experts 4 "
    "--tensor-model-parallel-size 1 --no-sequence-parallel --expert-model-parallel-size 1 "
    "--seq-length 16 --max-position-embeddings 16",
    "train_t5_220m_distributed.sh": "--decoder-num-layers 1 --kv-channels 16 --ffn-hidden-size 32 "
    "--encoder-seq-length 64 --decoder-seq-length 32 --max-position-embeddings 64",
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_script_trains(tmp_path, files, name, capsys):
    model, words = (EXAMPLES | CORE | OTHERS).get(name) or ("gpt", MEGABLOCKS[name])
    out = tmp_path / "out"
    if name in MEGABLOCKS:  # its own data is 29 files
        start, end = words.index("--data-path"), words.index("--vocab-file")
        words = words[:start] + words[end:]
    for apart in (
        "--bert-load", "--tensorboard-dir", "--tokenizer-model", "--data-cache-path",
        "--num-virtual-stages-per-pipeline-rank", "--fp8-format",
    ):  # fmt: skip
        if apart in words:
            start = words.index(apart)
            words = words[:start] + words[start + 2 :]
    small = f"""{FAMILIES[name]} --model {model} --device cpu --num-layers 1 --hidden-size 16
        --num-attention-heads 1 --micro-batch-size 2 --global-batch-size 4 --train-iters 2
        --lr-decay-iters 2 --lr-warmup-iters 0 --eval-iters 1 --log-interval 1 --save {out}"""
    paths = files | {"checkpoints": str(out)}
    assert main([paths.get(word, word) for word in [*words, *small.split()]]) == 0
    said = capsys.readouterr().out
    if name.startswith("dmoe"):
        assert " > padded vocab (size: 50257) with 943 dummy tokens (new size: 51200)" in said
    assert " iteration        2/       2 | consumed samples:            8 | " in said
    assert (out / "iter_0000002" / "run.json").is_file()


def write_gpt2(folder):
    """GPT-2's two files as they were published, from the merges that mb_data ships."""
    packed = resources.files("mb_data") / "vocabularies" / "gpt2_merges.txt.gz"
    merges = gzip.decompress(packed.read_bytes()).decode()
    joined = [line.replace(" ", "") for line in merges.splitlines() if "#version" not in line]
    entries = [*byte_to_letter().values(), *filter(None, joined), "<|endoftext|>"]
    vocab_file, merge_file = folder / "gpt2-vocab.json", folder / "gpt2-merges.txt"
    vocab_file.write_text(json.dumps({entry: i for i, entry in enumerate(entries)}))
    merge_file.write_text(merges)
    return str(vocab_file), str(merge_file)


def test_each_model_has_its_tokenizer():
    run = {
        "num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8,
        "micro_batch_size": 1, "train_iters": 1, "lr": 1.0,
    }  # fmt: skip
    assert load_tokenizer(TrainConfig(**run)).name == "gpt2"
    bert = load_tokenizer(TrainConfig(**run, model="bert", vocab_extra_ids=3))
    assert (bert.name, len(bert.extra_ids)) == ("bert-base-uncased", 3)
    assert load_tokenizer(TrainConfig(**run, tokenizer="null:7")).name == "null:7"
    megatrons = TrainConfig(**run, tokenizer_type="NullTokenizer", vocab_size=7)
    assert load_tokenizer(megatrons).name == "null:7"
    with pytest.raises(ValueError, match="TikTokenizer needs --tiktoken-pattern, v1 or v2"):
        load_tokenizer(TrainConfig(**run, tokenizer_type="TikTokenizer", tokenizer_model="x"))


def test_the_table_in_the_docs_names_every_script():
    page = Path(mb_train.__file__).parents[2] / "docs" / "scripts.md"
    text = page.read_text()
    for name in (*MEGABLOCKS, *EXAMPLES, *CORE, *OTHERS):
        assert f"`{Path(name).name}`" in text, name


def test_nemotrons_script_is_its_recipe():
    """What of NVIDIA's script for Nemotron 3 Nano says something of the model and its experts."""
    words = """--moe-router-score-function sigmoid --moe-grouped-gemm --num-experts 128
        --moe-router-topk 6 --moe-aux-loss-coeff 1e-4 --moe-router-topk-scaling-factor 2.5
        --moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-router-load-balancing-type
        seq_aux_loss --moe-shared-expert-intermediate-size 3712 --squared-relu
        --hybrid-layer-pattern MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME
        --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec
        --hidden-size 2688 --num-attention-heads 32 --group-query-attention --num-query-groups 2
        --mamba-num-heads 64 --untie-embeddings-and-output-weights --init-method-std 0.0173
        --position-embedding-type none --ffn-hidden-size 1856 --kv-channels 128 --seq-length 8192
        --max-position-embeddings 8192 --train-iters 1 --micro-batch-size 1 --lr 1.2e-3
        --attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear --normalization RMSNorm
        --use-mcore-models --use-transformer-engine-op-fuser"""
    found = transformer_config(resolve(parse(words.split())), 131_072)
    assert found == transformer_config(TrainConfig(**recipe("nemotron-3-nano-30b-a3b")), 131_072)


def test_megatrons_mamba_script_is_the_model_it_was():
    """Its shares of layers make the pattern that NVIDIA published of the hybrid model of 8B."""
    words = """--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 1
        --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce
        --untie-embeddings-and-output-weights --init-method-std 0.02
        --position-embedding-type none --num-layers 56 --hidden-size 4096
        --num-attention-heads 32 --group-query-attention --num-query-groups 8
        --hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5 --seq-length 4096
        --max-position-embeddings 4096 --train-samples 73242188 --lr-warmup-samples 50000
        --lr-decay-samples 73192188 --save checkpoints --load checkpoints --data-path text
        --data-cache-path cache --split 99,1,0 --tokenizer-type GPTSentencePieceTokenizer
        --tokenizer-model model --distributed-backend nccl --micro-batch-size 4
        --global-batch-size 8 --lr 2.5e-4 --min-lr 2.5e-5 --lr-decay-style cosine
        --weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
        --disable-bias-linear --normalization RMSNorm --adam-beta1 0.9 --adam-beta2 0.95
        --log-interval 10 --save-interval 2000 --eval-interval 2000 --eval-iters 32 --bf16
        --use-mcore-models --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec
        --no-create-attention-mask-in-dataloader --tensorboard-dir boards"""
    model = transformer_config(resolve(parse(words.split())), 256_000)
    assert model.pattern == "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"
    assert model.mamba == MambaSizes(heads=128, width=64, groups=8, state=128, taps=4)
    assert (model.activation, model.positions) == ("gelu", "none")
