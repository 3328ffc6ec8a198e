"""Attention to tokens that an indexer chooses: read for texts of which it chooses all.

DeepSeek-V3.2 and GLM-5 choose `index_topk` tokens, MiniMax-M3 `index_topk_blocks` blocks of them.
"""

from __future__ import annotations

from mb_train.convert.hugging_face.config_json import Json

# Its tensors, which are left out, and why.
INDEXER = {
    r"model\.layers\.\d+\.self_attn\.index(er\.|_[qk]_).*": (
        "it chooses which tokens are seen of longer texts, ours see all"
    )
}
SPARSE = "minimax_m3_sparse"
_LEGACY = "sparse_attention_config"


def chosen(config: Json) -> int | None:
    """How many tokens are chosen; None where a token sees all."""
    if "index_topk" in config:
        return config["index_topk"]
    said, kinds = config.get(_LEGACY) or {}, config.get("layer_types")
    if kinds is None:
        kinds = [SPARSE for sparse in said.get("sparse_attention_freq", ()) if sparse]
    if SPARSE not in kinds:
        return None
    blocks = said.get("sparse_topk_blocks", config["index_topk_blocks"])
    return blocks * said.get("sparse_block_size", config["index_block_size"])


def seen_whole(config: Json) -> int:
    """How long a text of this model may be that each token sees whole."""
    positions, seen = config["max_position_embeddings"], chosen(config)
    return positions if seen is None else min(positions, seen)
