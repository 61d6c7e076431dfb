"""`python -m mxrl`, and so `torchrun … -m mxrl train …`."""

import sys

from mxrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
