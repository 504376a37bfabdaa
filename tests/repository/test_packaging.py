"""The package's dependencies are its imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

from paths import ROOT


def imported_packages() -> set[str]:
    """Return the top-level names that src/hotset imports from other packages, anywhere in a file."""
    names: set[str] = set()
    for path in (ROOT / "src" / "hotset").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module or "")
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"hotset"}


def test_dependencies_are_the_imports() -> None:
    """Check that each import is a dependency, or a dependency of an extra that its module requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name != "dev"}
    requirements = [*project["dependencies"], *(need for needs in extras.values() for need in needs)]
    listed = [re.match(r"opentelemetry|[\w-]+", requirement) for requirement in requirements]  # a namespace
    by_name = {"httptools"}  # uvicorn's http="httptools"
    parts = {"pydantic_core"}  # of pydantic
    imported_as = {"pyyaml": "yaml", "pyzmq": "zmq", "pillow": "PIL"}
    names = {match[0].replace("-", "_") for match in listed if match}
    assert {imported_as.get(name, name) for name in names} == imported_packages() - parts | by_name


def test_doctor_shows_the_dependencies() -> None:
    from hotset.cli.doctor import PACKAGES

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everywhere = {re.split("[>;]", r)[0] for r in project["dependencies"] if ";" not in r}
    assert set(PACKAGES) == everywhere | {"hotset"}


def test_a_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    """Check data files too (the server's page, the table of devices), in a wheel without the native core."""
    build = (
        "import sys; from scikit_build_core.build import build_wheel; "
        "build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
    )
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(ZipFile(wheel).namelist())
    package = ROOT / "src" / "hotset"
    here = {str(path.relative_to(package.parent)) for path in package.rglob("*") if path.is_file()}
    assert {name for name in here if "__pycache__" not in name and not name.endswith(".so")} <= packed
    names = ("marked", "highlight", "temml", "pdf")
    vendored = [f"src/hotset/server/page/vendor/{name}.LICENSE" for name in names]
    for licence in (*vendored, "THIRD_PARTY_NOTICES.md"):
        assert any(name.endswith(f"licenses/{licence}") for name in packed)


def test_child_processes_import_nothing_of_the_current_folder() -> None:
    """Require -P or -I: otherwise `-m` and `-c` put the current folder first in the search path."""
    sources = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")]
    started = [one for text in sources for one in re.findall(r"\[sys\.executable[^,\]]*,\s*([^,\]]*)", text)]
    assert len(started) >= 4
    assert set(started) <= {'"-I"', '"-P"'}
