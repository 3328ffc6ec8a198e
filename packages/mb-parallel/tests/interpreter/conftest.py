"""These tests run Triton kernels on CPU tensors; tests/test_interpreter.py starts them."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
