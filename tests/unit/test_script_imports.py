"""Scripts under experiments/ and benchmarks/ import names that exist: of mxrl, and of the scripts beside them.

Read, never imported: many of them need packages or hardware that a test has not.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(file for folder in ("experiments", "benchmarks") for file in (ROOT / folder).rglob("*.py"))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's statements, those inside `if` and `try` too, but not those of functions and classes."""
    for statement in body:
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try):
                yield from statements(getattr(statement, block, []))


@functools.cache
def names(file: Path) -> frozenset[str]:
    """What a module binds, and for a package its modules."""
    found = {p.stem for p in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for statement in statements(ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.ImportFrom | ast.Import):
            found.update(a.asname or a.name.split(".")[0] for a in statement.names)
        else:
            found.update(n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return frozenset(found)


def file_of(module: str, script: Path) -> Path | None:
    """Where a module of mxrl or beside the script lies; None for other packages. A module of mxrl's must be there."""
    base = (ROOT / "src" if module.split(".")[0] == "mxrl" else script.parent).joinpath(*module.split("."))
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    assert file.is_file() or not module.startswith("mxrl"), f"there is no module {module}"
    return file if file.is_file() else None


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_script_imports_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                file_of(alias.name, script)
        elif isinstance(node, ast.ImportFrom) and node.module and (file := file_of(node.module, script)):
            missing = {alias.name for alias in node.names} - names(file)
            assert not missing, f"{node.module} has no {sorted(missing)}"


def test_a_name_that_is_not_there_is_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def late():\n    from mxrl.decompose import ErrorStats, no_such_name\n")
    with pytest.raises(AssertionError, match=r"mxrl\.decompose has no \['no_such_name'\]"):
        test_what_a_script_imports_is_there(script)
