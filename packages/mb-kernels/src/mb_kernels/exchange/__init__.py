"""Kernels that store rows in other ranks' memory, for mb-parallel's peer dispatcher."""

from mb_kernels.exchange.memory import Layout as Layout
from mb_kernels.exchange.memory import PeerMemory as PeerMemory
from mb_kernels.exchange.routing import PackedRouting as PackedRouting
from mb_kernels.exchange.routing import pack_routing as pack_routing
from mb_kernels.exchange.routing import unpack_routing as unpack_routing
from mb_kernels.exchange.routing import unpack_routing_backward as unpack_routing_backward
from mb_kernels.exchange.routing_reference import spread as spread
