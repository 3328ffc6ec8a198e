"""What a task makes of samples."""

from functools import partial
from types import SimpleNamespace

import mb_data
import numpy as np
import pytest
import torch
from mb_parallel import ParallelDims
from mb_parallel.pipeline_parallel import split_layers
from mb_train.config import TrainConfig
from mb_train.models.transformer import DenseMLP
from mb_train.tasks import GPTTask
from mb_train.tasks.bert import BertTask
from mb_train.tasks.bm25 import BM25, rank_of, recall
from mb_train.tasks.collate import batches_of, kept_places, segment_ends
from mb_train.tasks.gpt import fill_in_the_middle
from mb_train.tasks.ict import titles_beside
from mb_train.tasks.make import leaves_padding_out, one_process_task, whole_model

EOD = 9
SAMPLES = [[1, 2, EOD, 3, 4, EOD, EOD, 5], [EOD, 1, 2, 3, 4, 5, 6, EOD]]


def gpt(*, mesh=None, **change) -> GPTTask:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 7}
    run = {"micro_batch_size": 2, "train_iters": 1, "lr": 1.0}
    return GPTTask(TrainConfig(**{**sizes, **run, **change}), vocab_size=16, eod=EOD, mesh=mesh)


def test_a_retriever_is_made_of_what_was_asked_for(monkeypatch):
    config = TrainConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=7, micro_batch_size=2,
        train_iters=1, lr=1.0, model="ict", query_in_block_prob=0.3, use_one_sent_docs=True,
        titles_data_path="titles", retriever_score_scaling=True, split="8,1,1",
    )  # fmt: skip
    task = one_process_task(config, SimpleNamespace(cls=1, sep=2, pad=0), vocab_size=16)
    monkeypatch.setattr(mb_data, "build_ict_datasets", lambda prefix, **how: {"": prefix, **how})
    found = task.build_datasets(["a"], (1, 2, None))
    expected = {"": "a", "titles_prefix": "titles", "query_in_block_prob": 0.3, "seq_length": 7}
    expected |= {"use_one_sent_docs": True, "num_samples": (1, 2, None), "split": "8,1,1"}
    assert found | expected == found
    for several in (["a", "b"], {"train": ["a"]}):
        with pytest.raises(ValueError, match="one --data-path for --model ict, got several"):
            task.build_datasets(several, (1, 2, None))
    assert task.build_model(compute_dtype=torch.float32).scale == 1 / 4


def test_labels_are_the_next_tokens():
    batch = gpt().collate(SAMPLES)
    assert batch.keys() == {"tokens_BS", "labels_BS", "weights_BS"}
    assert batch["tokens_BS"].tolist() == [row[:-1] for row in SAMPLES]
    assert batch["labels_BS"].tolist() == [row[1:] for row in SAMPLES]
    assert batch["weights_BS"].dtype == np.float32
    assert batch["weights_BS"].all()


def test_ranks_that_share_sequences_have_successive_parts_of_what_is_of_tokens():
    """Documents are the whole sequences', since attention sees these."""
    options = {"reset_attention_mask": True, "eod_mask_loss": True, "seq_length": 6}
    for change in (options, options | {"reset_position_ids": True}):
        samples = [sample[:7] for sample in SAMPLES]
        whole, parts = gpt(**change).collate(samples), []
        for rank in range(3):
            task = gpt(**change, mesh=SimpleNamespace(cp_rank=rank, cp_size=3))
            parts.append(task.collate(samples))
        positions = whole.pop("positions_BS", np.arange(6)[None])
        for name in ("tokens_BS", "labels_BS", "weights_BS"):
            joined = np.concatenate([part.pop(name) for part in parts], axis=1)
            assert joined.tolist() == whole.pop(name).tolist()
        joined = np.concatenate([part.pop("positions_BS") for part in parts], axis=1)
        assert joined.tolist() == positions.tolist()
        assert [part["ends_BN"].tolist() for part in parts] == [whole["ends_BN"].tolist()] * 3
        assert all(part.keys() == whole.keys() == {"ends_BN"} for part in parts)


