"""The command line: `mxrl analyze | probe | train | …`. No maths; each command imports what it needs when it runs.

A command is a function here; what it raises becomes one line on stderr and an exit code in `main` (cli_exit.py).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mxrl.cli_exit import Stopped, begun, explain, fail

app = typer.Typer(
    help="MXFP4 quantization for reinforcement learning: split the error, correct it, train with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_STATE = {"traceback": False}


def _folder(name: str) -> Path:
    if not str(name):
        raise typer.BadParameter("a folder has a name; . is the current one")
    return Path(name)


def _out(help: str) -> Any:
    return typer.Option("--out", "-o", parser=_folder, metavar="PATH", help=help)


@app.callback()
def _options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    _STATE["traceback"] = traceback


@app.command()
def analyze(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A weights file, a Hugging Face folder, a hub id, policy:dense.")
    ],
    other: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Compare MODEL with B, as before and after RL: what changed.")
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe", "-r", help="As mxfp4+mbs:search16+of:0.5; may be given several times (default mxfp4)."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="ORIGINAL", help="Split the error of MODEL, which someone quantized, from its original."),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="Run prompts, as chain or gsm8k:FILE, and split the linears' inputs."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts --activations runs.")] = 64,
    out: Annotated[Path | None, _out("Folder for the results (default analysis-MODEL).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of tables.")] = False,
    on_nonfinite: Annotated[
        str, typer.Option(metavar="error|skip", help="What to do with a tensor that holds NaN or Inf.")
    ] = "error",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cores to use, each a process where memory allows (default all).")
    ] = None,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="What all processes together may take, mapped files apart, as 2GB.")
    ] = "2GB",
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Where to compute; cuda: every GPU, a process each.")
    ] = "auto",
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster whose CPUs do the work, as host:6379 or auto.")
    ] = None,
    resume: Annotated[
        bool, typer.Option(help="Take what an earlier run has measured on the same files from --out, or start over.")
    ] = True,
    bits: Annotated[
        float, typer.Option(metavar="BITS", help="Budget of the recommended recipes, an element, scales included.")
    ] = 4.5,
) -> None:
    """Split the quantization error of a checkpoint's linear weights: tables here, a page and JSON in a folder."""
    from rich.console import Console

    from mxrl.report.analyze import NOTHING_KEPT, Interrupted
    from mxrl.report.analyze import analyze as run
    from mxrl.report.budget import BudgetError
    from mxrl.report.console import Bar
    from mxrl.report.summary import to_json
    from mxrl.rl.policy import resolve_model
    from mxrl.scan_workers import OptionError, parse_size

    begun()
    if on_nonfinite not in ("error", "skip"):
        raise typer.BadParameter(f"'{on_nonfinite}' is neither error nor skip", param_hint="--on-nonfinite")
    which, second = _which(other, against, activations)
    _refuse_idle(context, which or ("--cluster" if cluster else ""))
    beside = f"-{which.lstrip('-').replace('B', 'to')}-{_stem(second)}" if which else ""
    folder = out or Path(f"analysis-{_stem(model)}{beside}")
    errors = Console(stderr=True)
    try:
        if which:
            result = _compared(
                which, model, second, recipe or [], errors, out=folder, prompts=prompts, on_nonfinite=on_nonfinite,
                jobs=jobs, memory=parse_size(memory), device=device, bits=bits,
            )  # fmt: skip
        else:
            with Bar(errors) as bar:
                result = run(
                    resolve_model(model), recipe or ["mxfp4"], out=folder, on_nonfinite=on_nonfinite, progress=bar,
                    jobs=jobs, memory=parse_size(memory), device=device, cluster=cluster, resume=resume, bits=bits,
                )  # fmt: skip
    except (OptionError, BudgetError) as err:
        raise Stopped(str(err), 2) from None
    except Interrupted as stop:
        raise Stopped(str(stop), 130) from None
    except KeyboardInterrupt:
        raise Stopped(NOTHING_KEPT, 130) from None
    for warning in result["warnings"]:
        errors.print(f"mxrl: warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    for skipped in result["skipped"]:
        line = f"mxrl: warning: left out tensor '{skipped['name']}': {skipped['reason']}"
        errors.print(line, markup=False, highlight=False, soft_wrap=True)
    if json:
        print(to_json(result, indent=1))
    else:
        _printer(which)(result, Console())
        print(f"written: {folder / 'report.html'}, summary.json, tensors.jsonl")


@app.command()
def probe(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="gradient, temperature, deadzone, drift, fork, routing or all.")
    ],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a hub id, policy:dense.")],
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", "-r", help="As mxfp4+mbs+of; several times. The first one's error is taken apart."),
    ] = None,
    treatment: Annotated[
        list[str] | None,
        typer.Option(help="As mxfp4@scale, mxfp4@-scale, mxfp4@~scale; several times, instead of the usual ones."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="TASK", help="As gsm8k:FILE; shipped policies take chain by default."),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="How many, for every probe (default: each its own).")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of a completion (default: by the task).")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the problems, the samples and the noise.")] = 0,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|cuda:N", help="Where to compute.")] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="float32|bfloat16|float16", help="Of what isn't 4-bit (default: float32 on a CPU)."),
    ] = None,
    out: Annotated[Path | None, _out("Folder for the results (default probe-MODEL).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print probe.json instead of tables.")] = False,
    resume: Annotated[
        bool, typer.Option(help="Take what an earlier run has measured on the same model from --out, or start over.")
    ] = True,
) -> None:
    """Find out by experiment which component of the 4-bit error breaks what: gradients, rollouts, entropy, routing."""
    from rich.console import Console

    from mxrl.report.phases import quiet
    from mxrl.report.phases_console import Phases

    begun()
    folder = out or Path(f"probe-{_stem(model)}")
    try:
        # the stream itself: Console(stderr=True) would follow sys.stderr, which a phase may redirect
        with Phases(Console(file=sys.stderr), "probe", "loading torch and the model") as display, quiet():
            from mxrl.probes.run import CALL_ERRORS, settings_of
            from mxrl.report.probe import probe as run

            try:
                settings = settings_of(
                    name, model, recipe or [], treatment or [], task=task, prompts=prompts, device=device, dtype=dtype,
                    max_new_tokens=max_new_tokens, seed=seed,
                )  # fmt: skip
                result = run(settings, folder, display=display, resume=resume)
            except CALL_ERRORS as err:
                raise Stopped(str(err), 2) from None
    except KeyboardInterrupt:
        raise Stopped(
            f"interrupted; the probes that are done are kept in {folder}, and the same command goes on from there", 130
        ) from None
    if json:
        from mxrl.report.probe import to_text

        print(to_text(result))
    else:
        from mxrl.report.probe_console import print_probe

        print_probe(result, Console())
        print(f"written: {folder / 'probe.html'}, probe.json")


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Runs, or a folder of runs; or an analysis, or a probe.")
    ],
    out: Annotated[Path | None, _out("Folder for a comparison of runs (default report-runs).")] = None,
) -> None:
    """Compare runs of `mxrl train`: tables, curves, intervals over seeds. Or make an analysis's pages once more."""
    from mxrl.report.runs_files import CallError
    from mxrl.report.runs_files import report as run

    begun()
    try:
        said, warnings = run(folders, out)
    except CallError as err:
        raise Stopped(str(err), 2) from None
    for line in warnings:
        print(f"mxrl: {line}", file=sys.stderr)
    for line in said:
        print(line)


