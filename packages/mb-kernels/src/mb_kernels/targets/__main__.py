"""``python -m mb_kernels.targets``: the compile gate, see ``mb_kernels.targets.command``."""

import sys

from mb_kernels.targets.command import main

if __name__ == "__main__":  # the gate's processes import this module anew
    sys.exit(main())
