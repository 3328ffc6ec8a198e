"""A retriever's towers begin as a trained BERT, or are told why they cannot."""

import pytest
import torch
from mb_train.config import TrainConfig
from mb_train.convert import write_run
from mb_train.convert.from_bert import begin_from_bert
from mb_train.tasks.make import whole_model

S, V = 10, 37


@pytest.mark.parametrize("shared", [False, True])
def test_towers_begin_from_a_bert(tmp_path, shared):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(V - 7))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "seq_length": S}
    run = {"micro_batch_size": 2, "train_iters": 1, "lr": 1.0}
    run |= {"vocab_file": str(tmp_path / "vocab.txt"), "make_vocab_size_divisible_by": V}
    run |= {"moe_num_experts": 4, "moe_top_k": 2, "moe_shared_expert_intermediate_size": 8}
    config = TrainConfig(**sizes, **run, model="bert")
    bert = whole_model(config, vocab_size=V)
    write_run(tmp_path / "bert", config, bert.state_dict(), say=lambda line: None)

    def ict(folder="bert", **change):
        one = {"biencoder_shared_query_context_model": shared, "biencoder_projection_dim": 8}
        config = TrainConfig(**{**sizes, **run, "model": "ict", **one, **change})
        model = whole_model(config, vocab_size=V)
        begin_from_bert(model, str(tmp_path / folder))
        return model

    model = ict()
    for tower in (model.query, model.block):
        for name, tensor in tower.bert.state_dict().items():
            assert torch.equal(tensor, bert.state_dict()[name]), name
    assert (model.query is model.block) == shared
    # The same text lies in the same place, whichever tower reads it.
    tokens_BS = torch.randint(V, (3, S))
    model.eval()
    query_BD, block_BD = (
        tower(tokens_BS, torch.ones_like(tokens_BS))[0] for tower in (model.query, model.block)
    )
    assert torch.equal(query_BD, block_BD)
    for change, says in (
        ({"num_layers": 1}, "--num-layers 1, moe_layers .* got --num-layers 2, moe_layers"),
        ({"moe_num_experts": None}, "--moe-num-experts None in .* got --moe-num-experts 4.$"),
        (
            {"moe_router_type": "sparsemixer"},
            "--moe-router-type sparsemixer in .* got --moe-router-type topk.$",
        ),
        ({"moe_top_k": 1}, "--moe-top-k 1 in .* got --moe-top-k 2"),
        ({"moe_shared_expert_intermediate_size": None}, "--moe-shared-expert-inter.* None .* 8"),
        (
            {"moe_router_bias": True, "seq_length": S + 1},
            f"--max-position-embeddings {S + 1}, --moe-router-bias True in .* {S}, .* False",
        ),
    ):
        with pytest.raises(ValueError, match=rf"this model's .*{says}"):
            ict(**change)
    ict(moe_capacity_factor=2.0, moe_loss_weight=0.5, moe_recompute=True)
    # Rounding is how a run trains, and not what weights are.
    rounded = ict(fp8_format="e4m3", first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)
    blocks = rounded.query.bert.stack.blocks
    assert [blocks[n].attention.out.fp8 for n in "01"] == [False, True]
    assert [blocks[n].mlp.config.fp8 for n in "01"] == [False, True]
    run["position_embedding_type"] = "relative"
    config = TrainConfig(**sizes, **run, model="bert")
    relative = whole_model(config, vocab_size=V).state_dict()
    write_run(tmp_path / "relative", config, relative, say=lambda line: None)
    ict(seq_length=2 * S, folder="relative")
