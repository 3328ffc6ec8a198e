"""Models in and out: Hugging Face folders, and checkpoints of Megatron.

    mb-train convert SOURCE TARGET

SOURCE may be a Hugging Face folder (config.json and safetensors), a Megatron checkpoint
(iter_*/mp_rank_* or iter_*/metadata.json), or a run folder of ours. The first two become a run
folder, the last a Hugging Face folder. Every tensor of the source is used exactly once and every
tensor of the target is filled, or nothing is written. A tensor is read, converted and written when
it is its turn: a model may be larger than the memory (`mb_layers.on_demand`).

    new_run       the run folder that a model from elsewhere becomes
    vocabulary    its rows, and new ones
    hugging_face/ read, write; architectures, and of each family what is its own: gpt2, llama, bert,
                  t5; what they share: rules, config_json, safetensors_files, tokenizer
    megatron/     read; the formats: ranks (torch), torch_dist, distcp, safe_pickle;
                  the models: layout, fork (2023, MegaBlocks), core, core_arguments
    upcycle       a dense model into one with experts
"""

# The public API.
from mb_train.convert.hugging_face import export_model as export_model
from mb_train.convert.hugging_face import import_model as import_model
from mb_train.convert.hugging_face import read_model as read_model
from mb_train.convert.megatron import import_megatron as import_megatron
from mb_train.convert.megatron import is_megatron as is_megatron
from mb_train.convert.megatron import read_megatron as read_megatron
from mb_train.convert.new_run import write_run as write_run
