"""Flags of models drawn at random, for the sweeps over layouts and devices.

A GPT with attention or a state in every layer, or a hybrid's pattern; a BERT, a T5, an ICT or a
classifier; with experts or without. What each function draws goes together, but for pairs of flags
that the configuration refuses by name, which no sweep counts as a defect.
"""

from __future__ import annotations

import random
import re

STATES = (
    "--experimental-attention-variant gated_delta_net --linear-num-key-heads 4 "
    "--linear-num-value-heads 8 --linear-key-head-dim 6 --linear-value-head-dim 5"
)
# In place of all layers: of a model with experts, and of one without.
HYBRIDS = {
    True: ("MEM*", "ME*E", "*MEM", "SE*M", "ESE*"),
    False: ("M-M*", "M*-M", "MM-M", "S-*S"),
}
MAMBA = (
    "--mamba-num-heads 8 --mamba-num-groups 4 --mamba-head-dim 5 --mamba-state-dim 6 "
    "--position-embedding-type none"
)
LATENTS = (
    "--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 6 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 5 --position-embedding-type rope"
)
DECODERS = ("", "", "--decoder-num-layers 2")
# Drawn seldom: which flags have to be there, those that are then added.
SELDOM = (
    ("", "--log-params-norm"),
    ("", "--weight-decay 0.3"),
    ("", "--start-weight-decay 0.1 --end-weight-decay 0.5 --weight-decay-incr-style cosine"),
    ("", "--lr-warmup-iters 2 --lr-warmup-init 1e-3"),
    ("", "--lr-decay-style cosine --lr-decay-iters 3 --min-lr 1e-4"),
    ("", "--lr-decay-style WSD --lr-decay-iters 3 --lr-wsd-decay-iters 2"),
    ("", "--lr-decay-style inverse-square-root --lr-warmup-iters 1"),
    ("", "--init-method-std 0.1"),
    ("", "--layernorm-epsilon 1e-3"),
    ("", "--padded-vocab-size 512"),
    ("(?!.*latent-attention)", "--kv-channels 12"),
    ("", "--attention-scale 0.2"),
    ("", "--split-rounding cumulative"),
    ("(?!.*(--model|norm-placement|mtp|hybrid))", "--post-layernorm"),
    ("(?!.*(--model|norm-placement|mtp|hybrid))", "--apply-residual-connection-post-layernorm"),
    (".*--untie", "--head-bias"),
    (".*--optimizer adam", "--adam-beta1 0.7 --adam-beta2 0.8"),
    (".*--optimizer muon", "--muon-momentum 0.8 --no-muon-nesterov --muon-num-ns-steps 3"),
    (".*--optimizer muon", "--no-muon-split-qkv --muon-extra-scale-factor 1"),
    (".*--optimizer muon", "--muon-coefficient-type quintic"),
    (".*--optimizer muon", "--muon-coefficient-type polar_express --muon-num-ns-steps 6"),
    (".*--use-mup", "--mup-base-head-dim 4 --mup-attn-scale-power 0.5"),
    (".*--mtp-num-layers", "--mtp-loss-scaling-factor 1.5"),
    (".*--first-last-layers-bf16", "--num-layers-at-start-in-bf16 2"),
    (".*--fp16", "--loss-scale-window 1 --hysteresis 1"),
    (".*--qk-layernorm", "--qk-layernorm-epsilon 1e-2"),
    ("(?!.*latent).*type rope", "--rotary-base 500 --rotary-percent 0.5"),
    ("(?!.*latent).*type rope", "--rotary-seq-len-interpolation-factor 3"),
    ("(?!.*latent).*type rope", "--use-rope-scaling --rope-scaling-factor 4"),
    ("(?!.*(latent|rope-scal|rotary-seq)).*type rope", "--rope-type yarn --rotary-scaling-factor 4 "
     "--original-max-position-embeddings 8 --no-yarn-truncate"),
    ("(?!.*no-rope-freq).*type rope", "--rope-layers LIST"),
    ("(?!.*rope-scal).*type rope.*--window", "--rotary-base-local 50"),
    (".*latent-attention", "--rotary-scaling-factor 4 --original-max-position-embeddings 8 "
     "--mscale 0.7 --mscale-all-dim 1.2"),
    ("(?!.*attn-skip).*--window", "--window-layers LIST"),
    (".*--linear-num-key-heads", "--linear-conv-kernel-dim 2"),
    (".*--mamba-num-heads", "--mamba-conv-kernel-dim 2"),
    (".*--moe-num", "--no-moe-router-fp32"),
    ("(?!.*(capacity|mlp-bias|shared-expert|mlp-impl|activation-bits)).*--moe-num",
     "--moe-mlp-impl sparse --moe-ffn-hidden-size 128"),
    ("(?!.*(mlp-impl|activation-bits|moe-recompute)).*--moe-num",
     "--moe-saved-activation-bits 8"),
    ("(?!.*(layer-freq|first-k|hybrid)).*--moe-num", "--moe-layers LIST"),
    ("(?!.*(num-groups|expert-bias|capacity|sigmoid|renorm)).*--moe-top-k 2",
     "--moe-router-type sparsemixer"),
    ("(?!.*(num-groups|expert-bias|router-type|ict)).*--moe-num", "--moe-router-type sinkhorn"),
    (".*--moe-renormalize", "--moe-renormalize-p 2.0"),
    (".*--moe-router-num-groups", "--moe-router-group-score-top 1"),
    (".*--moe-router-enable-expert-bias", "--moe-router-bias-update-rate 0.05"),
    (".*--moe-shared-expert-inter", "--moe-shared-expert-bias"),
    (".*--moe-capacity-factor", "--moe-min-capacity 4"),
    (".*--moe-capacity-factor", "--moe-eval-capacity-factor 1"),
    ("(?!.*(num-groups|expert-bias|router-type|renorm|zero-exp|balance-(by|over))).*bert.*--moe-num",
     "--moe-router-type expert_choice"),
    (".*--model bert", "--no-bert-binary-head"),
    (".*--model (bert|t5)", "--mask-prob 0.4"),
    (".*--model (bert|t5)", "--short-seq-prob 0.5"),
    (".*--model (bert|t5)", "--samples-per-sequence 3"),
    (".*--model t5", "--mean-noise-span-length 2"),
    (".*--model ict", "--biencoder-projection-dim 16"),
    (".*--model ict", "--biencoder-shared-query-context-model"),
    (".*--model ict", "--query-in-block-prob 0.7 --use-one-sent-docs"),
    (".*--model ict", "--retriever-score-scaling"),
)  # fmt: skip


