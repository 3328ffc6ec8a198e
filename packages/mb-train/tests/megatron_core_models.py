"""Models as Megatron Core would hold them: arguments, and each rank's share of our weights."""

import argparse
import io

import torch
from mb_train.config import TrainConfig
from mb_train.convert import is_megatron, read_megatron
from mb_train.models.gpt import GPT
from mb_train.tasks.architecture import transformer_config

LAYERS, HIDDEN, VOCAB, EXPERTS = 4, 32, 96, 4
LLAMA = {
    "group_query_attention": True, "num_query_groups": 2, "swiglu": True, "kv_channels": 12,
    "position_embedding_type": "rope", "rotary_base": 500.0, "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True, "add_bias_linear": False, "qk_layernorm": True,
}  # fmt: skip
# Widths by which no map of it is square.
LATENT = {
    **{name: value for name, value in LLAMA.items() if name not in
       ("group_query_attention", "num_query_groups", "kv_channels")},
    "multi_latent_attention": True, "kv_lora_rank": 20, "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8, "v_head_dim": 10, "rotary_scaling_factor": 4.0, "mscale": 0.7,
    "mscale_all_dim": 0.9,
}  # fmt: skip
# As it is here, and the arguments that say so there.
MIXTURE = {
    "moe_num_experts": EXPERTS, "moe_top_k": 2, "moe_renormalize": True, "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True,
    "moe_first_k_dense": 1, "moe_loss_weight": 0.03, "moe_drop_policy": "probability",
    "moe_capacity_factor": 2.5,
}  # fmt: skip
MIXTURE_ARGS = {
    "num_experts": EXPERTS, "moe_router_topk": 2, "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True, "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01, "moe_router_pre_softmax": False, "moe_token_drop_policy": "probs",
    "moe_expert_capacity_factor": 2.5,
    "moe_router_score_function": "softmax", "moe_z_loss_coeff": None,
}  # fmt: skip
# Experts in every layer, which Megatron can then hold as one tensor.
ALIKE = LLAMA | MIXTURE | {"moe_first_k_dense": 0, "moe_loss_weight": 0.04}
ALIKE_ARGS = LLAMA | MIXTURE_ARGS | {"moe_layer_freq": 1}
SIGMOID = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 2, "moe_router_group_topk": 2,
}  # fmt: skip
# What is ours of it: groups are scored by their best, the loss counts the best of all.
OURS = SIGMOID | {"moe_router_group_score_top": 1, "moe_balance_by": "scores"}
# Experts chosen by Sinkhorn's balance, beside what Core passes over there.
SINKHORN = MIXTURE | {
    "moe_top_k": 1, "moe_renormalize": False, "moe_router_score_function": "sigmoid",
    "moe_router_type": "sinkhorn", "moe_loss_weight": 0.0,
}  # fmt: skip
SINKHORN_ARGS = MIXTURE_ARGS | {
    "moe_router_topk": 1, "moe_router_load_balancing_type": ["sinkhorn"], "moe_aux_loss_coeff": 0.0,
    "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 2,
}  # fmt: skip
# Weights on the experts' input, which goes with dropping the first beyond a capacity alone.
ON_INPUT = MIXTURE | {
    "moe_drop_policy": "position", "moe_capacity_factor": 0.0, "moe_weights_on_input": True
}  # fmt: skip
ON_INPUT_ARGS = MIXTURE_ARGS | {
    "moe_expert_capacity_factor": None, "moe_apply_probs_on_input": True
}  # fmt: skip
# Modules for further tokens, whose losses of experts count among the layers'.
FURTHER = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
# Biases in experts and router, a balancing loss of each sequence, experts in every other layer.
BIASED = {
    "moe_num_experts": EXPERTS, "moe_top_k": 1, "moe_mlp_bias": True, "moe_router_bias": True,
    "moe_layer_freq": 2, "moe_balance_over": "sequence", "moe_loss_weight": 0.04,
    "moe_capacity_factor": 1.5, "moe_z_loss_weight": 0.002,
}  # fmt: skip
BIASED_ARGS = {
    "num_experts": EXPERTS, "moe_router_topk": 1, "moe_router_pre_softmax": True,
    "moe_layer_freq": 2, "moe_router_load_balancing_type": ["seq_aux_loss"],
    "moe_aux_loss_coeff": [0.02], "moe_expert_capacity_factor": 1.5,
    "moe_token_drop_policy": "position", "moe_z_loss_coeff": 0.001,
}  # fmt: skip
GATES = {"attention_output_gate": True, "no_rope_freq": 2}
# GPT-OSS's attention and gate.
SINKS = {
    "window_attn_skip_freq": 2, "softmax_type": "learnable", "swiglu": False,
    "add_bias_linear": True,
}  # fmt: skip
SINKS_ARGS = SINKS | {
    "window_size": (5, 0), "quick_geglu": True, "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
}  # fmt: skip


