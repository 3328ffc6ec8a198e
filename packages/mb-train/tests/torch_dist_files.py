"""A model as Megatron Core's ranks would write it in the format torch_dist, with torch's saver."""

import io
import itertools
import json
import re

import torch
from megatron_core_models import EXPERTS, HIDDEN, LAYERS, arguments, kind_by_kind, their_share
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

# As in its `sharded_state_dict`: norms of local layers have the names of Transformer Engine's, ...
LOCAL = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
OPTIMIZERS = ("optimizer.state.exp_avg.decoder", "chained_1.optimizer.distributed.dp_group_idx_0")
# ... and ranks along axis 0 or 1.
AXES = (
    (r"word_embeddings\.weight|output_layer\.weight", 0),
    (r"linear_(qkv|fc1)\.(weight|bias)|eh_proj\.weight", 0),
    (r"linear_(q|q_up|kv_up)_proj\.weight", 0),
    (r"(linear_(proj|fc2)|out_proj)\.weight", 1),
    (r"(in_proj|conv1d)\.weight\.\w+|A_log|dt_bias|mixer\.(D|norm\.weight)", 0),
)
DOWN = ((r"linear_(q|kv)_down_proj\.weight", 0),)


class Planner(DefaultSavePlanner):
    """Hands out what was planned, as it is."""

    def __init__(self, data):
        super().__init__(flatten_state_dict=False)
        self.data = data

    def resolve_data(self, write_item):
        return self.data[write_item.index]


def tensor_item(key, tensor, lead, cuts):
    """A rank's share of a tensor: one place on each of the leading axes, cut along others."""
    sizes = [1] * len(lead) + list(tensor.shape)
    offsets = [place for place, _ in lead] + [0] * tensor.ndim
    whole = [places for _, places in lead] + list(tensor.shape)
    for axis, (number, parts) in cuts.items():
        offsets[len(lead) + axis] = number * tensor.shape[axis]
        whole[len(lead) + axis] *= parts
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    about = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(whole))
    index = MetadataIndex(key, chunk.offsets)
    item = WriteItem(index, WriteItemType.SHARD, tensor_data=about)
    return item, tensor.reshape(sizes).contiguous()


def bytes_item(key, content):
    stream = io.BytesIO()
    torch.save([content], stream)
    about = BytesIOWriteData(stream.tell())
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=about), stream


def items_of(share, ranks, sizes, first_layer, *, kind, stacked, apart, gated):
    """What a rank writes of its share, where it is the first of those that hold a tensor."""
    (t, e), (tp, ep) = ranks, sizes
    here = EXPERTS // ep
    for key, tensor in share.items():
        layer, lead, cuts, first_axis = 0, [], {}, 0
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", key):
            layer, rest = first_layer + int(match[1]), match[2]
            for old, new in LOCAL.items() if kind == "local" else ():
                rest = re.sub(rf"^{re.escape(old)}", new, rest)
            lead = [(layer, LAYERS)] if stacked else []
            key = f"decoder.layers.{rest}" if stacked else f"decoder.layers.{layer}.{rest}"
        if key.endswith("_extra_state"):
            if (t, e) == (0, 0):
                yield bytes_item(f"{key}/shard_{layer}_{LAYERS}", tensor)
            continue
        if re.search(r"(in_proj|conv1d)\.(weight|bias)$", key):
            for part, own in kind_by_kind(tensor, tp, key).items():
                if e == 0:
                    yield tensor_item(f"{key}.{part}", own, lead, {0: (t, tp)})
            continue
        key = re.sub(r"local_experts\.(\d+)\.(linear_fc\d\.\w+)$", r"\2\1", key)
        if match := re.fullmatch(r"(.+\.mlp\.experts\.)(linear_fc\d\.\D+)(\d+)", key):
            number = e * here + int(match[3])
            key = f"{match[1]}experts.{f'{number}.' if apart else ''}{match[2]}"
            lead = lead if apart else [*lead, (number, EXPERTS)]
        elif match := re.fullmatch(r"(.+\.mlp\.experts\.)weight([12])", key):
            shape = (here, HIDDEN, -1) if match[2] == "1" else (here, -1, HIDDEN)
            tensor = tensor.view(shape).transpose(-1, -2)
            key, cuts, first_axis = f"{match[1]}experts.linear_fc{match[2]}.weight", {0: (e, ep)}, 1
        elif e > 0:
            continue
        axes = (*AXES, *(DOWN if kind == "local" else ()))
        axis = next((axis for end, axis in axes if re.search(f"({end})$", key)), None)
        if axis is None:
            if t == 0:
                yield tensor_item(key, tensor, lead, cuts)
            continue
        axis += first_axis
        if not gated or not re.search(r"linear_fc1\.(weight|bias)$", key):
            yield tensor_item(key, tensor, lead, cuts | {axis: (t, tp)})
            continue
        for half, part in enumerate(tensor.chunk(2, dim=axis)):
            place = (t, tp) if apart else (half * tp + t, 2 * tp)
            suffix = ("_w", "_v")[half] if apart else ""
            yield tensor_item(key + suffix, part, lead, cuts | {axis: place})


def write(
    folder, model, *, tp=1, pp=1, ep=1, kind="te", experts="modules", stacked=False, apart=False,
    dtype=torch.float32, more=(), core="0.18", **also,
):  # fmt: skip
    """A checkpoint as Megatron's `save_checkpoint` leaves it."""
    path = folder / "iter_0000050"
    path.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("50")
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    about |= {"common_backend": "torch", "common_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(about))
    args = arguments(tp=tp, pp=pp, ep=ep, **also)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 50, "optimizer": {"step": 1}}
    if core == "0.18":
        torch.save(common, path / "common.pt")
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    gated = "swiglu" in model.config.activation
    plans, data = [], {}
    for t, p, e in itertools.product(range(tp), range(pp), range(ep)):
        layers = range(LAYERS // pp * p, LAYERS // pp * (p + 1))
        share = their_share(state, gated, (t, e), (tp, ep), layers, kind, experts)
        if "head.weight" not in state:  # it has the embedding's name there
            share.pop("output_layer.weight", None)
        how = {"kind": kind, "stacked": stacked, "apart": apart, "gated": gated}
        found = list(items_of(share, (t, e), (tp, ep), layers[0], **how))
        if (t, p, e) == (0, 0, 0):
            found.append(bytes_item("rng_state/shard_0.0_1.1", {"torch_rng_state": 1}))
            if core == "0.19":
                found.append(bytes_item("common_state/shard_0_1", common))
            beside = {f"{of}.wings": torch.ones(3) for of in OPTIMIZERS} | dict(more)
            found += [tensor_item(key, tensor, [], {}) for key, tensor in beside.items()]
        plans.append(SavePlan([item for item, _ in found]))
        data |= {item.index: content for item, content in found}
    writer = FileSystemWriter(path, sync_files=False, thread_count=2)
    plans, metadata = create_default_global_save_plan(writer.prepare_global_plan(plans))
    metadata.all_local_plans, metadata.mcore_data = plans, {}  # as Megatron does
    planner = Planner(data)
    writer.finish(metadata, [writer.write_data(plan, planner).wait() for plan in plans])
    return folder