def decoder(rng: random.Random, tp: int) -> list[str]:
    """Flags of a GPT."""
    model = [rng.choice(["", "--untie-embeddings-and-output-weights"])]
    model += [rng.choice(["", "", "", "--document-packing best_fit"])]
    model += attention(rng, tp)
    norms = ["", "", "--norm-placement output", "--norm-placement both", "--norm-placement kept"]
    model += [rng.choice(norms)]
    model += [rng.choice(["", "", "--mtp-num-layers 1", "--mtp-num-layers 2"])]
    numbers = "--embedding-multiplier 4 --residual-multiplier 0.5 --logits-scaling 3"
    model += [rng.choice(["", "", numbers])]
    model += [rng.choice(["", "", STATES, f"{STATES} --linear-attention-freq 2"])]
    return [*model, rng.choice(["", "", "--disable-bias-linear"])]


def hybrid(rng: random.Random, model: list[str]) -> list[str]:
    """A pattern of layers behind those flags of a GPT that it leaves room for."""
    pattern = rng.choice(HYBRIDS["--moe-num-experts" in " ".join(model)])
    without = "linear-|latent|moe-layer|moe-first|mtp-|window|rope|position-embedding"
    kept = [flags for flags in model if not re.search(without, flags)]
    modules = rng.randrange(3) * f"/{''.join(rng.choices(pattern, k=2))}"
    return [*kept, f"--num-layers 4 --hybrid-layer-pattern {pattern}{modules} {MAMBA}"]


def attention(rng: random.Random, tp: int) -> list[str]:
    """Flags of a decoder's attention."""
    norms = ["", "--normalization RMSNorm", "--normalization RMSNorm --qk-layernorm"]
    model = [rng.choice(["", "", "--reset-attention-mask --reset-position-ids"])]
    if rng.random() < 0.2:
        model += [LATENTS, rng.choice(["", "--q-lora-rank 10"])]
        return [*model, rng.choice(norms)]
    model += [rng.choice(["", "", "", "--use-mup --mup-base-hidden-size 8"])]
    norms += ["--qk-layernorm --qk-layernorm-over width", "--scale-head", "--qk-l2-norm"]
    model += [rng.choice(["", "", "", "--clip-qkv 0.2"])]
    model += [rng.choice(norms)]
    fewest = tp if "--qk-layernorm-over width" in model[-1] else 1  # else ranks may share a group
    groups = rng.choice([g for g in (1, 2) if g >= fewest] or [4])
    model += [rng.choice(["", f"--group-query-attention --num-query-groups {groups}"])]
    model += [rng.choice(["", "--position-embedding-type rope", "--position-embedding-type none"])]
    model += [rng.choice(["", "", "--window-size 4", "--window-size 4 --window-attn-skip-freq 2"])]
    model += [rng.choice(["", "", "--attention-output-gate"])]
    model += [rng.choice(["", "", "--no-rope-freq 1", "--no-rope-freq 2"])]
    model += [rng.choice(["", "", "--softmax-type learnable", "--softmax-type off-by-one"])]
    return [*model, rng.choice(["", "", "--add-qkv-bias"])]


