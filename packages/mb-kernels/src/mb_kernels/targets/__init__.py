"""The GPU architectures the kernels are built for, their tiles, and the gate that compiles all."""

from mb_kernels.targets.gate_case import GateCase as GateCase
from mb_kernels.targets.table import TARGETS as TARGETS
from mb_kernels.targets.table import TILES as TILES
from mb_kernels.targets.table import Target as Target
from mb_kernels.targets.table import Tile as Tile
from mb_kernels.targets.table import current_target as current_target
