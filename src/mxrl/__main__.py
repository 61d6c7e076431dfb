"""`mxrl`, `python -m mxrl`, `torchrun … -m mxrl train …`: the command line, with Ctrl-C heeded from the start."""

import contextlib
import os
import sys

from mxrl.cli_exit import fail, heed_signals


def main() -> int:
    try:
        heed_signals()
        from mxrl.cli import main as run  # takes a moment

        code = run()
    except KeyboardInterrupt:
        code = fail("interrupted", 130)
    if code == 130:  # Python would end by SIGINT if what was interrupted stood in an exec(), as dataclasses do
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
