"""Environment variables that are set: which of them matter to a training run here, and how.

Three kinds. Some decide whether a run works. Some change how fast it is, on some machines. And some
are folklore: copied from script to script, they do nothing for this program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Variable(NamedTuple):
    """What a variable does; `wrong` are values that are a problem, `vendor` None means any."""

    kind: str  # "matters" or "folklore"
    text: str
    vendor: str | None = None
    wrong: tuple[str, ...] = ()


VARIABLES: dict[str, Variable] = {
    # which devices there are
    "CUDA_VISIBLE_DEVICES": Variable(
        "matters", "which GPUs a process sees; ROCm obeys it too", None, ("", "-1")
    ),
    "HIP_VISIBLE_DEVICES": Variable(
        "matters", "which GPUs a process sees, of those that ROCR_VISIBLE_DEVICES leaves", "amd",
        ("", "-1"),
    ),
    "ROCR_VISIBLE_DEVICES": Variable(
        "matters", "which GPUs the ROCm runtime sees; the others are numbered anew", "amd", ("",)
    ),
    "HSA_OVERRIDE_GFX_VERSION": Variable(
        "matters",
        "has ROCm take the GPU for another chip: for cards without a build of their own only; on "
        "an MI GPU or an RX 7900 XTX it breaks kernels, unset it there",
        "amd",
    ),
    # memory
    "PYTORCH_ALLOC_CONF": Variable(
        "matters", "torch's allocator; expandable_segments:True helps against fragmentation"
    ),
    "PYTORCH_CUDA_ALLOC_CONF": Variable("matters", "the same under its older name"),
    "PYTORCH_HIP_ALLOC_CONF": Variable("matters", "the same under its older name on ROCm", "amd"),
    "HSA_NO_SCRATCH_RECLAIM": Variable(
        "matters", "1 keeps scratch memory between kernels: steadier steps on MI300X", "amd"
    ),
    # launches
    "CUDA_LAUNCH_BLOCKING": Variable(
        "matters", "1 waits for every kernel: for debugging, several times slower", None, ("1",)
    ),
    "AMD_SERIALIZE_KERNEL": Variable(
        "matters", "waits for every kernel: for debugging, several times slower", "amd",
        ("1", "2", "3"),
    ),
    "HIP_FORCE_DEV_KERNARG": Variable(
        "matters", "1 puts kernel arguments on the device: microseconds a launch on MI300X", "amd"
    ),
    "GPU_MAX_HW_QUEUES": Variable(
        "matters", "hardware queues of a process; 2 suits training beside communication", "amd"
    ),
    # communication; RCCL reads NCCL's names
    "NCCL_P2P_DISABLE": Variable(
        "matters", "1 sends everything between GPUs through host memory", None, ("1",)
    ),
    "NCCL_SHM_DISABLE": Variable(
        "matters", "1 sends everything between processes of a host over the network", None, ("1",)
    ),
    "NCCL_IB_DISABLE": Variable("matters", "1 leaves InfiniBand and RoCE unused: slow nodes"),
    "NCCL_SOCKET_IFNAME": Variable("matters", "which network interface joins the nodes"),
    "NCCL_DEBUG": Variable("matters", "INFO says which path every collective takes"),
    "NCCL_MIN_NCHANNELS": Variable(
        "matters", "channels of a collective; 112 fills an MI300X in a node of eight", "amd"
    ),
    "HSA_FORCE_FINE_GRAIN_PCIE": Variable(
        "matters", "1 allows peer-to-peer between GPUs that only PCIe joins (workstations)", "amd"
    ),
    "OMP_NUM_THREADS": Variable("matters", "threads of a process on the CPU; torchrun sets 1"),
    "TRITON_INTERPRET": Variable(
        "matters", "1 runs kernels in Python, thousands of times slower: for tests", None, ("1",)
    ),
    # folklore
    "CUDA_DEVICE_MAX_CONNECTIONS": Variable(
        "folklore", "Megatron's overlap of tensor parallelism needed it; nothing here does"
    ),
    "HSA_ENABLE_SDMA": Variable(
        "folklore", "0 was a cure for hangs of ROCm before 5; today it makes copies slower", "amd"
    ),
    "MIOPEN_FIND_MODE": Variable(
        "folklore", "is about convolutions; a transformer has none", "amd"
    ),
    "MIOPEN_USER_DB_PATH": Variable(
        "folklore", "is about convolutions; a transformer has none", "amd"
    ),
    "PYTORCH_ROCM_ARCH": Variable(
        "folklore", "is read when torch is built, not when it runs", "amd"
    ),
    "TORCH_CUDA_ARCH_LIST": Variable("folklore", "is read when extensions are built; we have none"),
    "ROCM_HOME": Variable("folklore", "is read when extensions are built; we have none", "amd"),
    "CUDA_HOME": Variable("folklore", "is read when extensions are built; we have none"),
    "NCCL_ASYNC_ERROR_HANDLING": Variable("folklore", "torch reads TORCH_NCCL_... and has it on"),
    "OMPI_MCA_btl": Variable("folklore", "MPI is not used: torchrun starts the ranks"),
}  # fmt: skip


def explain(environment: Mapping[str, str], vendor: str | None) -> tuple[list[str], list[str]]:
    """Lines on the variables that are set, and the problems among them.

    Args:
        vendor: "amd", "nvidia", or None for a machine without a GPU.
    """
    facts, problems = [], []
    for name, about in VARIABLES.items():
        value = environment.get(name)
        if value is None:
            continue
        if about.vendor is not None and about.vendor != vendor:
            facts.append(f"variable    {name}={value}: no effect here, it is for {about.vendor}")
        elif about.kind == "folklore":
            facts.append(f"variable    {name}={value}: folklore, {about.text}")
        else:
            facts.append(f"variable    {name}={value}: {about.text}")
            if value in about.wrong:
                problems.append(f"{name}={value!r}: {about.text}. Unset it.")
    return facts, problems
