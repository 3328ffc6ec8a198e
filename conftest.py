"""Settings of every test process, made before torch is imported."""

import os

# pytest-xdist already fills the cores with processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")
