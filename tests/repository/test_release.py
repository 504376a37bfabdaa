"""The parts of a release: one version, the licences of bundled code, a bill of materials and its check."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"


def test_the_version_is_in_one_place() -> None:
    folders = ("src", "packaging", "docs/guides", "docs/man", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [ROOT / name for name in ("CMakeLists.txt", "README.md", "Makefile", "docs/conf.py")]
    texts = {path: path.read_bytes() for path in files if path.suffix not in (".so", ".pyc")}
    version = PROJECT["version"].encode()
    assert not [path for path, text in texts.items() if re.search(rb"\b%b\b" % re.escape(version), text)]
    assert f"\n## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def bill(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    out = tmp_path_factory.mktemp("sbom") / "hotset.cdx.json"
    script = ROOT / "packaging" / "sbom.py"
    subprocess.run([sys.executable, script, "serve", "-o", out], check=True, capture_output=True)
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_the_bill_of_materials_has_every_package(bill: dict[str, object]) -> None:
    components = {one["name"]: one for one in bill["components"]}  # type: ignore[attr-defined]
    needs = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["serve"]]
    wanted = {re.split("[>;]", need)[0] for need in needs if ";" not in need}
    assert wanted <= components.keys()
    assert all(one["version"] and one["licenses"] for one in components.values())
    refs = {one["bom-ref"] for one in components.values()}
    named = {ref for one in bill["dependencies"] for ref in one["dependsOn"]}  # type: ignore[attr-defined]
    assert named == refs


def test_notices_list_bundled_code(bill: dict[str, object]) -> None:
    text = (ROOT / "THIRD_PARTY_NOTICES.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \| [^|]*`(?:_core|server/page/vendor)`", text, re.MULTILINE)
    bundled = bill["metadata"]["component"]["components"]  # type: ignore[index]
    named = {one["name"]: [row for row in rows if one["name"].lower() in row.lower()] for one in bundled}
    assert all(named.values())
    assert {row for found in named.values() for row in found} == set(rows)
    vendored = {path.stem for path in (ROOT / "src/hotset/server/page/vendor").glob("*.LICENSE")}
    assert vendored <= {one["name"] for one in bundled if one.get("version")}


def wheel_of(folder: Path, version: str, names: list[str]) -> Path:
    path = folder / f"hotset-{version}-cp311-cp311-any.whl"
    with ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


VENDORED = [f"src/{name}.LICENSE" for name in ("marked", "highlight", "temml", "pdf")]
LICENSES = f"hotset-{PROJECT['version']}.dist-info/licenses"


@pytest.mark.parametrize(
    ("version", "names", "why"),
    [
        ("99.9", [], "is not of version"),
        (PROJECT["version"], [], "has no LICENSE"),
        (PROJECT["version"], [f"{LICENSES}/LICENSE"], "has no THIRD_PARTY_NOTICES.md"),
        (
            PROJECT["version"],
            [f"{LICENSES}/{name}" for name in ("LICENSE", "THIRD_PARTY_NOTICES.md", *VENDORED)],
            "has no man pages",
        ),
    ],
)
def test_the_check_refuses_a_wheel(tmp_path: Path, version: str, names: list[str], why: str) -> None:
    wheel = wheel_of(tmp_path, version, names)
    script = ROOT / "packaging" / "release_check.py"
    done = subprocess.run([sys.executable, script, wheel], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert why in done.stderr


class OneFile:
    """A one-file program for Linux whose Python prints its arguments, and its own cache folder."""

    def __init__(self, folder: Path) -> None:
        packing = runpy.run_path(str(ROOT / "packaging" / "onefile.py"))
        program = folder / "tree" / "bin" / "python3"
        program.parent.mkdir(parents=True)
        program.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
        program.chmod(0o755)
        archive = packing["packed"](folder / "tree")
        os.utime(program, (0, 0))
        assert packing["packed"](folder / "tree") == archive
        self.path, self.cache = folder / "one", folder / "cache"
        self.environment = {"PATH": os.defpath, "XDG_CACHE_HOME": str(self.cache), "HOME": str(folder)}
        packing["write"](self.path, archive)

    def started(self, *words: str) -> subprocess.Popen[str]:
        command = [self.path, *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *words: str) -> tuple[int, list[str], str]:
        """Run the file. Return its exit status, the lines of stdout, and stderr."""
        with self.started(*words) as process:
            out, error = process.communicate(timeout=60)
        return process.returncode, out.splitlines(), error


@pytest.fixture
def one_file(tmp_path: Path) -> OneFile:
    return OneFile(tmp_path)


def test_the_one_file_unpacks_once_and_hands_on_its_arguments(one_file: OneFile) -> None:
    runs = [one_file.run("run", "two words") for _ in "ab"]
    assert [(status, out[-2:]) for status, out, _ in runs] == [(0, ["run", "two words"])] * 2
    assert "Unpacking" in runs[0][2]
    assert not runs[1][2]
    [unpacked] = one_file.cache.iterdir()
    assert [path.name for path in unpacked.rglob("*")] == ["bin", "python3"]
    assert unpacked.stat().st_mode & 0o077 == 0


def test_processes_that_unpack_the_one_file_at_once_agree(one_file: OneFile) -> None:
    processes = [one_file.started("run") for _ in range(6)]
    for process in processes:
        with process:
            assert process.communicate(timeout=60)[0].splitlines()[-1] == "run"
    assert len(list(one_file.cache.iterdir())) == 1


def test_half_of_the_one_file_leaves_nothing(one_file: OneFile) -> None:
    whole = one_file.path.read_bytes()
    one_file.path.write_bytes(whole[:-20])
    status, out, error = one_file.run("run")
    assert (status, out) == (1, [])
    [_, why] = error.splitlines()
    assert why.startswith("hotset cannot be unpacked: ")
    assert not list(one_file.cache.iterdir())


def test_the_one_file_starts_nothing_of_another_user(one_file: OneFile, tmp_path: Path) -> None:
    assert one_file.run()[0] == 0
    [unpacked] = one_file.cache.iterdir()
    if os.geteuid() == 0:
        os.chown(unpacked, 65534, 65534)
        assert one_file.run()[:2] == (1, [])
    unpacked.rename(tmp_path / "other")
    unpacked.symlink_to(tmp_path / "other")
    os.chown(tmp_path / "other", os.geteuid(), os.getegid())
    status, out, error = one_file.run()
    assert (status, out) == (1, [])
    assert "not a folder of this user" in error


@pytest.mark.slow
def test_the_file_for_windows_is_a_program_with_one_folder_behind_it(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    packing = runpy.run_path(str(ROOT / "packaging" / "onefile.py"))
    (tmp_path / "tree" / "Lib").mkdir(parents=True)
    for name in ("python.exe", "Lib/os.py"):
        (tmp_path / "tree" / name).write_text(name)
    made = [tmp_path / "one.exe", tmp_path / "other.exe"]
    for path in made:
        packing["write_for_windows"](path, tmp_path / "tree")
    assert made[0].read_bytes() == made[1].read_bytes()
    assert made[0].read_bytes()[:2] == b"MZ"
    with ZipFile(made[0]) as archive:
        [folder] = {name.partition("/")[0] for name in archive.namelist()}
        assert re.fullmatch("hotset-[0-9a-f]{16}", folder)
        assert archive.read(f"{folder}/Lib/os.py") == b"Lib/os.py"


def test_workflow_checks_the_released_wheels() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    jobs = workflow["jobs"]
    assert set(jobs["release"]["needs"]) == jobs.keys() - {"release"}
    steps = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])
    scripts = re.findall(r"packaging/\w+\.py", steps)
    assert {"packaging/release_check.py", "packaging/sbom.py"} <= set(scripts)
    assert all((ROOT / script).is_file() for script in scripts)
    uses = [step["uses"] for step in jobs["release"]["steps"] if "uses" in step]
    assert any("attest-build-provenance" in name for name in uses)


def test_workflow_checks_one_wheel_per_system(tmp_path: Path) -> None:
    [command] = re.findall(r"release_check\.py (.*)", WORKFLOW.read_text())
    (tmp_path / "dist").mkdir()
    for python in ("cp311-cp311", "cp312-abi3"):
        for platform in ("manylinux_2_28_x86_64", "musllinux_1_2_x86_64"):
            (tmp_path / "dist" / f"hotset-9-{python}-{platform}.whl").touch()
    done = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {command}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["dist/hotset-9-cp312-abi3-manylinux_2_28_x86_64.whl"]
