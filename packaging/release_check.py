"""Test a wheel in a fresh environment without a compiler: install, answer, serve, uninstall.

    python packaging/release_check.py dist/hotset-*.whl [--model FILE]

Needs the network: the dependencies come from PyPI, and the demo model is downloaded unless --model names a
file. Prints its measurements. The first failure ends it with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
_VENDORED = ("marked", "highlight", "temml", "pdf")
NOTICES = ("LICENSE", "THIRD_PARTY_NOTICES.md", *(f"{name}.LICENSE" for name in _VENDORED))
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cl", "cmake", "ninja", "make")
WINDOWS = os.name == "nt"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file in place of the demo model")
    parser.add_argument("--sbom", type=Path, help="where to write the bill of materials")
    options = parser.parse_args()
    model = str(Path(options.model).resolve()) if Path(options.model).is_file() else options.model
    check_wheel(options.wheel)
    with tempfile.TemporaryDirectory() as folder:
        stranger = Stranger.made(Path(folder))
        stranger.install(options.wheel.resolve())
        check_program(stranger)
        check_run(stranger, model)
        check_serve(stranger, model)
        if options.sbom:
            script = ROOT / "packaging" / "sbom.py"
            stranger.run(stranger.python, script, "serve", "-o", options.sbom.resolve())
        check_uninstall(stranger)
    say("all is well")


def say(text: str) -> None:
    print(f"release check: {text}", flush=True)


def expect(right: bool, wrong: str) -> None:
    if not right:
        sys.exit(f"release check: {wrong}")


def check_wheel(wheel: Path) -> None:
    """Check the version, licences and man pages of the wheel, without installing it."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    expect(wheel.name.startswith(f"hotset-{version}-"), f"{wheel.name} is not of version {version}")
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    expect(f"\n## {version}" in changes, f"CHANGELOG.md has no section {version}")
    names = ZipFile(wheel).namelist()
    for notice in NOTICES:
        found = any(re.search(rf"dist-info/licenses/(.*/)?{re.escape(notice)}$", name) for name in names)
        expect(found, f"the wheel has no {notice}")
    expect(any(name.endswith("share/man/man1/hotset.1") for name in names), "the wheel has no man pages")
    say(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(names)} files")


