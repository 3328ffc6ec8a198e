"""What ranks of several test files import: each would take a second or two to do so itself."""

import sys
from pathlib import Path

from mb_parallel.testing import preload

# Under --import-mode=importlib a test module cannot see its neighbours.
sys.path.insert(0, str(Path(__file__).parent))
preload(
    "torch._inductor.compile_fx",  # by `torch.compile`, whatever its backend
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "peft",
)
