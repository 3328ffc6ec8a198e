"""What the program does with its process: its imports, the memory it freed, and its end."""

import ctypes
import os
import platform
import re
import subprocess
import sys

import mb_data.system
import pytest
from mb_data.system import sync_directory
from mb_train.machine.doctor import _check_memory
from mb_train.machine.host import keep_freed_memory, open_many_files
from mb_train.machine.memory import host_memory, memory_limit

PROGRAM = """
import resource, sys
if sys.argv[1] == "kept":
    from mb_train.machine.host import keep_freed_memory
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


FILES = """
import resource
from mb_train.machine.host import prepare_host
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
prepare_host()
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others may not grant what they name")
def test_as_many_files_may_be_open_as_the_system_grants():
    done = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_windows_lacks_some_of_it(monkeypatch, tmp_path):
    """What raises there is not called: a C library of the program, folders as files, sysconf."""

    def lacking(*_):
        raise TypeError("not on Windows")

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(mb_data.system, "WINDOWS", True)
    monkeypatch.setattr(ctypes, "CDLL", lacking)
    monkeypatch.setattr(os, "open", lacking)
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setitem(sys.modules, "resource", None)
    keep_freed_memory()
    open_many_files()
    sync_directory(tmp_path)
    facts = []
    _check_memory(facts, [], gpus=0)
    assert not any(fact.startswith("memory") for fact in facts)


# What /proc/self/cgroup says, where the limit is, its file, that of what is held, its lines' names.
GROUPS = {
    "container": ("0::/", "", "memory.max", "memory.current", ""),
    "a container's, by the path outside": ("0::/docker/1", "", "memory.max", "memory.current", ""),
    "around a step of Slurm's": (
        "0::/slurm/job_1/step_0/task_0", "slurm/job_1", "memory.max", "memory.current", "",
    ),
    "first version": (
        "5:cpu,cpuacct:/\n4:memory:/slurm/job_1/step_0\n0::/", "memory/slurm/job_1",
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_",
    ),
    "first version, by the path outside": (
        "4:memory:/docker/1", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_",
    ),
}  # fmt: skip


@pytest.mark.skipif(sys.platform == "win32", reason="no sysconf")
@pytest.mark.parametrize("kind", GROUPS)
def test_the_memory_is_that_of_the_container_or_job(monkeypatch, tmp_path, kind):
    lines, group, limit, used, total = GROUPS[kind]
    ours, group = tmp_path / "cgroup", tmp_path / "groups" / group
    ours.write_text(f"{lines}\n")
    monkeypatch.setattr("mb_train.machine.memory.GROUPS", tmp_path / "groups")
    monkeypatch.setattr("mb_train.machine.memory.OURS", ours)
    assert memory_limit() is None
    before = host_memory()
    group.mkdir(parents=True)
    (group / limit).write_text(f"{2**63 - 4096}\n" if total else "max\n")
    assert memory_limit() is None
    assert host_memory() == pytest.approx(before, rel=0.5)  # of a machine that others use too
    (group / limit).write_text(f"{1 << 27}\n")
    (group / used).write_text(f"{1 << 27}\n")  # full, most of it of token files
    (group / "memory.stat").write_text(
        f"anon {1 << 25}\nfile {3 << 25}\n"
        f"{total}inactive_file {2 << 25}\n{total}active_file {1 << 25}\n"
    )
    assert host_memory() == 3 << 25
    facts = []
    _check_memory(facts, [], gpus=0)
    assert facts[0].startswith("memory      0.1 GB of RAM, the limit of this container or job: ")


IMPORTING = """
import gc
from mb_train.machine.host import first_import

with first_import():
    assert not gc.isenabled()
    import torch
assert gc.isenabled()
there = gc.get_freeze_count()
made = [[] for _ in range(100)]
with first_import():
    assert gc.isenabled()
assert gc.get_freeze_count() == there
print(there)
"""


@pytest.mark.slow
def test_what_is_imported_first_is_not_looked_through():
    words = [sys.executable, "-c", IMPORTING]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100_000


ENDING = """
import atexit
from mb_train import cli

class Last:
    def __del__(self):
        print("taken down")

cli.last = Last()
cli.main = lambda: print("said, ", end="") or 3
atexit.register(print, "tidied up")
cli.program()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_several_ranks_none_takes_the_interpreter_down(ranks):
    """Threads of gloo may be at work, which abort the process then (see `cli.program`)."""
    environment = {**os.environ, "WORLD_SIZE": str(ranks)}
    words = [sys.executable, "-c", ENDING]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    last = "taken down\n" if ranks == 1 else ""
    assert (done.returncode, done.stdout, done.stderr) == (3, "said, tidied up\n" + last, "")


def test_where_no_other_rank_can_be_told_an_error_is_its_line_alone():
    """A WORLD_SIZE that is left over names no others."""
    environment = {key: value for key, value in os.environ.items() if key != "MASTER_ADDR"}
    words = [sys.executable, "-m", "mb_train", "--wings", "2"]
    alone = environment | {"WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=alone)
    assert done.returncode == 2
    assert re.fullmatch(r"mb-train, rank 0 on .*: Unknown flag --wings\..*\n", done.stderr)