def test_documents_end_with_their_last_token():
    options = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    batch = gpt(**dict.fromkeys(options, True)).collate(SAMPLES)
    # The end of a document is its last token; a document may be that token alone.
    stages = {"pipeline_model_parallel_size": 2, "num_layers": 2}
    staged = gpt(**dict.fromkeys(options, True), **stages).collate(SAMPLES)
    assert staged["segments_BS"].tolist() == [[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1]]
    assert "ends_BN" not in staged
    assert batch["positions_BS"].tolist() == [[0, 1, 2, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert batch["ends_BN"].tolist() == [[3, 6, 7, 7], [1, 7, 7, 7]]
    assert batch["weights_BS"].tolist() == [[1, 1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1]]


def test_flags_choose_how_documents_become_samples(tmp_path):
    with mb_data.IndexedDatasetBuilder(tmp_path / "text", np.uint16) as builder:
        for size in range(1, 12):
            builder.add_document([*range(1, size), EOD])
    paths, wanted = [str(tmp_path / "text")], (9, 3, 2)
    marks = mb_data.MiddleTokens(12, 13, 14)
    how = {"split": "6,3,2", "seq_length": 7, "num_samples": wanted, "seed": 1234}
    how["split_rounding"] = "cumulative"
    flags = {"split": "6,3,2", "split_rounding": "cumulative"}
    fim = {"fim_data": True, "fim_rate": 0.75, "fim_spm_rate": 0.25}
    for packing, build, more in (
        ("end_to_end", mb_data.build_gpt_datasets, {}),
        ("best_fit", mb_data.build_packed_datasets, {"eod": EOD}),
    ):
        config = gpt(**flags, **fim, document_packing=packing)._config
        rates = {"rate": 0.75, "suffix_first_rate": 0.25}
        fill = partial(mb_data.FillInTheMiddle, marks=marks, eod=EOD, seed=1234, **rates)
        task = GPTTask(config, vocab_size=16, eod=EOD, rearranged=fill)
        got = task.build_datasets(paths, wanted)
        plain = gpt(**flags, document_packing=packing).build_datasets(paths, wanted)
        for one, bare, inner in zip(got, plain, build(paths, **how, **more), strict=True):
            for dataset, samples in ((one, fill(inner)), (bare, inner)):
                assert len(dataset) == len(samples)
                assert all(np.array_equal(dataset[i], samples[i]) for i in range(len(samples)))
            assert any(marks.middle in one[i] for i in range(len(one)))


def test_flags_choose_how_the_middle_is_filled_in():
    tokenizer = mb_data.load_tokenizer("gpt2", num_extra_ids=4)
    marks = {f"fim_{part}_token": f"<extra_id_{i}>" for i, part in enumerate(("prefix", "middle"))}
    flags = {"fim_data": True, "fim_suffix_token": "<extra_id_2>", "fim_rate": 0.75, **marks}
    plain = fill_in_the_middle(gpt(**flags)._config, tokenizer)([])
    assert plain.marks == tokenizer.extra_ids[:3]
    assert (plain.rate, plain.suffix_first_rate, plain.eod) == (0.75, 0.5, tokenizer.eod)
    assert (plain.fragment_end, plain.leave) == (None, None)
    flags |= {"fim_split_sample": "<extra_id_3>", "fim_fragment_rate": 0.25}
    files = fill_in_the_middle(gpt(**flags, fim_no_prefix="#!/bin")._config, tokenizer)([])
    assert (files.fragment_end, files.fragment_rate) == (tokenizer.extra_ids[3], 0.25)
    for text, left in (("#!/bin/sh\n", True), ("#!/usr", False), ("#!", False), ("", False)):
        assert files.leave(np.array(tokenizer.encode(text), dtype=np.int64)) == left
    with pytest.raises(ValueError, match="--fim-split-sample to be a special token of gpt2"):
        fill_in_the_middle(gpt(**flags | {"fim_split_sample": "</s>"})._config, tokenizer)


def test_what_fills_a_packed_sample_up_has_no_weight():
    batch = gpt(document_packing="best_fit").collate([[1, 2, EOD, 3, EOD, EOD, EOD, EOD]])
    assert batch["weights_BS"].tolist() == [[1, 1, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize("flags", [{"fim_data": True}, {"document_packing": "best_fit"}], ids=str)
def test_sentences_are_not_packed(flags):
    with pytest.raises(ValueError, match="Expected --model gpt with --"):
        gpt(model="bert", **flags)


def test_a_berts_head_is_tied():
    with pytest.raises(ValueError, match="gpt or t5 with --untie-embeddings-and-output-weights"):
        gpt(model="bert", untie_embeddings_and_output_weights=True)


@pytest.mark.parametrize("side", ["seq_length", "decoder_seq_length"])
def test_ranks_that_share_sequences_divide_them(side):
    flags = {"model": "t5", "seq_length": 12, "decoder_seq_length": 9}
    flags |= {"tensor_model_parallel_size": 3, "sequence_parallel": True}
    flags |= {"num_attention_heads": 3, "kv_channels": 8, "ffn_hidden_size": 24}
    assert gpt(**flags)
    with pytest.raises(ValueError, match=f"Expected --{side.replace('_', '-')} to be a multiple"):
        gpt(**flags | {side: 10})


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, ("learned", "layernorm", 2, True)),
        (
            {
                "position_embedding_type": "rope",
                "normalization": "RMSNorm",
                "group_query_attention": True,
                "untie_embeddings_and_output_weights": True,
            },
            ("rope", "rmsnorm", 1, False),
        ),
    ],
    ids=["gpt2", "llama"],
)
def test_flags_reach_the_model(flags, found):
    config = gpt(**flags).model_config
    assert (config.positions, config.norm, config.num_kv_heads, config.tie_embeddings) == found


def test_layers_with_experts_by_their_flags():
    experts = {"moe_num_experts": 4, "moe_layer_freq": 2, "moe_first_k_dense": 1}
    config = gpt(num_layers=5, **experts, moe_ffn_hidden_size=24).model_config
    assert [config.has_experts(layer) for layer in range(5)] == [False, False, True, False, True]
    assert (config.moe.ffn_hidden_size, config.ffn_size) == (24, 64)


def test_both_sides_of_a_t5_have_experts_by_their_flags():
    sizes = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    run = {"micro_batch_size": 2, "train_iters": 1, "lr": 1.0, "model": "t5"}
    more = {"decoder_num_layers": 4, "decoder_seq_length": 8, "moe_num_experts": 2}
    model = whole_model(TrainConfig(**sizes, **run, **more, moe_layer_freq=2), vocab_size=32)
    for stack, expected in (
        (model.encoder, [True, False, True]), (model.decoder, [True, False, True, False]),
    ):  # fmt: skip
        found = [not isinstance(block.mlp, DenseMLP) for block in stack.blocks.values()]
        assert found == expected
        assert stack.num_moe_layers == 2


def test_streams_are_divided_where_one_of_them_is():
    whole, padded = (np.array([[8]]), 8), (np.array([[3]]), 5)
    found = [ends_BN.tolist() for ends_BN in segment_ends(whole, padded)]
    assert found == [[[8, 8]], [[3, 5]]]
    assert [ends_BN.tolist() for ends_BN in segment_ends(whole, whole)] == [[[8]], [[8]]]


def test_samples_are_evaluated_a_few_at_a_time():
    task = SimpleNamespace(collate=lambda chunk: {"n": np.array(chunk)[::-1]})
    found = list(batches_of(task, list(range(70)), torch.nn.Linear(1, 1)))
    assert [len(chunk) for chunk, _ in found] == [32, 32, 6]
    assert [n for chunk, _ in found for n in chunk] == list(range(70))
    assert all(batch["n"].tolist() == chunk[::-1] for chunk, batch in found)


def test_blocks_are_shown_what_is_not_padding():
    """And padding up to one of a few sizes; nothing is said where that is all."""
    valid_BS = np.arange(256) < np.array([[100], [0], [256], [7]])
    (kept_T,) = kept_places(kept_T=valid_BS).values()
    real = np.flatnonzero(valid_BS)
    assert len(real) == 363
    assert len(kept_T) == 384
    assert (np.diff(kept_T) > 0).all()
    assert np.isin(real, kept_T).all()
    sizes = {len(kept_places(kept_T=np.arange(4096)[None] < n)["kept_T"]) for n in range(1, 3968)}
    assert sizes == set(range(128, 4096, 128))
    assert kept_places(kept_T=np.arange(4096)[None] < 3969, other=np.ones((1, 8))) == {}


@pytest.mark.parametrize(
    ("dims", "change", "leaves_out"),
    [
        ({}, {}, True),
        ({"dp_shard": 2, "tp": 2}, {}, True),
        ({"pp": 2}, {}, False),
        ({"dp_shard": 2, "ep": 2}, {}, False),
        ({}, {"moe_balance_over": "sequence"}, False),
        ({"tp": 3}, {}, True),
        ({"tp": 3}, {"sequence_parallel": True}, False),
    ],
)
def test_padding_is_left_out_where_no_other_counts_on_the_shape(dims, change, leaves_out):
    run = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 7}
    run |= {"micro_batch_size": 2, "train_iters": 1, "lr": 1.0, "moe_num_experts": 4}
    config = TrainConfig(**run, model="bert", **change)
    assert leaves_padding_out(config, ParallelDims(**dims)) == leaves_out