# In all layers but the last.
STATES = {
    "experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3,
}  # fmt: skip

# A layer of each kind, with other numbers of heads than of groups.
HYBRID = {
    **{name: LLAMA[name] for name in ("group_query_attention", "num_query_groups", "kv_channels",
       "normalization", "untie_embeddings_and_output_weights", "add_bias_linear")},
    "position_embedding_type": "none", "squared_relu": True, "hybrid_layer_pattern": "ME*-",
    "mamba_num_heads": 8, "mamba_head_dim": 6, "mamba_num_groups": 4, "mamba_state_dim": 5,
}  # fmt: skip
# Behind it two modules of some of these.
HYBRID_FURTHER = HYBRID | {
    "mtp_hybrid_override_pattern": "*ME",
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.3,
}
# Experts behind a latent, in its one such layer.
OF_ONE = {"moe_first_k_dense": 0, "moe_loss_weight": 0.01, "moe_latent_size": 20}
OF_ONE_ARGS = {"moe_layer_freq": 1, "moe_latent_size": 20}

LAST = "final_layernorm"


def our_model(**fields):
    config = TrainConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=48,
        seq_length=16, micro_batch_size=1, train_iters=1, lr=1.0, attention_dropout=0.0,
        hidden_dropout=0.0, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT(transformer_config(config, VOCAB)).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn_like(tensor) * 0.3)
    return model


def check_read(folder, model, dtype=torch.float32):
    """What a folder holds is the model, to the last bit of the type that it was written in."""
    assert is_megatron(folder)
    config, weights = read_megatron(folder)
    assert transformer_config(config, VOCAB) == model.config
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor.to(dtype).float()), name


