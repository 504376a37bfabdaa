"""Completion of subcommands, options and models in shells."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import needs_core, write_model

pytestmark = needs_core


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with `hotset` in PATH, a home folder, and a store with one model."""
    program = tmp_path / "bin" / "hotset"
    program.parent.mkdir()
    code = "from hotset.cli.main import main; main()"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{code}' \"$@\"\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "store" / "models").mkdir(parents=True)
    write_model(tmp_path / "store" / "models" / "mine.gguf")
    (tmp_path / "user").mkdir()
    return {
        **os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path / "user"),
        "HOTSET_HOME": str(tmp_path / "store"),
    }  # fmt: skip


def completed(environment: dict[str, str], *command: str, **asks: str) -> list[str]:
    done = subprocess.run(
        command, env={**environment, **asks}, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


LINES = [
    ("hotset ser", ["serve"]),
    ("hotset help", []),
    ("hotset run --sparsi", ["--sparsity"]),
    ("hotset run mine", ["mine"]),
    ("hotset show smollm2", ["smollm2-135m"]),
    ("hotset run ./no-name-of-a-model", []),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not here")
@pytest.mark.parametrize(("line", "expected"), LINES)
def test_bash_completes(environment: dict[str, str], line: str, expected: list[str]) -> None:
    words = line.split(" ")
    program = (
        'eval "$(hotset --show-completion)"; complete -p hotset >/dev/null || exit 1; '
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        '_hotset_completion hotset; echo "${COMPREPLY[@]}"'
    )
    assert completed(environment, "bash", "-c", program) == expected


@pytest.mark.parametrize(("line", "expected"), [LINES[0], LINES[3]])
def test_fish_and_zsh_get_completions(environment: dict[str, str], line: str, expected: list[str]) -> None:
    asks = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    found = completed(environment, "hotset", **asks, _HOTSET_COMPLETE="complete_fish")
    assert found[:1] == expected
    found = completed(environment, "hotset", **asks, _HOTSET_COMPLETE="complete_zsh")
    assert any(expected[0] in word for word in found)


def test_names_that_a_shell_could_execute_are_not_completed(environment: dict[str, str]) -> None:
    models = Path(environment["HOTSET_HOME"], "models")
    for name in ("odd (1)", "odd\\$(touch a)", "odd\\`touch a`", "odd;touch a", "odd\ntouch a", "odd'\""):
        shutil.copy(models / "mine.gguf", models / f"{name}.gguf")
    words = {"_TYPER_COMPLETE_ARGS": "hotset run odd", "COMP_WORDS": "hotset run odd", "COMP_CWORD": "2"}
    for shell in ("bash", "zsh"):
        found = completed(environment, "hotset", **words, _HOTSET_COMPLETE=f"complete_{shell}")
        assert "(1)" in " ".join(found)
        assert " ".join(found).count("odd") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_for_a_shell(environment: dict[str, str], shell: str) -> None:
    # Without this variable, the option has no value, and the shell of the test run is used.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    completed(environment, "hotset", "--install-completion", shell, **named)
    written = [path.read_text() for path in Path(environment["HOME"]).rglob("*") if path.is_file()]
    assert any("_HOTSET_COMPLETE" in text for text in written)
