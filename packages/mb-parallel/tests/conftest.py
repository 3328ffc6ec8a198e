"""What ranks of several test files import: each would take a second or two to do so itself."""

import sys
from pathlib import Path

import torch
from mb_parallel.testing import preload

# Under --import-mode=importlib a test module cannot see its neighbours.
sys.path.insert(0, str(Path(__file__).parent))
preload("transformers.models.qwen3_moe.modeling_qwen3_moe", "peft")
if not torch.cuda.device_count():  # or it would ask for them, and what is forked then has none
    preload("torch._inductor.compile_fx")  # by `torch.compile`, whatever its backend
