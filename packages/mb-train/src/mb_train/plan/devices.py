"""What GPUs can do at most, and how much they hold: the makers' data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple


class DataSheet(NamedTuple):
    """Of one device: dense bf16 TFLOP/s, TB/s of its memory, and how many GiB that has.

    fp8: mb_kernels multiplies 8-bit floats on it.
    link_gb: GB/s of its link to the host's memory, each way: 16 lanes of PCIe 5 or 4, or NVLink.
    """

    peak_tflops: float
    bandwidth_tb: float
    memory_gib: float
    fp8: bool = False
    link_gb: float = 64.0


# By a part of the device's name, a regular expression, the more particular first. MI250X and MI250
# are two devices, of half the card's figures each.
_SHEETS = {
    "GB200": DataSheet(2500.0, 8.0, 186.0, fp8=True, link_gb=225.0),
    "B200": DataSheet(2250.0, 8.0, 180.0, fp8=True),
    "GH200 144G": DataSheet(989.0, 4.9, 144.0, fp8=True, link_gb=450.0),
    # Named by the 480 GB of its processor.
    "GH200": DataSheet(989.0, 4.0, 96.0, fp8=True, link_gb=450.0),
    "H200 NVL": DataSheet(835.0, 4.8, 141.0, fp8=True),
    "H200": DataSheet(989.0, 4.8, 141.0, fp8=True),
    "H100 NVL": DataSheet(835.0, 3.9, 94.0, fp8=True),
    "H100 PCIe": DataSheet(756.0, 2.0, 80.0, fp8=True),
    "H100": DataSheet(989.0, 3.35, 80.0, fp8=True),
    "A100.*40GB": DataSheet(312.0, 1.56, 40.0, link_gb=32.0),
    "A100": DataSheet(312.0, 2.04, 80.0, link_gb=32.0),
    "L40S": DataSheet(362.0, 0.86, 48.0, fp8=True, link_gb=32.0),
    "MI355X": DataSheet(2500.0, 8.0, 288.0, fp8=True),
    "MI350X": DataSheet(2300.0, 8.0, 288.0, fp8=True),
    "MI325X": DataSheet(1307.0, 6.0, 256.0, fp8=True),
    "MI300X": DataSheet(1307.0, 5.3, 192.0, fp8=True),
    "MI300A": DataSheet(981.0, 5.3, 128.0, fp8=True),
    "MI250X": DataSheet(191.5, 1.64, 64.0, link_gb=32.0),
    "MI250": DataSheet(181.0, 1.64, 64.0, link_gb=32.0),
    "MI210": DataSheet(181.0, 1.64, 64.0, link_gb=32.0),
    "7900 XTX": DataSheet(123.0, 0.96, 24.0, link_gb=32.0),
    "9070 XT": DataSheet(195.0, 0.64, 16.0, fp8=True),
    "R9700": DataSheet(191.0, 0.64, 32.0, fp8=True),
}


def data_sheet(device: str) -> DataSheet | None:
    """That of a device of this name; None if it is not known, as an A1000 is not, but an A100.

    None for a part of a GPU as well (MIG), whose name begins with that of the whole.
    """
    if re.search(r"\bMIG\b", device, re.IGNORECASE):
        return None
    for part, sheet in _SHEETS.items():
        if re.search(rf"{part}(?!\d)", device, re.IGNORECASE):
            return sheet
    return None


def known_devices() -> list[str]:
    """Parts of the names of the devices that are known."""
    return [part.replace(".*", " ") for part in _SHEETS]
