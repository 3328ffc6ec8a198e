"""The losses of a router and the load it makes."""

from mb_kernels.router_losses.op import RouterLosses as RouterLosses
from mb_kernels.router_losses.op import router_losses as router_losses
