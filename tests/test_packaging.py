"""What the package asks for is what it imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imported_packages() -> set[str]:
    """Top-level names that src/hotset imports from elsewhere, wherever in a file."""
    names: set[str] = set()
    for path in (ROOT / "src" / "hotset").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module or "")
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"hotset"}


def test_dependencies_are_the_imports() -> None:
    """What is imported is a dependency, or one of an extra (which the module that needs it asks for)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name != "dev"}
    requirements = [*project["dependencies"], *(need for needs in extras.values() for need in needs)]
    listed = [re.match(r"[\w-]+", requirement) for requirement in requirements]
    assert {match[0].replace("-", "_") for match in listed if match} == imported_packages()


def test_doctor_shows_the_dependencies() -> None:
    from hotset.cli.doctor import _PACKAGES

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everywhere = {re.split("[>;]", r)[0] for r in project["dependencies"] if ";" not in r}
    assert set(_PACKAGES) == everywhere | {"hotset"}