def _which(other: str | None, against: str | None, activations: str | None) -> tuple[str, str]:
    """("B" | "--against" | "--activations", its value), or ("", "") for an analysis of one checkpoint's weights."""
    given = [(n, v) for n, v in (("B", other), ("--against", against), ("--activations", activations)) if v is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"{given[0][0]} and {given[1][0]} ask for different analyses; give one of them")
    return given[0] if given else ("", "")


_IDLE = {  # the analyses, and the options that each makes no use of
    "": ("an analysis of one checkpoint's weights", "prompts"),
    "--cluster": ("a scan on a cluster", "prompts jobs memory device"),
    "B": ("a comparison of two checkpoints", "prompts jobs memory device cluster resume bits"),
    "--against": ("--against", "prompts cluster resume"),
    "--activations": ("--activations", "on_nonfinite jobs memory cluster resume"),
}


def _refuse_idle(context: typer.Context, which: str) -> None:
    """BadParameter for an option on the command line that the analysis would not look at."""
    what, idle = _IDLE[which]
    for name in idle.split():
        source = context.get_parameter_source(name)
        if source and source.name == "COMMANDLINE":
            word = f"--{'no-' if name == 'resume' and not context.params[name] else ''}{name.replace('_', '-')}"
            raise typer.BadParameter(f"{what} makes no use of it; leave it out", param_hint=word)


