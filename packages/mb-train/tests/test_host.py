"""Freed memory is used again instead of being asked for anew."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest
from mb_train.doctor import _check_memory
from mb_train.host import keep_freed_memory
from mb_train.whole_files import sync_directory

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


def test_windows_lacks_some_of_it(monkeypatch, tmp_path):
    """What raises there is not called: a C library of the program, folders as files, sysconf."""

    def lacking(*_):
        raise TypeError("not on Windows")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", lacking)
    monkeypatch.setattr(os, "open", lacking)
    monkeypatch.delattr(os, "sysconf")
    keep_freed_memory()
    sync_directory(tmp_path)
    facts = []
    _check_memory(facts)
    assert not any(fact.startswith("memory") for fact in facts)
