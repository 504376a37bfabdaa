"""Puts small faults into hotset, one at a time, and prints the ones that no test notices.

    python tests/mutation/mutants.py -n 200 --seed 1 'src/hotset/sparsity/*.py' 'csrc/ops/*.cpp'

Works in a copy of the repository under the folder for temporary files (`--scratch`). The copy has a virtual
environment with the packages of this one and the copy's hotset; the repository itself is never touched. The
script notes once per version of the tests which tests run each line. It keeps these notes and the outcomes
next to the copy, so an interrupted run resumes there. For each mutant it runs the tests of its line, the
quick ones first, until one fails or time is up (a timeout also counts as noticed). For a native mutant it
compiles only the changed file and runs the tests that step the CPU backend.

Prints the survivors with their diffs, and their number. `--list` prints the known outcomes again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import fnmatch
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import coverage
import faults
import numpy as np
from faults import Fault

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ("src/hotset/*.py", "csrc/ops/*.cpp")
QUICK = 20.0  # seconds of tests in the first attempt; most faults fall there
# Tests run these in their own processes, or in an interpreter that coverage does not see.
UNSEEN = {
    "src/hotset/backends/triton/triton_kernels.py": ("tests/backends/triton/test_gpu_triton.py",),
    "src/hotset/backends/triton/spin_kernel.py": ("tests/backends/triton/test_cold_spin.py",),
}
# Some lines of these files run only in child processes. A line without a test is tried with all of these
# tests.
SPAWNED = {
    "src/hotset/cli/main.py": ("tests/cli/test_terminal.py", "tests/cli/test_cli.py"),
    "src/hotset/text/jinja_child.py": ("tests/text/test_chat.py",),
}
LEFT_OUT = (
    "tests/repository/test_packaging.py",
    "tests/backends/cpu/test_neon.py",
)  # builds, which no mutant changes


@dataclass(frozen=True)
class Covered:
    """The tests that ran each line.

    lines: file → line → contexts that ran it. seconds: by test. failed: tests that fail without a fault.
    """

    lines: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]
    failed: set[str]

    def tests(self, fault: Fault) -> list[str]:
        """Return the tests that run the line, the quickest first; whole files if only fixtures ran it."""
        if fault.file in UNSEEN:
            return list(UNSEEN[fault.file])
        if fault.file.startswith("csrc/"):
            found = self._of(
                "src/hotset/backends/cpu/backend.py",
                _lines_of("src/hotset/backends/cpu/backend.py", "def run("),
            )
        else:
            around = _function_of(fault.file, fault.line)
            # A line at import runs only for the first importer, but all tests of the file use its result.
            found = self._of(fault.file, [fault.line]) if around else set()
            found = found or self._of(fault.file, around or self.lines.get(fault.file, {}))
        found = {context for context in found if "::" in context} or {
            test for context in found for test in self.seconds if test.startswith(f"{context}::")
        }
        wanted = {test for test in found if test not in self.failed and not test.startswith(LEFT_OUT)}
        if not wanted:
            return list(SPAWNED.get(fault.file, ()))
        return sorted(wanted, key=lambda test: (self.seconds.get(test, 1.0), test))

    def files_about(self, tests: list[str], n: int = 2) -> set[str]:
        """Return the test files whose tests are among these with the largest share."""
        found = Counter(test.split("::")[0] for test in tests)
        of_all = Counter(test.split("::")[0] for test in self.seconds)
        ranked = sorted(found, key=lambda file: (-found[file] / max(of_all[file], found[file]), file))
        return set(ranked[:n])

    def _of(self, file: str, lines: Iterable[int]) -> set[str]:
        known = self.lines.get(file, {})
        return set().union(*(known.get(line, set()) for line in lines))


def _lines_of(file: str, start: str) -> range:
    """Return the lines of a function's body, up to the next line with the indentation of its first line."""
    lines = (ROOT / file).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip().startswith(start))
    indent = len(lines[first]) - len(lines[first].lstrip())
    rest = (
        i
        for i in range(first + 1, len(lines))
        if lines[i].strip() and not lines[i].startswith(" " * (indent + 1))
    )
    return range(first + 2, next(rest, len(lines)) + 1)


def _function_of(file: str, line: int) -> range | None:
    """Return the body's lines of the innermost function around a line; None at module level."""
    found = None
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            body = range(node.body[0].lineno, node.end_lineno + 1)
            if line in body and (found is None or len(body) < len(found)):
                found = body
    return found