def their_share(state, gated, ranks, sizes, layers, kind, experts_as):
    """What one rank of Megatron Core would hold of our weights, in layers of this range."""
    (t, e), (tp, ep) = ranks, sizes

    def cut(weight, dim=0):
        return weight.chunk(tp, dim=dim)[t]

    def fc1(*halves):  # each rank's own gate over its own up
        return torch.cat([cut(half) for half in halves])

    def neighbours(rows, groups):  # from halves
        rows = rows.unflatten(0, (groups, -1))
        first, second = rows[:, -8:].chunk(2, dim=1)
        turned = torch.stack([first, second], dim=2).flatten(1, 2)
        return torch.cat([rows[:, :-8], turned], dim=1).flatten(0, 1)

    found = {}
    places = [(f"stack.blocks.{n}.", f"decoder.layers.{local}.") for local, n in enumerate(layers)]
    further = {int(name.split(".")[1]) for name in state if name.startswith("mtp.")}
    for number in sorted(further) if LAYERS - 1 in layers else ():
        stack = f"mtp.{number}.stack.blocks."
        halves = {int(n.removeprefix(stack).split(".")[0]) for n in state if n.startswith(stack)}
        if len(halves) == 1:
            places.append((f"{stack}0.", f"mtp.layers.{number}.transformer_layer."))
        else:
            inside = f"mtp.layers.{number}.mtp_model_layer.layers."
            places += [(f"{stack}{half}.", f"{inside}{half}.") for half in sorted(halves)]
        found["embedding.word_embeddings.weight"] = cut(state["embedding.tokens.weight"])
        for part, how in (("enorm", None), ("hnorm", None), ("eh_proj", 0), ("stack.norm", None)):
            weight, theirs = state[f"mtp.{number}.{part}.weight"], part.replace("stack.norm", LAST)
            name = f"mtp.layers.{number}.{theirs}.weight"
            found[name] = weight if how is None else cut(weight)
    for ours, theirs in places:
        here = {n.removeprefix(ours): w for n, w in state.items() if n.startswith(ours)}
        norm_1, norm_2 = "input_layernorm.{}", "pre_mlp_layernorm.{}"
        if kind == "te":  # it fuses a norm with the map behind it, and behind this one is a router
            if "attention.qkv.weight" in here:
                norm_1 = "self_attention.linear_qkv.layer_norm_{}"
            if "attention.qkvz.weight" in here:
                norm_1 = "self_attention.in_proj.layer_norm_{}"
            if "mlp.router.weight" not in here:
                norm_2 = "mlp.linear_fc1.layer_norm_{}"
        layer = {}
        for name in ("weight", "bias"):
            for our, their, how in (
                ("norm_1", norm_1, None), ("norm_2", norm_2, None),
                ("attention.qkv", "self_attention.linear_qkv.{}", 0),
                ("attention.out", "self_attention.linear_proj.{}", 1),
                ("attention.norm_q", "self_attention.q_layernorm.{}", None),
                ("attention.norm_k", "self_attention.k_layernorm.{}", None),
                ("mlp.down", "mlp.linear_fc2.{}", 1),
            ):  # fmt: skip
                if (weight := here.get(f"{our}.{name}")) is not None:
                    of_all = how is None or (how == 1 and name == "bias")
                    layer[their.format(name)] = weight if of_all else cut(weight, how)
            if f"mlp.up.{name}" in here:
                halves = ("gate", "up") if gated else ("up",)
                layer[f"mlp.linear_fc1.{name}"] = fc1(*(here[f"mlp.{h}.{name}"] for h in halves))
        if "attention.qkvz.weight" in here:
            own = with_state(here, cut)
            layer |= {f"self_attention.{name}": weight for name, weight in own.items()}
            del layer["self_attention.linear_proj.weight"]
        if "attention.xz.weight" in here:
            layer |= of_mamba(here, cut, kind)
            for name in ("self_attention.linear_proj.weight", norm_1.format("weight")):
                del layer[name]
        if (sinks := here.get("attention.sinks")) is not None:
            layer["self_attention.core_attention.softmax_offset"] = cut(sinks)
        for our, groups in (("q", 4), ("q_up", 4), ("kv_down", 1)):
            if (weight := here.get(name := f"attention.{our}.weight")) is not None:
                here[name] = neighbours(weight, groups)
        for our, their, split in (
            ("q", "linear_q_proj.", True), ("q_up", "linear_q_up_proj.", True),
            ("kv_up", "linear_kv_up_proj.", True),
            ("q_down", "linear_q_down_proj.", kind == "local"),
            ("kv_down", "linear_kv_down_proj.", kind == "local"),
            ("q_norm", ("q_layernorm.", "linear_q_up_proj.layer_norm_")[kind == "te"], False),
            ("kv_norm", ("kv_layernorm.", "linear_kv_up_proj.layer_norm_")[kind == "te"], False),
        ):  # fmt: skip
            if (weight := here.get(f"attention.{our}.weight")) is not None:
                layer[f"self_attention.{their}weight"] = cut(weight) if split else weight
        if "mlp.router.weight" in here:
            for our, their in (
                ("weight", "weight"), ("bias", "bias"), ("balancing_bias", "expert_bias")
            ):  # fmt: skip
                if f"mlp.router.{our}" in here:
                    layer[f"mlp.router.{their}"] = here[f"mlp.router.{our}"]
            if "mlp.shared_expert.w1" in here:
                w1, w2 = here["mlp.shared_expert.w1"][0], here["mlp.shared_expert.w2"][0]
                layer["mlp.shared_experts.linear_fc1.weight"] = fc1(*w1.chunk(1 + gated))
                layer["mlp.shared_experts.linear_fc2.weight"] = cut(w2, 1)
                layer["mlp.shared_experts.gate_weight"] = here["mlp.shared_expert.gate"]
            for our, their in (("down", "fc1"), ("up", "fc2")):
                if f"mlp.latent_{our}.weight" in here:
                    layer[f"mlp.{their}_latent_proj.weight"] = here[f"mlp.latent_{our}.weight"]
            mine = range(EXPERTS // ep * e, EXPERTS // ep * (e + 1))
            up = [fc1(*here["mlp.experts.w1"][k].chunk(1 + gated)) for k in mine]
            down = [cut(here["mlp.experts.w2"][k], 1) for k in mine]
            if experts_as == "two":
                layer["mlp.experts.weight1"] = torch.stack([w.t() for w in up]).view(
                    up[0].shape[1], -1
                )
                layer["mlp.experts.weight2"] = torch.cat([w.t() for w in down])
            for k in range(len(mine)) if experts_as != "two" else ():
                name = "mlp.experts.local_experts.{k}.linear_{fc}.{kind}"
                if experts_as == "numbered":
                    name = "mlp.experts.linear_{fc}.{kind}{k}"
                layer[name.format(k=k, fc="fc1", kind="weight")] = up[k]
                layer[name.format(k=k, fc="fc2", kind="weight")] = down[k]
                if "mlp.experts.b1" in here:
                    b1, b2 = (here[f"mlp.experts.b{i}"][mine[k]] for i in (1, 2))
                    layer[name.format(k=k, fc="fc1", kind="bias")] = fc1(*b1.chunk(1 + gated))
                    layer[name.format(k=k, fc="fc2", kind="bias")] = b2
        if kind == "te":
            layer["self_attention.core_attention._extra_state"] = io.BytesIO(b"scales")
            layer["self_attention.linear_proj._extra_state"] = None
            layer["self_attention.linear_qkv._extra_state"] = torch.ones(3, dtype=torch.uint8)
        for name, value in layer.items():
            is_tensor = isinstance(value, torch.Tensor)
            found[f"{theirs}{name}"] = value.clone() if is_tensor else value
    if 0 in layers:
        found["embedding.word_embeddings.weight"] = cut(state["embedding.tokens.weight"])
        if "embedding.positions.weight" in state:
            positions = state["embedding.positions.weight"]
            found["embedding.position_embeddings.weight"] = positions
    if LAYERS - 1 in layers:
        for name in ("weight", "bias"):
            if f"stack.norm.{name}" in state:
                halves = any(".xz." in name for name in state)
                last = "final_norm" if halves else LAST
                found[f"decoder.{last}.{name}"] = state[f"stack.norm.{name}"]
        if "head.weight" in state or 0 not in layers:  # tied weights are in the last stage too
            head = state.get("head.weight", state["embedding.tokens.weight"])
            found["output_layer.weight"] = cut(head)
        found["output_layer._extra_state"] = None
    return found


def sizes_of_states():
    return [
        STATES[f"linear_{of}"]
        for of in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    ]


def with_state(here, cut):
    """A rank's tensors of a layer with a state: its heads' rows, kind by kind."""
    G, H, C, V = sizes_of_states()
    R = H // G

    def kinds(name, *rows):
        by_head = here[name].unflatten(0, (G, -1)).split(rows, dim=1)
        return [cut(part.flatten(0, 1)) for part in by_head]

    rows = kinds("attention.qkvz.weight", C, C, R * V, R * V) + kinds("attention.ba.weight", R, R)
    conv = torch.cat(kinds("attention.conv.weight", C, C, R * V))[:, None]
    return {
        "in_proj.weight": torch.cat(rows), "conv1d.weight": conv,
        "A_log": cut(here["attention.gates.A_log"]),
        "dt_bias": cut(here["attention.gates.dt_bias"]),
        "out_norm.weight": here["attention.norm.weight"],
        "out_proj.weight": cut(here["attention.out.weight"], 1),
    }  # fmt: skip


def of_mamba(here, cut, kind):
    """The same of a layer of Mamba-2; convolutions by the names of older and of newer versions."""
    H, P, G, N = sizes_of_mamba()
    z, x, b, c, dt = (f"attention.{name}" for name in ("xz", "xz", "bc", "bc", "dt"))

    def of(name, groups, part, width):
        rows = here[name].unflatten(0, (groups, -1)).split(width, dim=1)
        return cut(rows[part].flatten(0, 1))

    rows = [of(f"{z}.weight", H, 1, P), of(f"{x}.weight", H, 0, P)]
    rows += [of(f"{b}.weight", G, 0, N), of(f"{c}.weight", G, 1, N), cut(here[f"{dt}.weight"])]
    found = {
        "in_proj.weight": torch.cat(rows),
        "norm.weight": cut(here["attention.norm.weight"]),
        "out_proj.weight": cut(here["attention.out.weight"], 1),
        **{name: cut(here[f"attention.gates.{name}"]) for name in ("A_log", "D", "dt_bias")},
    }
    for name in ("weight", "bias"):
        common = [of(f"attention.conv_bc.{name}", G, part, N) for part in range(2)]
        convolution = torch.cat([cut(here[f"attention.conv.{name}"]), *common])
        mark = "." if kind == "te" else "_"
        found[f"conv1d{mark}{name}"] = convolution[:, None] if name == "weight" else convolution
    norm = "mixer.in_proj.layer_norm_weight" if kind == "te" else "norm.weight"
    return {**{f"mixer.{name}": w for name, w in found.items()}, norm: here["norm_1.weight"]}


def sizes_of_mamba():
    return [HYBRID[f"mamba_{of}"] for of in ("num_heads", "head_dim", "num_groups", "state_dim")]


def kind_by_kind(rows, tp, key):
    """What a rank's in_proj or convolution holds, by Megatron's names."""
    if ".mixer." in key:
        H, P, G, N = sizes_of_mamba()
        kinds = {"z": H * P, "x": H * P, "B": G * N, "C": G * N, "dt": H}
        kinds = {kind: kinds[kind] for kind in ("xBC" if "conv1d" in key else kinds)}
        return dict(zip(kinds, rows.split([n // tp for n in kinds.values()]), strict=True))
    G, H, C, V = sizes_of_states()
    counts = {"query": G * C, "key": G * C, "value": H * V, "z": H * V, "beta": H, "alpha": H}
    ends = torch.tensor([count // tp for count in counts.values()]).cumsum(0)
    parts = rows.tensor_split(ends[ends < len(rows)])
    return dict(zip(counts, parts, strict=False))


def arguments(*, tp=1, pp=1, ep=1, chunks=1, **also):
    """What its parser leaves, of what says what a model is."""
    values = {
        "num_layers": LAYERS, "encoder_num_layers": LAYERS, "decoder_num_layers": None,
        "hidden_size": HIDDEN, "num_attention_heads": 4, "kv_channels": 8, "ffn_hidden_size": 48,
        "group_query_attention": False, "num_query_groups": 1, "max_position_embeddings": 16,
        "position_embedding_type": "learned_absolute", "rotary_base": 10000, "swiglu": False,
        "rotary_percent": 1.0, "rotary_interleaved": False, "rotary_seq_len_interpolation_factor":
        None, "use_rope_scaling": False, "rope_scaling_factor": 8.0, "norm_epsilon": 1e-5,
        "normalization": "LayerNorm", "apply_layernorm_1p": False, "squared_relu": False,
        "quick_geglu": False, "bias_gelu_fusion": True, "add_bias_linear": True,
        "add_qkv_bias": False, "qk_layernorm": False, "untie_embeddings_and_output_weights": False,
        "make_vocab_size_divisible_by": 128, "padded_vocab_size": VOCAB, "num_experts": None,
        "moe_router_topk": 2, "moe_layer_freq": 1, "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "aux_loss", "moe_token_drop_policy": "probs",
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "multi_latent_attention": False,
        "mtp_num_layers": None, "kv_lora_rank": 32, "q_lora_rank": None,
        "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rope_type": None,
        "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
        "softmax_type": "vanilla", "spec": None,
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep, "expert_tensor_parallel_size": tp,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "tokenizer_type": "GPT2BPETokenizer", "params_dtype": torch.bfloat16, **also,
    }  # fmt: skip
    return argparse.Namespace(**values)