@pytest.mark.parametrize("positions", ["learned", "rope", "relative"])
@pytest.mark.parametrize("kind", ["gpt", "bert", "t5", "classifier"])
def test_what_two_stages_have_is_to_stay_equal(kind, positions):
    if kind == "gpt" and positions == "relative":
        return
    sizes = {
        "num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8,
        "micro_batch_size": 2, "train_iters": 1, "lr": 1.0, "model": kind,
        "position_embedding_type": positions,
        **({"decoder_seq_length": 5} if kind == "t5" else {}),
        **({"task": "qqp", "train_data_path": ["x"]} if kind == "classifier" else {}),
    }  # fmt: skip
    for untied in (False, True) if kind in ("gpt", "t5") else (False,):
        for change in ({}, {"post_layernorm": True}, {"normalization": "RMSNorm"}):
            how = {"untie_embeddings_and_output_weights": untied, **change}
            task = one_process_task(TrainConfig(**sizes, **how), None, vocab_size=32)
            for stages in (2, 3):
                runs, found = split_layers(task.workload.layers, stages), {}
                for stage, layers in enumerate(runs):
                    part = task.build_model(compute_dtype=torch.float32)
                    part.keep(layers, first=stage == 0, last=stage == stages - 1)
                    for name, _ in part.named_parameters():
                        found.setdefault(name, []).append(stage)
                shared = {name: where for name, where in found.items() if len(where) > 1}
                tied = {}
                for name, copies in task.borders(runs).tied.items():
                    others = (-1,) if isinstance(copies, str) else copies
                    tied[name] = [0, *(stage % stages for stage in others)]
                assert tied == shared


