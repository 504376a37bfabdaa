"""A name means one thing: two classes of the package never share one, private and nested ones included."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import hotset


def shared_names(package: Path) -> dict[str, list[str]]:
    """Return the classes that share a name: name → modules."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(path.relative_to(package).as_posix())
    return {name: found for name, found in modules.items() if len(found) > 1}


def test_no_two_classes_share_a_name() -> None:
    assert shared_names(Path(hotset.__file__).parent) == {}


def test_shared_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Row: ...\nclass _Part: ...\nclass Column: ...\n")
    (tmp_path / "b.py").write_text("class Row:\n  class Column: ...\ndef f():\n  class _Part: ...\n")
    assert shared_names(tmp_path) == {name: ["a.py", "b.py"] for name in ("Row", "_Part", "Column")}
