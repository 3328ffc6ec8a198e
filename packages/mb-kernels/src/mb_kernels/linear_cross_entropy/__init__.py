"""A language model's head and its cross entropy in one op that never keeps the logits."""

from mb_kernels.linear_cross_entropy.op import VocabularyShard as VocabularyShard
from mb_kernels.linear_cross_entropy.op import linear_cross_entropy as linear_cross_entropy