def test_a_bert_takes_the_places_to_restore_first():
    sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    run = {"micro_batch_size": 2, "train_iters": 1, "lr": 1.0, "model": "bert", "mask_prob": 0.3}
    task = BertTask(TrainConfig(**sizes, **run), None, vocab_size=10)
    labels = [[-1, 7, -1, -1, 9, -1, -1, -1], [-1] * 8]
    sample = {"text": np.arange(8), "types": np.zeros(8), "padding_mask": np.ones(8)}
    sample["is_random"] = 1
    batch = task.collate([sample | {"labels": np.array(row)} for row in labels])
    assert batch["ends_BN"].tolist() == [[8], [8]]
    assert batch["masked_BM"].shape == (2, 3)
    assert batch["masked_BM"][0, :2].tolist() == [1, 4]
    assert batch["labels_BM"].tolist()[0][:2] == [7, 9]
    assert batch["weights_BM"].tolist() == [[1, 1, 0], [0, 0, 0]]
    assert ((batch["labels_BM"] >= 0) == batch["weights_BM"]).all()


def test_titles_are_found_however_they_were_made(tmp_path):
    text = str(tmp_path / "x_text_sentence")
    assert titles_beside(text) is None
    for level in ("sentence", "document"):  # which comes before
        (tmp_path / f"x_title_{level}.idx").touch()
        assert titles_beside(text) == str(tmp_path / f"x_title_{level}")


def test_bm25_ranks_by_rare_words_and_short_texts():
    texts = [[1, 2, 3], [1, 1, 4, 5, 6, 7, 8], [1, 9], [4, 2]]
    scores = BM25(texts).scores([4])
    assert scores[3] > scores[1] > scores[0] == scores[2] == 0
    # By hand: 1 is in three of four texts, whose mean length is 3.5.
    weight = torch.log1p(torch.tensor((4 - 3 + 0.5) / 3.5)).item()
    norm = 1.2 * (0.25 + 0.75 * 2 / 3.5)
    assert BM25(texts).scores([1])[2] == pytest.approx(weight * 2.2 / (1 + norm))
    both = BM25(texts).scores([4, 1, 77])  # one is in no text
    assert both == pytest.approx(scores + BM25(texts).scores([1]))
    assert rank_of(scores, 3) == 0
    assert rank_of(scores, 0) == 3  # a tie is no find
    assert rank_of(np.full(4, np.nan), 0) == 3  # nor is what a diverged model computes
    assert recall([0, 4, 5, 9], 5) == 0.5
