"""A few kills of `kill_loop.py`, which takes any number."""

import importlib.util
from pathlib import Path


def test_kills_lose_nothing(tmp_path):
    path = Path(__file__).with_name("kill_loop.py")
    spec = importlib.util.spec_from_file_location("kill_loop", path)
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    loop.kill_loop(tmp_path, kills=3, iterations=5, seed=1, words=["--async-save"])
