"""Under --import-mode=importlib a test module cannot see its neighbours."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
