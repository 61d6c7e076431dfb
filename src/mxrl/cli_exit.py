"""How a command ends: 0 done; 1 the work failed; 2 the call was wrong (an option, a recipe); 130 Ctrl-C or SIGTERM.

A failure is one line on stderr, never a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """Ends the program with `code`; the message, if there is one, is the line on stderr."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def heed_signals() -> None:
    """Ctrl-C and SIGTERM end the process on the spot, until `begun`: libraries swallow what is raised while they load.

    Not what ignores them (nohup), nor in one of torchrun's processes, which its launcher ends.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, _end)


def begun() -> None:
    """Everything is loaded: from here on they are a KeyboardInterrupt, so that the command says what it has kept."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.default_int_handler)


def _end(number: int, frame: Any) -> None:
    os.write(2, b"mxrl: interrupted\n")
    os._exit(130)


def explain(err: Exception) -> int:
    """The one line for an exception, and its exit code."""
    if hasattr(err, "format_message"):  # a usage error of typer's (its click is vendored or not, by version)
        message = " ".join(err.format_message().split())  # type: ignore[attr-defined]
        # without a message, help was printed instead
        return fail(f"{message} (see mxrl --help)" if message else "", getattr(err, "exit_code", 2))
    from mxrl.ops.dispatch import BackendError
    from mxrl.recipes import RecipeError
    from mxrl.rl.config import ConfigError
    from mxrl.rl.policy import PolicyError
    from mxrl.rl.tasks import TaskError

    message = " ".join(str(err).split())
    if isinstance(err, (BackendError, RecipeError, ConfigError, PolicyError, TaskError)):
        return fail(message, 2)
    if isinstance(err, ModuleNotFoundError) and err.name and not err.name.startswith("mxrl"):
        return fail(f"this command needs {err.name}, which is not installed: pip install 'mxrl[train]'", 1)
    if isinstance(err, (ValueError, RuntimeError, OSError)) and message:
        return fail(message, 1)
    return fail(f"{type(err).__name__}: {message} (this is a bug; `mxrl --traceback …` shows where)", 1)


def fail(message: str, code: int) -> int:
    """Say why; of several processes (torchrun's RANK) the first speaks for all where the call itself was wrong."""
    rank, processes = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
    if message and (processes == 1 or rank == "0" or code == 1):
        print(f"mxrl: {f'rank {rank}: ' if processes > 1 else ''}{message}", file=sys.stderr, flush=True)
    if processes > 1 and "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        os._exit(code)  # NCCL would wait for the other processes on the way out
    return code