def sentences(rng: random.Random, kind: str) -> list[str]:
    """Flags of a BERT, a T5, an ICT or a classifier, with documents of sentences."""
    model = [f"--model {kind} --num-layers 4 --num-attention-heads 4"]
    model += ["--make-vocab-size-divisible-by 64"]  # as many rows for every number of ranks
    if kind == "classifier":
        model += [f"--task {rng.choice(['qqp', 'race'])}"]
    if kind == "t5":
        model += [f"--decoder-seq-length 12 --vocab-extra-ids 8 {rng.choice(DECODERS)}"]
    return [*model, rng.choice(["", "--position-embedding-type relative"])]


def experts(rng: random.Random, ranks: int, same: int, model: list[str], layout: list[str]) -> None:
    """Add flags of a model with experts on `ranks` of a stage, of which `same` share samples."""
    count = rng.choice([2, 4, 8])
    ep = rng.choice([size for size in (1, 2, 4) if ranks % size == 0])
    top_k = rng.choice([k for k in (1, 2, 3) if k <= count])
    layout += [f"--expert-model-parallel-size {ep}"]
    dispatcher = rng.choice(["auto", "all_gather", "all_to_all"])
    layout += [f"--moe-dispatcher {dispatcher}"]
    if dispatcher == "all_to_all":
        layout += [f"--moe-a2a-overlap-degree {rng.choice([1, 1, 2, 3])}"]
    else:
        layout += [f"--moe-row-policy {rng.choice(['worst', 'exact', 'budget'])}"]
        layout += [f"--moe-row-budget {rng.choice([1.0, 1.3, 2.0])}"]
    layout += [rng.choice(["", "", "--moe-recompute"])]
    ict = "--model ict" in " ".join(model)
    weight = 0 if ict else 0.05
    model += [f"--moe-num-experts {count} --moe-top-k {top_k} --moe-loss-weight {weight}"]
    if rng.random() < 0.4:
        # Dropped are the same slots where the ranks that share a capacity share the samples.
        factor = float(count) if same % ep or ict else rng.choice([0.5, 1.0])
        model += [f"--moe-capacity-factor {factor}"]
        model += [f"--moe-drop-policy {rng.choice(['position', 'probability'])}"]
    model += [rng.choice(["", "--moe-balance-over sequence"])]
    for flags in (
        "--moe-shared-expert-intermediate-size 16",
        "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate",
        f"--moe-z-loss-weight {weight / 5}", "--moe-output-bias", "--moe-mlp-bias",
        "--moe-router-bias", "--moe-ffn-hidden-size 20",
        "--moe-router-lr-mult 0.3",
        "--moe-renormalize", "--moe-layer-freq 2", "--moe-first-k-dense 1",
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "--moe-balance-by scores --moe-router-enable-expert-bias",
        "--moe-weights-on-input", "--moe-num-zero-experts 1", "--moe-latent-size 16",
        "--moe-router-topk-scaling-factor 2.0", "--moe-shared-expert-intermediate-size 16 "
        "--moe-shared-expert-weighted-sum",
    ):  # fmt: skip
        if rng.random() < 0.2:
            model += [flags]
    if count >= 4 and rng.random() < 0.2:
        model += [f"--moe-router-num-groups 2 --moe-router-group-topk {2 if top_k > 2 else 1}"]


def seldom(rng: random.Random, model: list[str], layers: int) -> list[str]:
    """Some of the flags that few models have, where they fit this one of so many layers."""
    more: list[str] = []
    for needed, flags in SELDOM:
        chance = 0.1 if needed else 0.15
        if re.match(needed, " ".join([*model, *more])) and rng.random() < chance:
            more += [flags.replace("LIST", " ".join("1011"[:layers]))]
    return more
