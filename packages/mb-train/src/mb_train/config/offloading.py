"""Fields that say which activations wait in the host's memory for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from mb_train.config.field import AT_LEAST_0, POSITIVE, flag

# Megatron Core's names for the halves of what experts keep, which is one here.
EXPERT_MODULES = ("expert_fc1", "moe_act")
LAYER_INPUT = "layer_input"


@dataclass(frozen=True, kw_only=True)
class OffloadingFields:
    """Whole layers, or modules of all layers."""

    cpu_offloading_num_layers: int = flag(
        "so many layers of a stage, evenly spread, keep what their backward pass needs in pinned "
        "memory of the host; 0: none does", 0, bounds=AT_LEAST_0,
    )  # fmt: skip
    offload_modules: list[str] | None = flag(  # noqa: RUF009, a field like the others
        "these modules of all layers do; layer_input is what layers that are recomputed need",
        choices=(
            "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm",
            *EXPERT_MODULES, LAYER_INPUT,
        ),
        said_as={"fused_group_mlp": "moe_act"},
    )  # fmt: skip
    min_offloaded_tensor_size: int = flag(
        "numbers of the smallest tensor that is worth the way", 2**20, bounds=POSITIVE,
        needs=(("cpu_offloading_num_layers", "offload_modules"),),
    )  # fmt: skip

    @property
    def offloads(self) -> str | None:
        """The flag by which activations go to the host, as it is typed; None: they stay."""
        if self.cpu_offloading_num_layers:
            return f"--cpu-offloading-num-layers {self.cpu_offloading_num_layers}"
        modules = self.offload_modules
        return None if modules is None else f"--offload-modules {' '.join(modules)}"

    def check_offloading(
        self, layers: int, *, experts: bool, recompute: str | None, compiles: bool, graph: bool
    ) -> None:
        """Raise ValueError for what cannot go to the host, or not beside the rest of the run.

        Args:
            layers: of the whole model.
            experts: it has some.
            recompute: its granularity.
            compiles, graph: the run compiles layers, or captures passes.
        """
        modules = self.offload_modules
        if self.cpu_offloading_num_layers > layers:
            raise ValueError(
                f"Expected --cpu-offloading-num-layers of at most {layers}, the model's layers, "
                f"got {self.cpu_offloading_num_layers}."
            )
        if self.offloads is not None and graph:
            raise ValueError(
                f"Expected no --cuda-graph with {self.offloads}, whose copies are not captured. "
                "Leave one out."
            )
        if modules is None:
            return
        if self.cpu_offloading_num_layers:
            raise ValueError(
                "Expected --cpu-offloading-num-layers or --offload-modules, got both, "
                f"{self.cpu_offloading_num_layers} and {' '.join(modules)}."
            )
        whole = LAYER_INPUT in modules
        if whole != (recompute == "full") or (whole and len(modules) > 1):
            raise ValueError(
                "Expected --offload-modules layer_input alone with --recompute-granularity full, "
                "whose layers keep nothing else, and other modules without it, got "
                f"{' '.join(modules)} and {recompute or 'none'}."
            )
        if not experts and (without := [name for name in modules if name in EXPERT_MODULES]):
            raise ValueError(
                f"Expected --moe-num-experts with --offload-modules {' '.join(without)}, got none."
            )
        if compiles and not whole:
            raise ValueError(
                "Expected --no-compile with --offload-modules, because a layer that is compiled "
                f"has no modules, got {' '.join(modules)}. Or say --cpu-offloading-num-layers, of "
                "whole layers."
            )