class Scratch:
    """A copy of the repository to put faults into."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = path / "kept"  # contexts and outcomes, which outlive a copy
        self.tree = path / "tree"
        self.python = path / "venv" / "bin" / "python"
        self.kept.mkdir(parents=True, exist_ok=True)

    def copy(self) -> None:
        """Copy the files that git tracks or would track, and build the native module."""
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        names = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
        if self.tree.exists():
            for path in self.tree.rglob("*"):
                known = str(path.relative_to(self.tree))
                generated = known.startswith("build/") or path.suffix in (".so", ".pyc")
                if path.is_file() and known not in names and not generated:
                    path.unlink()
        for name in names:
            source, target = ROOT / name, self.tree / name
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)  # keep its time, so that build outputs stay valid
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.path / "venv"], check=True)
        # Python reads no .pth files in folders that a .pth names, so the editable install stays out.
        site = Path(
            sysconfig.get_path(
                "purelib", vars={"base": str(self.path / "venv"), "platbase": str(self.path / "venv")}
            )
        )
        packages = [folder for folder in sys.path if Path(folder).name == "site-packages"]
        (site / "tree.pth").write_text("\n".join([str(self.tree / "src"), *packages, ""]))
        self.build(quiet=True)

    def build(self, quiet: bool = False) -> bool:
        """Compile the changes and put the module next to the Python files. Return False if that fails."""
        build = self.tree / "build" / "mutants"
        tools = Path(sys.executable).parent
        env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        env |= {"CCACHE_BASEDIR": str(self.tree), "CCACHE_NOHASHDIR": "1"}
        if not (build / "build.ninja").exists():
            launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
            subprocess.run(
                [tools / "cmake", "-S", self.tree, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                 f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}",
                 f"-Dnanobind_DIR={_nanobind()}", *launcher],
                env=env, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        done = subprocess.run(
            [tools / "cmake", "--build", build, "--target", "_core"], env=env, capture_output=True
        )
        if done.returncode:
            if quiet:
                sys.exit(done.stdout.decode()[-3000:] + done.stderr.decode())
            return False
        for module in build.glob("_core*.so"):
            shutil.copy2(module, self.tree / "src" / "hotset")
        return True

    def write(self, name: str, text: str) -> None:
        path = self.tree / name
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # it is validated by seconds and size, and a fault may change neither

    def pytest(
        self, arguments: list[str], timeout: float | None, env: dict[str, str] | None = None
    ) -> int | None:
        """Run tests in the copy. Return the exit status, or None after a timeout."""
        command = [str(self.python), *arguments]
        settings = {**os.environ, "HOTSET_HOME": str(self.path / "home"), **(env or {})}
        with subprocess.Popen(
            command, cwd=self.tree, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:  # the session includes all processes that the tests started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    # -- which test runs which line ------------------------------------------------------------------

    def cover(self) -> Covered:
        """Run each test file with coverage, once per version of the file and of the sources that it runs."""
        folder = self.kept / "contexts"
        folder.mkdir(exist_ok=True)
        lines: dict[str, dict[int, set[str]]] = {}
        seconds: dict[str, float] = {}
        failed: set[str] = set()
        for path in sorted((self.tree / "tests").rglob("test_*.py")):
            name = path.relative_to(self.tree).as_posix()
            if name in LEFT_OUT:
                continue
            data, times = folder / f"{path.stem}.coverage", folder / f"{path.stem}.json"
            stamp = folder / f"{path.stem}.stamp"
            if not stamp.exists() or stamp.read_text() != self._version(name, data):
                print(f"noting what {name} runs", flush=True)
                for old in (data, times):
                    old.unlink(missing_ok=True)
                measured = ["-m", "coverage", "run", f"--data-file={data}", "--source=src/hotset"]
                tests = ["-m", "pytest", "-q", "-p", "contexts", "-p", "no:cacheprovider", name]
                plugin = {"PYTHONPATH": str(Path(__file__).parent), "HOTSET_MUTANTS_TIMES": str(times)}
                self.pytest([*measured, *tests], None, plugin)
                if not times.exists():
                    sys.exit(f"{name} could not be run in {self.tree}")
                stamp.write_text(self._version(name, data))
            told = json.loads(times.read_text())
            seconds |= told["seconds"]
            failed |= set(told["failed"])
            for source, found in _measured(data).items():
                known = lines.setdefault(source, {})
                for line, contexts in found.items():
                    known.setdefault(line, set()).update(context for context in contexts if context)
        for test in sorted(failed):
            print(f"fails without a fault, and is left out: {test}")
        return Covered(lines, seconds, failed)

    def _version(self, name: str, data: Path) -> str:
        """Return a hash of a test file and of the sources that it runs; other sources may change."""
        digest = hashlib.sha256((self.tree / name).read_bytes())
        for source in sorted(_measured(data)):
            path = self.tree / source
            digest.update(source.encode() + (path.read_bytes() if path.exists() else b""))
        return digest.hexdigest()

    # -- one mutant ----------------------------------------------------------------------------------

    def outcome(self, fault: Fault, covered: Covered, whole: float) -> str:
        """Return "killed", "timed out", "not compiled", "not run" (no test runs the line) or "alive"."""
        tests = covered.tests(fault)
        if not tests:
            return "not run"
        text = (ROOT / fault.file).read_text()
        native = fault.file.startswith("csrc/")
        self.write(fault.file, fault.apply(text))
        try:
            if native and not self.build():
                return "not compiled"
            # First the files about this line (most of their tests run it), since imports cost more than
            # tests; then the quick tests of other files; then the rest.
            near = covered.files_about(tests)
            first = _within(QUICK, [test for test in tests if test.split("::")[0] in near], covered)
            quick = _within(QUICK, [test for test in tests if test not in first], covered)
            rest = [test for test in tests if test not in first and test not in quick]
            rest = _within(whole, rest, covered)
            for part in (first, quick, rest):
                if part:
                    expected = sum(covered.seconds.get(test, 5.0) for test in part)
                    arguments = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *part]
                    status = self.pytest(arguments, 60 + 6 * expected)
                    if status is None:
                        return "timed out"
                    if status not in (0, 5):
                        return "killed"
            return "alive"
        finally:
            self.write(fault.file, text)
            if native:
                self.build(quiet=True)


def _measured(data: Path) -> dict[str, dict[int, list[str]]]:
    """Return source → line → contexts of a coverage file, or {} if the file is missing."""
    if not data.exists():
        return {}
    found = coverage.CoverageData(str(data))
    found.read()
    return {
        "src/" + file.partition("/src/")[2]: contexts
        for file in found.measured_files()
        if (contexts := found.contexts_by_lineno(file))
    }


def _within(seconds: float, tests: list[str], covered: Covered) -> list[str]:
    """Return the first tests that together take at most `seconds`, but at least one."""
    spent = np.cumsum([covered.seconds.get(test, 5.0) for test in tests])
    return tests[: max(int((spent <= seconds).sum()), 1)]


def _nanobind() -> str:
    import nanobind

    return nanobind.cmake_dir()


def key(fault: Fault, text: str) -> str:
    """Return a key of a fault in a version of a file, to remember that it was tried."""
    of = (fault.file, hashlib.sha256(text.encode()).hexdigest(), fault.at, fault.old, fault.new)
    return hashlib.sha256(repr(of).encode()).hexdigest()[:16]


def diff(fault: Fault) -> str:
    text = (ROOT / fault.file).read_text()
    before, after = text.splitlines(), fault.apply(text).splitlines()
    lines = list(difflib.unified_diff(before, after, fault.file, fault.file, "", "", n=2, lineterm=""))
    return "\n".join([f"--- {fault.file}:{fault.line} ({fault.kind})", *lines[2:]])


def draw(patterns: Iterable[str], n: int, seed: int) -> list[Fault]:
    """Draw n faults of the files with equal probability; a seed's first faults do not depend on n."""
    names = [
        str(path.relative_to(ROOT))
        for folder, suffix in (("src/hotset", "*.py"), ("csrc/ops", "*.cpp"))
        for path in sorted((ROOT / folder).rglob(suffix))
    ]
    wanted = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    found = [fault for name in wanted for fault in faults.of_file(ROOT / name, name)]
    random.Random(seed).shuffle(found)
    return found[:n]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=faults.RULES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("files", nargs="*", default=DEFAULT, help="patterns; * crosses folders")
    parser.add_argument("-n", type=int, default=200, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="end after this time; the next run goes on")
    parser.add_argument(
        "--whole", type=float, default=300.0, help="seconds of tests a survivor meets at most"
    )
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "hotset-mutants")
    parser.add_argument("--list", action="store_true", help="print what is known and try nothing")
    parser.add_argument("--again", action="store_true", help="try survivors again: tests have been added")
    options = parser.parse_args()

    drawn = draw(options.files, options.n, options.seed)
    keys = {fault: key(fault, (ROOT / fault.file).read_text()) for fault in drawn}
    scratch = Scratch(options.scratch)
    log = scratch.kept / "outcomes.jsonl"
    known: dict[str, str] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        entry = json.loads(line)
        known[entry["key"]] = entry["outcome"]
    if not options.list:
        scratch.copy()
        covered = scratch.cover()
        begun = time.monotonic()
        for i, fault in enumerate(drawn):
            if options.minutes and time.monotonic() - begun > 60 * options.minutes:
                break
            before = known.get(keys[fault])
            if before is None or (options.again and before in ("alive", "not run")):
                known[keys[fault]] = scratch.outcome(fault, covered, options.whole)
                with log.open("a") as file:
                    file.write(json.dumps({"key": keys[fault], "outcome": known[keys[fault]]}) + "\n")
                print(f"{i + 1}/{len(drawn)} {known[keys[fault]]}: {fault.file}:{fault.line}", flush=True)
    counts: dict[str, int] = {}
    for fault in drawn:
        counts[known.get(keys[fault], "not tried")] = counts.get(known.get(keys[fault], "not tried"), 0) + 1
        if known.get(keys[fault]) in ("alive", "not run"):
            print(f"\n{known[keys[fault]]} {diff(fault)}")
    print(f"\n{len(drawn)} mutants: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
