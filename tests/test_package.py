"""What importing the package loads, and which way imports run."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jorca

PACKAGE = Path(jorca.__file__).parent
# A package may import from those named behind it, and from the modules at the top that name no other.
ALLOWED = {
    "scheduler": set(),
    "model": set(),
    "attention": set(),
    "checkpoint": {"model"},
    "sharding": {"model", "attention"},
    "frontend": {"scheduler"},
    "engine": {"scheduler", "model", "attention", "checkpoint", "sharding", "frontend"},
    "training": {"model", "checkpoint", "sharding", "engine", "frontend"},
    "bench": {"scheduler", "model", "attention", "checkpoint", "sharding", "engine"},
}
LEAVES = {"request", "output", "wire", "config", "_checks", "_fields", "_plot"}


@pytest.mark.parametrize(
    "module",
    [
        "jorca",
        "jorca.request",
        "jorca.output",
        "jorca.wire",
        "jorca.config",
        "jorca.checkpoint",
        "jorca.scheduler",
        "jorca.cli",
        "jorca.model.params",
        "jorca.frontend.inputs",
        "jorca.frontend.text",
        "jorca.engine.interfaces",
        "jorca.engine.engine",
        "jorca.engine.handle",
        "jorca.engine.packing",
        "jorca.engine.output",
        "jorca.engine.collector",
        "jorca.engine.sizing",
        "jorca.testing",
    ],
)
def test_importing_loads_no_jax(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules or 'jaxlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there_and_is_listed():
    assert sorted(jorca.__all__) == sorted(jorca._HOME)
    for name in jorca.__all__:
        assert getattr(jorca, name) is not None
        assert name in dir(jorca)
    with pytest.raises(AttributeError, match="no attribute 'Nobody'"):
        jorca.Nobody  # noqa: B018


def imports_of(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_one_way(package):
    for file in (PACKAGE / package).rglob("*.py"):
        for name in imports_of(file):
            parts = name.split(".")
            if parts[0] == "jorca" and len(parts) > 1:
                assert parts[1] in ALLOWED[package] | LEAVES | {package}, f"{file.name} imports {name}"


def test_private_names_of_jax_appear_nowhere():
    for file in PACKAGE.rglob("*.py"):
        assert "jax._src" not in file.read_text(), file
