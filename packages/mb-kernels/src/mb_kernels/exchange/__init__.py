"""Rows to and from other ranks' memory, by kernels: the engine of the peer dispatcher."""

from mb_kernels.exchange.memory import Layout as Layout
from mb_kernels.exchange.memory import PeerMemory as PeerMemory