@dataclass(frozen=True)
class Stranger:
    """A virtual environment, a home folder, and a PATH without a compiler."""

    environment: Path
    home: Path

    @classmethod
    def made(cls, folder: Path) -> Stranger:
        one = cls(folder / "environment", folder / "home")
        one.home.mkdir()
        venv.create(one.environment, with_pip=True)
        found = [name for name in COMPILERS if shutil.which(name, path=one.variables()["PATH"])]
        expect(not found, f"there is a compiler in PATH: {found}")
        return one

    @property
    def scripts(self) -> Path:
        return self.environment / ("Scripts" if WINDOWS else "bin")

    @property
    def python(self) -> Path:
        return self.scripts / ("python.exe" if WINDOWS else "python")

    @property
    def hotset(self) -> Path:
        return self.scripts / ("hotset.exe" if WINDOWS else "hotset")

    @property
    def store(self) -> Path:
        return self.home / "store"

    def variables(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "HOTSET", "VIRTUAL_ENV", "CC", "CXX", "CMAKE"))
        }  # fmt: skip
        named = dict.fromkeys(("HOME", "USERPROFILE"), str(self.home))
        return kept | named | {"PATH": str(self.scripts), "HOTSET_HOME": str(self.store), "TERM": "dumb"}

    def run(self, *command: object) -> str:
        done = subprocess.run(
            list(map(str, command)),
            env=self.variables(),
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
        )
        expect(done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def install(self, wheel: Path) -> None:
        begin = time.perf_counter()
        self.run(
            self.python,
            "-m",
            "pip",
            "install",
            "-q",
            "--only-binary",
            ":all:",
            "--no-cache-dir",
            f"{wheel}[serve]",
        )
        self.run(self.python, "-m", "pip", "check")
        say(f"installed in {time.perf_counter() - begin:.0f} s, no package compiled")

    def files(self) -> list[str]:
        """Return the environment's files whose path contains "hotset"."""
        paths = (path.relative_to(self.environment) for path in self.environment.rglob("*") if path.is_file())
        return sorted(str(path) for path in paths if "hotset" in str(path))


def check_program(stranger: Stranger) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    said = stranger.run(stranger.hotset, "--version").strip()
    expect(said == f"hotset {version}", f"hotset --version says {said!r}")
    chosen = json.loads(stranger.run(stranger.hotset, "doctor", "--json"))["kernels"]["chosen"]
    if bash := shutil.which("bash"):  # the script is for the shell that calls hotset
        script = stranger.run(bash, "-c", f"'{stranger.hotset}' --show-completion; exit $?")
        expect("_HOTSET_COMPLETE" in script, "no completion")
    timed = "import time; t = time.perf_counter(); import hotset; print(time.perf_counter() - t)"
    seconds = min(float(stranger.run(stranger.python, "-c", timed)) for _ in range(3))
    say(f"kernels {chosen}; import hotset takes {1000 * seconds:.0f} ms")


def check_run(stranger: Stranger, model: str) -> None:
    command = (stranger.hotset, "run", model, "What is photosynthesis?", "--temp", "0", "-n", "16", "--json")
    answers = [json.loads(stranger.run(*command)) for _ in range(2)]
    expect(len(answers[0]["tokens"]) > 1, f"hotset run answered {answers[0]}")
    expect(answers[0]["text"] == answers[1]["text"], "two greedy answers differ")
    say(f"hotset run: {answers[1]['predicted_per_second']:.0f} t/s, {answers[1]['text'][:60]!r}")


@contextmanager
def serving(stranger: Stranger, model: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the server, and yield its process and address once it listens."""
    command = [str(stranger.hotset), "serve", model, "--port", "0", "--alias", "checked"]
    with subprocess.Popen(
        command, env=stranger.variables(), cwd=stranger.home, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            told = ""
            for line in process.stderr:
                told += line
                if listening := re.search(r"listening on (http://\S+?:\d+)", line):
                    yield process, listening[1]
                    return
            expect(False, f"hotset serve ended:\n{told}")
        finally:
            process.kill()


def check_serve(stranger: Stranger, model: str) -> None:
    with serving(stranger, model) as (process, address):
        deadline = time.monotonic() + 600
        while ask(f"{address}/health") is None:
            expect(process.poll() is None and time.monotonic() < deadline, "the server does not become ready")
            time.sleep(0.2)
        body = {"model": "checked", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        reply = ask(f"{address}/v1/chat/completions", body)
        expect(reply is not None and bool(reply["choices"][0]["message"]["content"]), f"no answer: {reply}")
        if not WINDOWS:
            process.send_signal(signal.SIGTERM)
            expect(process.wait(60) == 0, "the server does not end well")
    say("hotset serve: healthy, answered a chat, ended")


def ask(url: str, body: dict[str, object] | None = None) -> dict[str, object] | None:  # type: ignore[type-arg]
    """Return the JSON of a reply; None after an error."""
    data = json.dumps(body).encode() if body is not None else None
    try:
        with urllib.request.urlopen(url, data, timeout=120) as reply:
            return json.loads(reply.read())  # type: ignore[no-any-return]
    except OSError:
        return None


def check_uninstall(stranger: Stranger) -> None:
    stranger.run(stranger.python, "-m", "pip", "uninstall", "-q", "-y", "hotset")
    left = stranger.files()
    expect(not left, f"uninstalling leaves {left[:5]}")
    others = [path.name for path in stranger.home.iterdir() if path != stranger.store]
    expect(not others, f"hotset left {others} in the home folder")
    say("uninstalled: nothing is left but the store")


if __name__ == "__main__":
    main()
