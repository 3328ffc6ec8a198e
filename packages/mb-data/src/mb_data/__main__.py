"""`python -m mb_data`, where the command `mb-data` is not on the path."""

import sys

from mb_data.cli import main

sys.exit(main())
