"""A few kills of `kill_loop.py`, which takes any number."""

import kill_loop


def test_kills_lose_nothing(tmp_path):
    kill_loop.kill_loop(tmp_path, kills=3, iterations=5, seed=1, words=["--async-save"])
