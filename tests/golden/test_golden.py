"""Compares the server's replies and the reports of the command line with stored JSON.

A change that is meant to alter one of them rewrites the file, in a commit that says so:

    python tests/golden/test_golden.py --write [NAME ...]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":  # pytest does this for tests
    sys.path[:0] = [
        str(Path(__file__).resolve().parents[1] / folder) for folder in ("support", "", "../bench")
    ]

from cases import needs_backends, quick_are
from golden import files, machines, replies

from hotset.server.app import create_app
from hotset.server.catalogue import Catalogue
from hotset.server.models import Models
from hotset.server.service import Service

Golden = Callable[[Path], Any]


def server_files() -> dict[str, Golden]:
    """Return, by file name, functions that compute the content of a file in an empty folder."""

    made: dict[str, Golden] = {
        f"server-{replies.name_of(*route)}": partial(replies.replies, cases, route)
        for route, cases in replies.CASES.items()
    }
    return made | {
        "server-refusals": partial(replies.replies, replies.REFUSALS, ("", "")),
        "server-several-models": replies.several,
    }


def machine_files() -> dict[str, Golden]:
    """Return functions that compute the reports of the command line on other machines."""
    return {f"machine-{name}": partial(machines.reports, name) for name in machines.NAMES}


FILES = server_files() | machine_files()


def libraries_of(name: str) -> tuple[str, ...]:
    """Return the libraries on whose versions a file's content depends."""
    if name.startswith("machine-"):
        return ("scipy",)
    return ("fastapi", "pydantic") if name.endswith("openapi-json") else ()


@pytest.mark.parametrize(
    "name", quick_are(set(server_files()) | {"machine-rtx-4090", "machine-laptop-8gb"}, FILES)
)
def test_content_equals_the_stored_file(name: str, tmp_path: Path) -> None:
    if name.startswith("machine-") or name == "server-get-plan":
        needs_backends("triton")  # plans of cards and of a simulated device
    found = FILES[name](tmp_path)
    stored = files.stored(name, libraries_of(name))
    assert files.near(found, stored) == stored


def test_every_route_has_a_file() -> None:
    app = create_app(Service(lambda: pytest.fail("nothing is loaded"), name="none"))
    assert set(replies.routes_of(app.routes)) == set(replies.CASES)
    several = create_app(Models(Catalogue({}), budget=0))
    asked = {(method, str(case.path).partition("?")[0]) for method, case in replies.SEVERAL} | {
        ("GET", "/models/events")
    }
    assert set(replies.routes_of(several.routes)) - set(replies.CASES) <= asked


def test_every_file_has_a_test() -> None:
    assert {path.stem for path in files.FOLDER.iterdir()} == set(FILES)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("names", nargs="*", help="files; all without one")
    names = parser.parse_args().names
    files.FOLDER.mkdir(exist_ok=True)
    for path in files.FOLDER.iterdir():
        if path.stem not in FILES:
            path.unlink()
    for name in names or FILES:
        with tempfile.TemporaryDirectory() as folder:
            files.write(name, FILES[name](Path(folder)), libraries_of(name))


if __name__ == "__main__":
    main()
