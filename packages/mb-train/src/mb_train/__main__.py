"""`python -m mb_train`, for torchrun."""

import sys

from mb_train.cli import main

sys.exit(main())
