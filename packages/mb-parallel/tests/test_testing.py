"""The rank runner itself: results in order, failures with their traceback, no rank left behind."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mb_parallel.testing import preload, run_ranks

preload("colorsys", "no_such_module")  # the first of which nothing else imports


def _sum(rank: int, world_size: int, offset: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return rank, total + offset


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("seventeen")
    dist.barrier()


@torch.no_grad()
def _without_gradients(rank: int, world_size: int) -> bool:
    return torch.is_grad_enabled()


def _die(rank: int, world_size: int, code: int) -> None:
    os._exit(code)


def _die_among_others(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _is_imported(rank: int, world_size: int) -> bool:
    return "colorsys" in sys.modules


def _sleep(rank: int, world_size: int) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a trainer's own, to save before a job ends
    time.sleep(60)


@pytest.mark.parametrize("timeout_s", [60.0, math.inf])
def test_results_come_back_in_rank_order(timeout_s):
    found = run_ranks(_sum, 3, torch.tensor(10), timeout_s=timeout_s)
    assert found == [(0, 13), (1, 13), (2, 13)]


def test_ranks_find_imported_what_was_to_be():
    assert run_ranks(_is_imported, 2) == [True, True]


def test_a_failing_rank_names_itself_and_its_error():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed.*seventeen"):
        run_ranks(_fail_on_one, 2)


def test_a_decorated_function_is_found_in_its_own_file():
    assert run_ranks(_without_gradients, 2) == [False, False]


@pytest.mark.parametrize("code", [3, 0])
def test_a_dead_rank_is_noticed(code):
    with pytest.raises(RuntimeError, match=f"rank 0 of 1 died with exit code {code}"):
        run_ranks(_die, 1, code)


def test_a_killed_rank_is_named_before_the_peers_that_lost_it():
    with pytest.raises(RuntimeError, match=r"(?s)\Arank 1 of 3 died with exit code -9"):
        run_ranks(_die_among_others, 3)


def test_a_hanging_rank_is_ended_and_says_where_it_was():
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] still ran after 5.0 s") as caught:
        run_ranks(_sleep, 2, timeout_s=5.0)
    for of_rank in str(caught.value).split("rank 0 was at")[1].split("rank 1 was at"):
        assert re.search(r'File ".*test_testing.py", line \d+ in _sleep', of_rank)


CALLER = """
import socket, sys, time
from mb_parallel.testing import run_ranks

def linger(rank, world_size, port):
    with socket.create_connection(("127.0.0.1", port)) as held:
        held.sendall(b".")
        time.sleep(600)

if __name__ == "__main__":
    run_ranks(linger, 2, int(sys.argv[1]), timeout_s=600.0)
"""


def test_ranks_end_with_a_caller_that_is_killed(tmp_path):
    (tmp_path / "caller.py").write_text(CALLER)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        port = str(server.getsockname()[1])
        with subprocess.Popen([sys.executable, tmp_path / "caller.py", port]) as caller:
            try:
                ranks = [server.accept()[0] for _ in range(2)]
                assert [rank.recv(1) for rank in ranks] == [b".", b"."]
            finally:
                caller.kill()
        for rank in ranks:
            with rank:
                rank.settimeout(60)
                assert rank.recv(1) == b"", "closed by the system when its process is gone"


def test_a_function_that_ranks_cannot_find_is_refused():
    typed: dict[str, Any] = {}
    exec("def typed(rank, world_size): pass", typed)  # as in a notebook
    for function in (lambda rank, world_size: None, print, time, typed["typed"]):
        with pytest.raises(ValueError, match="defined at the top level of a file, got"):
            run_ranks(function, 1)


@pytest.mark.parametrize(
    "wrong", [{"world_size": 0}, {"timeout_s": float("nan")}, {"device_type": "gpu"}], ids=str
)
def test_nothing_to_run_is_no_success(wrong):
    with pytest.raises(ValueError, match=f"[Ee]xpected {next(iter(wrong))}"):
        run_ranks(_die, **{"world_size": 1, **wrong})
