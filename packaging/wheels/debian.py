"""Unpack Debian 13 into a folder, for AArch64 under qemu or for x86-64, and run hotset's wheel on its Python.

    python packaging/wheels/debian.py arm64             # set it up; run hashes, program, part of the suite
    python packaging/wheels/debian.py arm64 formats     # run the parts whose names contain the words
    python packaging/wheels/debian.py arm64 run -c "import hotset"
    python packaging/wheels/debian.py arm64 processors  # check the kernels of older processors, and hashes
    python packaging/wheels/debian.py amd64             # the same for x86-64, without an emulator

System packages come from the mirror that this machine's apt uses, hotset's requirements from PyPI. Both are
unpacked into build/debian-…; nothing is installed on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from elsewhere import NEEDS, check

from build import DIST, ROOT, run

RELEASE, PYTHON = "trixie", "3.13"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PACKAGES = [f"python{PYTHON}", "libstdc++6"]
MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}

# Processors of qemu: one with all features, the Raspberry Pi 5's Cortex-A76, the Raspberry Pi 3's A53.
PROCESSORS = {"max": "i8mm", "cortex-a76": "neon", "cortex-a53": "scalar"}
HASHES = ["dense/llama", "plain/llama/Q4_0"]  # together they have every tensor type

# Meant to take 20 minutes on two idle cores under qemu, which is 40 times slower. Skips the error bounds of
# attention, and backend tests that compare neither instruction sets nor with the reference.
KERNELS = ["tests/backends/cpu/test_kernels.py", "tests/backends/cpu/test_numerics.py"]
BACKEND = ["tests/backends/cpu/test_cpu_backend.py", "tests/backends/cpu/test_sparse_cpu.py"]
SUITE = {
    "kernels": [*KERNELS, "-k", "not test_attention"],
    "the CPU backend": [*BACKEND, "-k", "same_bits or references"],
    "formats": ["tests/formats/test_gguf.py", "tests/formats/test_quants.py", "tests/formats/test_mapped.py"],
    "files and the store": ["tests/test_files.py", "tests/offload/test_store.py"],
    "text": ["tests/text/test_special_tokens.py", "tests/text/test_output.py"],
}
# qemu itself fails an assertion in a process after `fork`, and does not report resident memory.
NOT_UNDER_QEMU = [
    "tests/offload/test_store.py::test_a_child_reads_with_threads_of_its_own",
    "tests/offload/test_store.py::test_memory_is_given_before_it_is_needed",
    "tests/formats/test_mapped.py::test_cached_pages_are_mapped_and_others_not_read",
]


class Debian:
    """A root folder of Debian packages, and a virtual environment with the root's Python."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.machine = MACHINES[architecture]
        self.place = ROOT / "build" / f"debian-{architecture}"
        self.root = self.place / "root"
        self.environment = self.place / "environment"
        self.python = self.environment / "bin" / "python"

    def set_up(self) -> None:
        if self.architecture == "arm64" and shutil.which("qemu-aarch64") is None:
            sys.exit("qemu-aarch64 is not installed: make test-deps (Debian: qemu-user)")
        if not self.root.exists():
            self._unpack_packages()
        if not self.python.exists():
            self._make_environment()
        found = sorted(DIST.glob(f"hotset-*-abi3-manylinux*_{self.machine}.whl"))
        if not found:
            sys.exit(f"dist/ has no wheel for {self.machine}: make wheels WHEELS=abi3-manylinux")
        self._install("--no-deps", found[-1])

    def _unpack_packages(self) -> None:
        """Download with apt, using separate lists and state, so that apt resolves Python's dependencies."""
        lists, archives = self.place / "lists", self.place / "archives"
        for folder in (lists, archives):
            (folder / "partial").mkdir(parents=True, exist_ok=True)
        state, source = self.place / "status", self.place / "sources.list"
        state.write_text("")
        source.write_text(f"deb [signed-by={KEYRING}] {_mirror()} {RELEASE} main\n")
        settings = {
            "Dir::Etc::sourcelist": source, "Dir::Etc::sourceparts": "/dev/null", "Dir::State::lists": lists,
            "Dir::State::status": state, "Dir::Cache": self.place, "Dir::Cache::archives": archives,
            "APT::Architecture": self.architecture, "APT::Architectures": self.architecture,
            "Acquire::Languages": "none",
        }  # fmt: skip
        apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in settings.items())]
        run(*apt, "update")
        run(*apt, "-y", "--no-install-recommends", "--download-only", "install", *PACKAGES)
        part = self.root.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (part / "usr" / name).mkdir(parents=True)
            (part / name).symlink_to(f"usr/{name}")
        for package in sorted(archives.glob("*.deb")):
            run("dpkg-deb", "-x", package, part)
        part.rename(self.root)

    def _make_environment(self) -> None:
        """Make the environment. Its Python is a script, so that hotset's child processes run the same way."""
        self._install("numpy", "pytest-xdist", *NEEDS)
        self.environment.joinpath("pyvenv.cfg").write_text(f"home = {self.root}/usr/bin\n")
        self.python.parent.mkdir(exist_ok=True)
        program = f'"{self.root}/usr/bin/python{PYTHON}"'
        if self.architecture == "arm64":
            command = f'qemu-aarch64 -L "{self.root}" -0 "$0" {program}'
        else:
            libraries = f"{self.root}/usr/lib/{self.machine}-linux-gnu"
            loader = f"{self.root}/lib64/ld-linux-x86-64.so.2"
            command = f'"{loader}" --argv0 "$0" --library-path "{libraries}" {program}'
        self.python.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        self.python.chmod(0o755)

    def _install(self, *words: object) -> None:
        """Install wheels for the other Python with the running Python's pip."""
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(17, 42)] + [
            f"manylinux2014_{self.machine}"
        ]
        options = [f"--platform={tag}" for tag in tags]
        packages = self.environment / "lib" / f"python{PYTHON}" / "site-packages"
        run(sys.executable, "-m", "pip", "install", "-q", *options, "--python-version", PYTHON, "--upgrade",
             "--only-binary", ":all:", "--target", packages, *words)  # fmt: skip

    def run(self, *words: str) -> tuple[int, str]:
        """Run Python and show its output. Returns the exit status and the output."""
        process = subprocess.Popen(
            [self.python, *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        return process.wait(), "".join(lines)


def _mirror() -> str:
    """Return the address from which this machine's apt gets Debian packages."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian", "Component: main"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [one for one in done.stdout.split() if "security" not in one]
    if not found:
        sys.exit("this machine's apt has no Debian mirror, which debian.py needs")
    return found[0]


def _processor(debian: Debian, name: str, kernels: str) -> bool:
    """Return whether hotset chooses these kernels on one of qemu's processors, with equal hashes."""
    os.environ["QEMU_CPU"] = name
    _, report = debian.run("-m", "hotset.cli.main", "doctor", "--json")
    chosen = json.loads(report)["kernels"]["chosen"]
    status, counted = debian.run("tests/platforms/hashes.py", *HASHES)
    right = chosen == kernels and status == 0
    print(f"{name:12} {'right' if right else 'WRONG'}  kernels {chosen}; {counted.strip().splitlines()[-1]}")
    return right


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in MACHINES:
        sys.exit(__doc__)
    debian = Debian(sys.argv[1])
    debian.set_up()
    if sys.argv[2:3] == ["run"]:
        sys.exit(debian.run(*sys.argv[3:])[0])
    if sys.argv[2:3] == ["processors"]:
        right = [_processor(debian, *one) for one in PROCESSORS.items()]
        sys.exit(not all(right))
    is_emulated = debian.architecture == "arm64"
    options = ["-n", str(os.cpu_count())]
    if is_emulated:
        options += [f"--deselect={test}" for test in NOT_UNDER_QEMU]
    suite = {name: [*options, *words] for name, words in SUITE.items()}
    sys.exit(not check(debian.run, suite, sys.argv[2:], is_emulated=is_emulated))


if __name__ == "__main__":
    main()
