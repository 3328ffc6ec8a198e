"""Checkpoints of Megatron-LM, of its MegaBlocks fork and of Megatron Core."""

from mb_train.convert.megatron.read import import_megatron as import_megatron
from mb_train.convert.megatron.read import is_megatron as is_megatron
from mb_train.convert.megatron.read import read_megatron as read_megatron
