"""The command line: `mxrl analyze | …`. No maths; each command imports what it needs when it runs.

Exit codes: 0 done; 1 the work failed; 2 the call was wrong (an option, a recipe); 130 Ctrl-C. A failure is one line on
stderr.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="MXFP4 quantization for reinforcement learning: split the error, correct it, train with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_STATE = {"traceback": False}


@app.callback()
def _options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    _STATE["traceback"] = traceback


@app.command()
def analyze(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A .safetensors or .gguf file, a Hugging Face folder, or a hub id.")
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe", "-r", help="As mxfp4+mbs:search16+of:0.5; may be given several times (default mxfp4)."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the results (default analysis-MODEL).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of tables.")] = False,
    on_nonfinite: Annotated[
        str, typer.Option(metavar="error|skip", help="What to do with a tensor that holds NaN or Inf.")
    ] = "error",
) -> None:
    """Split the quantization error of a checkpoint's linear weights: tables here, a page and JSON in a folder."""
    from rich.console import Console

    from mxrl.report.analyze import analyze as run
    from mxrl.report.console import Bar, print_analysis
    from mxrl.report.summary import to_json

    if on_nonfinite not in ("error", "skip"):
        raise typer.BadParameter(f"'{on_nonfinite}' is neither error nor skip", param_hint="--on-nonfinite")
    folder = out or Path(f"analysis-{_stem(model)}")
    errors = Console(stderr=True)
    with Bar(errors) as bar:
        result = run(model, recipe or ["mxfp4"], out=folder, on_nonfinite=on_nonfinite, progress=bar)
    for warning in result["warnings"]:
        errors.print(f"mxrl: warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    for skipped in result["skipped"]:
        line = f"mxrl: warning: left out tensor '{skipped['name']}': {skipped['reason']}"
        errors.print(line, markup=False, highlight=False, soft_wrap=True)
    if json:
        print(to_json(result, indent=1))
    else:
        print_analysis(result, Console())
        print(f"written: {folder / 'report.html'}, summary.json, tensors.jsonl")


def _stem(model: str) -> str:
    """A folder name made of the model's: its last path component, without what shells and file systems dislike."""
    name = Path(model.partition("@")[0]).expanduser().resolve()
    name = name.parent if name.stem in ("model", "pytorch_model") and name.parent.name else name
    text = name.stem if name.suffix in (".safetensors", ".gguf") else name.name
    return re.sub(r"[^\w.-]+", "-", text) or "model"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. Every failure is one line on stderr, never a traceback."""
    try:
        code: Any = app(args=arguments, prog_name="mxrl", standalone_mode=False)
        sys.stdout.flush()
        if code == 130:
            return _fail("interrupted; nothing was written", 130)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted; nothing was written", 130)
    except BrokenPipeError:  # whoever read our output has gone; Python must not try to flush it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as err:
        if _STATE["traceback"]:
            raise
        return _explain(err)


def _explain(err: Exception) -> int:
    """The one line for an exception, and its exit code."""
    from mxrl.recipes import RecipeError

    message = " ".join(str(err).split())
    if hasattr(err, "format_message"):  # a usage error of typer's (its click is vendored or not, by version)
        message = " ".join(err.format_message().split())  # type: ignore[attr-defined]
        code = getattr(err, "exit_code", 2)
        return _fail(f"{message} (see mxrl --help)", code) if message else code  # without a message, help was printed
    if isinstance(err, RecipeError):
        return _fail(message, 2)
    if isinstance(err, (ValueError, RuntimeError, OSError)) and message:
        return _fail(message, 1)
    return _fail(f"{type(err).__name__}: {message} (this is a bug; `mxrl --traceback …` shows where)", 1)


def _fail(message: str, code: int) -> int:
    print(f"mxrl: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
