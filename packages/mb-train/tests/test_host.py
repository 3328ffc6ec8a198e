"""Freed memory is used again instead of being asked for anew."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
if sys.argv[1] == "kept":
    from mb_train.host import keep_freed_memory
    keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        del_me = bytearray(48 << 20)
        for place in range(0, len(del_me), 4096):
            del_me[place] = 1
        del del_me
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_kept():
    faults = {}
    for way in ("kept", "given back"):
        words = [sys.executable, "-c", PROGRAM, way]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        faults[way] = int(done.stdout)
    # The third round of the same allocations: no new page, or as many as at first.
    assert faults["kept"] < 100
    assert faults["given back"] > 100
