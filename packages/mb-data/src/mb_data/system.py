"""What lies between this package and the system: files that appear whole or as memory, errors that
name their file, locks, syncing, counting cores, the memory of a process and its end."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any, BinaryIO

WINDOWS = os.name == "nt"
LOCKED_BYTE = 1 << 30  # Windows keeps what is locked from being read: this, far behind the content

# A blend maps two files of each source and an index for each part. Before Python 3.13 a map keeps
# its file open.
MAP_ALONE: dict[str, Any] = {} if WINDOWS or sys.version_info < (3, 13) else {"trackfd": False}

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # what `docker run --cpus` and Kubernetes' limits set


class WorkerDiedError(RuntimeError):
    """A worker process ended by itself, as when the system ran out of memory."""


def how_it_ended(exit_code: int | None) -> str:
    """Of a process: by which signal, or with which exit code."""
    if exit_code is not None and exit_code < 0:
        return f"by signal {-exit_code}"
    return f"with exit code {exit_code}"


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process, until it is closed; False if another one has it.

    Raises OSError where the file system has no locks.
    """
    if WINDOWS:
        import msvcrt

        os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(descriptor: int) -> None:
    """Wait for that lock; raises OSError where the file system has none."""
    if not WINDOWS:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    while not try_lock(descriptor):
        time.sleep(0.05)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Generator[None]:
    """Let errors of reading or writing `path` name it: that of a full disk comes without a name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        if error.errno == errno.EMFILE:
            error.strerror = (
                "more open files than this process may have; allow more with `ulimit -n 65536` "
                "before it starts, or join data sets with `mb-data merge`"
            )
        raise


def mapped(path: Path) -> memoryview:
    """A file as read-only memory; an empty one, which cannot be mapped, as no bytes."""
    with naming(path), open(path, "rb") as file:  # a file system that maps nothing names none
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **MAP_ALONE))


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Generator[BinaryIO]:
    """A file to write that gets its name at the end, synced; after an error there is none."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent}: no such directory for the output")
    if target.exists() and not target.is_file():  # /dev/stdout would be replaced by a file
        raise ValueError(f"{target} is a folder, a pipe or a device; expected the name of a file")
    temporary = target.with_name(f"{target.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with naming(target), open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_all(file: IO[bytes], data: memoryview) -> None:
    """Write bytes to a file without a buffer, which may take a part of them at a time."""
    while data:
        data = data[file.write(data) :]


def sync_file(descriptor: int) -> None:
    """Wait until a file's content is on the disk; of its other properties, the size alone."""
    getattr(os, "fdatasync", os.fsync)(descriptor)  # which macOS and Windows do not have


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut, where the file system can."""
    if WINDOWS:  # where directories cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems, and folders of a virtual machine's host
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def cores() -> int:
    """As many as this process may use: a container's limit may be some of them, or a quota."""
    there = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        there = len(os.sched_getaffinity(0))
    try:  # "250000 100000" us, of all cores in each such period, are two; "max 100000" is no quota
        share, each = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):
        return there
    return max(min(there, share // each), 1)


def resident_bytes() -> int:
    """Memory of this process; its peak where that is all the system tells, 0 on Windows."""
    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if WINDOWS:
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