def _compared(
    which: str, model: str, second: str, recipes: list[str], errors: Any, *, out: Path, prompts: int,
    on_nonfinite: str, jobs: int | None, memory: int, device: str, bits: float,
) -> dict[str, Any]:  # fmt: skip
    """The summary of the analysis that `_which` named; shows its progress on `errors`."""
    from mxrl.report import compare
    from mxrl.report.compare_console import PromptBar
    from mxrl.report.console import Bar

    if which == "--activations":
        with PromptBar(errors) as prompt_bar:
            return compare.analyze_activations(
                model, second, recipes, out=out, prompts=prompts, device=device, progress=prompt_bar, bits=bits
            )
    with Bar(errors) as bar:
        if which == "B":
            return compare.analyze_diff(model, second, recipes, out=out, on_nonfinite=on_nonfinite, progress=bar)
        return compare.analyze_against(
            model, second, recipes, out=out, on_nonfinite=on_nonfinite, progress=bar, jobs=jobs, memory=memory,
            device=device, bits=bits,
        )  # fmt: skip


def _printer(which: str) -> Any:
    """What prints the summary of an analysis."""
    from mxrl.report import compare_console
    from mxrl.report.console import print_analysis

    return {
        "B": compare_console.print_diff,
        "--against": compare_console.print_against,
        "--activations": compare_console.print_activations,
    }.get(which, print_analysis)


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [--OPTION VALUE]...", help="A YAML file of options, and options over it."),
    ] = None,
    resume: Annotated[
        str, typer.Option(metavar="auto|never", help="Go on from the run's last checkpoint, or start over.")
    ] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """GRPO on a quantized policy: rollout and training in the recipe's arithmetic, importance-corrected.

    The options are the fields of mxrl.rl.config.TrainConfig, as in: --recipe mxfp4+mbs+of --steps 50 --out runs/a
    """
    config, given = _options_of_train(options or [])
    from mxrl.rl.config import TrainConfig

    run = TrainConfig.from_options(config, **given)  # a wrong option is known before torch's friends are loaded
    from mxrl.rl import ranks
    from mxrl.rl.train import train as start

    begun()
    summary = start(run, resume=resume)
    ranks.finish()
    if ranks.rank():
        return
    if json:
        from mxrl.report.summary import to_json

        print(to_json(summary, indent=1))
    elif None not in (summary["accuracy_before"], summary["accuracy_after"]):
        print(f"greedy accuracy {summary['accuracy_before']:.4f} → {summary['accuracy_after']:.4f}; see {run.out}")
    if summary["status"] == "interrupted":
        raise Stopped("", 130)  # the run has said so, and how to go on
    if summary["status"] != "done":  # it has ended earlier, and raised an error then
        raise Stopped(f"{run.out} holds a run that has {summary['status']}: {summary['reason']}", 1)


@app.command()
def demo(
    out: Annotated[Path, _out("Folder for the page and the numbers.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the problems, the samples and the noise.")] = 0,
) -> None:
    """Show on a small policy what MXFP4 costs and what the corrections give back: about three minutes on two cores."""
    from rich.console import Console

    from mxrl.report.demo_console import print_demo
    from mxrl.report.phases_console import Phases

    begun()
    try:
        # the stream itself: Console(stderr=True) would follow sys.stderr, which a phase redirects
        with Phases(Console(file=sys.stderr), "demo", "loading torch, transformers and trl") as display:
            from mxrl.demo import Settings
            from mxrl.demo import demo as run

            result = run(out, Settings(seed=seed), display=display)
    except KeyboardInterrupt:
        raise Stopped(
            f"interrupted; what is done is kept in {out}, and the same command goes on from there", 130
        ) from None
    print_demo(result, Console())
    print(f"written: {out / 'demo.html'}, demo.json")


def _options_of_train(words: list[str]) -> tuple[str | None, dict[str, str]]:
    """`run.yaml --steps 50 --lr=1e-4 --save-model`: the file (or None), {"steps": "50", …, "save_model": "true"}."""
    rest = list(words)
    config = rest.pop(0) if rest and not rest[0].startswith("--") else None
    options: dict[str, str] = {}
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise typer.BadParameter(f"'{name}' is no option; write --OPTION VALUE", param_hint="OPTION")
        if not has_value:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        options[name[2:].replace("-", "_")] = value
    return config, options


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
        if code == 130:  # what typer makes of a KeyboardInterrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except Stopped as stop:
        return fail(str(stop), stop.code)
    except (KeyboardInterrupt, typer.Abort):
        return fail("interrupted", 130)
    except BrokenPipeError:  # whoever read our output has gone; Python must not try to flush it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as err:
        if _STATE["traceback"]:
            raise
        return explain(err)


if __name__ == "__main__":
    sys.exit(main())
