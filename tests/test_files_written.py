"""The functions that write files, and a check that every writer uses them."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import write_sparse
from cli_runs import REFERENCE, TEXT, inside
from file_kinds import needs_links, needs_pipes
from full_disk import room_for
from killed import kill_while_it_writes, needs_unnamed_files
from waiting import WATCHDOG

import hotset
from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import appending, changing, check_folder, check_target, replacing, write_whole
from hotset.formats.torch_file import write_torch


@pytest.fixture(params=["pipe", "socket", "folder", "link to a device", "link to a pipe"])
def odd(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Something at a place `odd` that is not a regular file."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    place = tmp_path / "odd"
    if request.param == "pipe":
        os.mkfifo(place)
    elif request.param == "socket":
        monkeypatch.chdir(tmp_path)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("odd")
    elif request.param == "folder":
        place.mkdir()
    elif request.param == "link to a device":
        place.symlink_to(os.devnull)
    else:
        os.mkfifo(tmp_path / "pipe")
        place.symlink_to(tmp_path / "pipe")
    return place


def what_is(path: Path) -> tuple[int, int]:
    """Return the file type and the inode number of a path, without following links."""
    found = path.lstat()
    return stat.S_IFMT(found.st_mode), found.st_ino


@pytest.mark.parametrize("write", [
    lambda path: write_whole({path: b"new"}),
    lambda path: replacing(path).__enter__(),
    lambda path: appending(path).__enter__(),
    lambda path: write_torch(path, np.zeros(2, np.float32)),
])  # fmt: skip
def test_special_file_is_not_replaced(odd: Path, write) -> None:
    before, kind = sorted(odd.parent.iterdir()), what_is(odd)
    with pytest.raises(InvalidRequestError, match=r"odd is a .*; choose a file to write"):
        write(odd)
    assert what_is(odd) == kind
    assert sorted(odd.parent.iterdir()) == before


@needs_pipes
def test_special_file_made_during_a_write_is_not_replaced(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "out") as file:
            file.write(b"new")
            os.mkfifo(tmp_path / "out")

    with pytest.raises(InvalidRequestError, match="a pipe"):
        write()
    assert stat.S_ISFIFO((tmp_path / "out").stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(not Path("/dev/stdout").is_symlink(), reason="/dev/stdout is no link here")
def test_links_of_the_system_are_not_replaced(tmp_path: Path) -> None:
    """Refuse /dev/stdout, although it leads to a regular file: as root, a rename would replace the link."""
    code = "from hotset.files import check_target; check_target('/dev/stdout')"
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, text=True, check=False
        )
    assert "/dev/stdout is a link of the system" in done.stderr
    with pytest.raises(InvalidRequestError, match="/dev/null is a device"):
        check_target("/dev/null")


def test_file_is_complete_or_unchanged(tmp_path: Path) -> None:
    place = tmp_path / "a"
    place.write_bytes(b"old")

    def fail() -> None:
        with replacing(place) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert place.read_bytes() == b"old"
    with replacing(place) as file:
        file.write(b"new")
        assert place.read_bytes() == b"old"
    assert place.read_bytes() == b"new"
    with appending(place) as file:
        file.write(b"er")
    assert place.read_bytes() == b"newer"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def _append(path: Path) -> None:
    with appending(path) as file:
        for _ in range(1000):
            file.write(b"0" * 100)


def _replace(path: Path) -> None:
    with replacing(path) as file:
        for _ in range(1000):
            file.write(b"0" * 100)


@pytest.mark.parametrize("n_bytes", [3, 5000])
@pytest.mark.parametrize(
    "write",
    [
        _append,
        _replace,
        lambda path: write_whole({path: b"0" * 100_000}),
        lambda path: write_whole({path.with_name("first"): b"0" * 6000, path: b"0"}),
        lambda path: write_torch(path, np.zeros(30_000, np.float32)),
    ],
)
def test_full_disk_gives_one_message(tmp_path: Path, write: Callable[[Path], None], n_bytes: int) -> None:
    """Check that the first error is reported, not the later one of the close, and nothing is replaced."""
    place = tmp_path / "a"
    place.write_bytes(b"old")
    with (
        room_for(n_bytes),
        pytest.raises(
            HotsetError, match=r"^\S+ cannot be written \(File too large\); choose another folder\.$"
        ),
    ):
        write(place)
    assert place.read_bytes().startswith(b"old")
    assert write is _append or place.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("writing", [appending, replacing])
def test_error_of_the_block_is_not_hidden_by_an_error_of_close(tmp_path: Path, writing: Any) -> None:
    def fail() -> None:
        with writing(tmp_path / "a") as file:
            file.write(b"0" * 100)
            raise ZeroDivisionError

    with room_for(10), pytest.raises(ZeroDivisionError):
        fail()


@needs_links
def test_link_is_replaced_not_its_target(tmp_path: Path) -> None:
    place = tmp_path / "a"
    place.write_bytes(b"old")
    (tmp_path / "link").symlink_to(place)
    write_whole({tmp_path / "link": "ä"})
    assert (place.read_bytes(), (tmp_path / "link").read_bytes()) == (b"old", "ä".encode())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "link"]


def test_several_files_are_written_or_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(HotsetError, match=r"missing.b cannot be written \(No such file .*\); go elsewhere"):
        write_whole({tmp_path / "a": b"new", tmp_path / "missing" / "b": b"new"}, "go elsewhere")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("without_a_name", [True, False])
def test_a_new_file_has_the_rights_that_the_mask_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_a_name: bool
) -> None:
    if not without_a_name:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    (tmp_path / "by hand").write_bytes(b"")
    write_whole({tmp_path / "a": b"new"})
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "by hand").stat().st_mode
    write_whole({tmp_path / "a": b"private"}, mode=0o600)
    if os.name != "nt":  # Windows has no such rights
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) & 0o077 == 0


def test_a_name_as_long_as_the_system_allows_has_room_for_its_temporary_one(tmp_path: Path) -> None:
    for name in ("n" * 255, "ä" * 127):
        write_whole({tmp_path / name: b"new"})
        assert (tmp_path / name).read_bytes() == b"new"
    with pytest.raises(HotsetError, match="cannot be written" if os.name == "nt" else "too long"):
        write_whole({tmp_path / ("n" * 256): b"new"})
    assert len(list(tmp_path.iterdir())) == 2


@needs_links
def test_folders_and_models_are_distinguished_from_targets(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "..", Path("/")):
        with pytest.raises(InvalidRequestError, match="is a folder"):
            check_target(path)
    (tmp_path / "m.gguf").write_bytes(b"")
    (tmp_path / "link").symlink_to("m.gguf")
    with pytest.raises(InvalidRequestError, match="link is one of the files that are read"):
        check_target(tmp_path / "link", [tmp_path / "missing", tmp_path / "m.gguf"])
    check_target(tmp_path / "other", [tmp_path / "m.gguf"])
    check_folder(tmp_path)
    check_folder(tmp_path / "missing")
    with pytest.raises(InvalidRequestError, match=r"m\.gguf is not a folder"):
        check_folder(tmp_path / "m.gguf")


HOLDER = """
import sys
from pathlib import Path
from hotset.files import changing
with changing(Path(sys.argv[1])):
    print("has it", flush=True)
    sys.stdin.read()
    Path(sys.argv[1]).write_text("changed")
"""


@pytest.mark.skipif(os.name != "posix", reason="files are locked between processes by POSIX")
def test_processes_change_a_file_one_after_the_other(tmp_path: Path) -> None:
    path, found = tmp_path / "new" / "list.json", []

    def change() -> None:
        with changing(path):
            found.append(path.read_text() if path.exists() else "nothing")

    command = [sys.executable, "-c", HOLDER, str(path)]
    thread = threading.Thread(target=change)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == "has it\n"
        thread.start()
        thread.join(0.2)  # without the lock it would be finished by now
        holder.stdin.close()
        thread.join(WATCHDOG)
    assert holder.returncode == 0
    assert found == ["changed"]


@needs_unnamed_files
def test_a_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from hotset.files import replacing\n"
        "with replacing(sys.argv[1]) as file:\n    file.write(bytes(4 << 20))"
    )
    kill_while_it_writes(code, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# -- the subcommands -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["quantize", "MODEL", "ODD", "--type", "f16"],
        ["reorder", "MODEL", "ODD", "--profile", "PROFILE"],
        ["convert", "FOLDER", "ODD"],
        ["profile", "MODEL", "-f", "TEXT", "-o", "ODD", *REFERENCE],
        ["profile", "MODEL", "--profile-of", "PROFILE", "--export", "ODD"],
        pytest.param(
            ["plan", "MODEL", "--device", "simulated", "-o", "ODD"], marks=pytest.mark.backend("triton")
        ),
        ["report", "MODEL", "--profile", "PROFILE", "-o", "ODD.html"],
        ["sparsify", "MODEL", "ODD", "--text", "TEXT"],
        ["sparsify", "MODEL", "OUT", "--work", "ODD", "--text", "TEXT"],
        ["train-predictor", "MODEL", "-f", "TEXT", "-o", "ODD"],
        ["train-predictor", "MODEL", "-f", "TEXT", "--dir", "ODD"],
    ],
    ids=lambda arguments: "-".join(a.strip("-") for a in arguments if a not in ("MODEL", "TEXT")),
)
@needs_pipes
def test_no_subcommand_replaces_special_files(tmp_path: Path, arguments: list[str]) -> None:
    if arguments[0] == "train-predictor":
        pytest.importorskip("torch")
    model = write_sparse(tmp_path / "m.gguf", dialect="gguf")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    profile = tmp_path / "m.profile.hotset.gguf"
    if "PROFILE" in arguments:
        inside("profile", model, "-f", text, *REFERENCE)
    if "--profile-of" in arguments:  # it is found next to the model
        arguments = [a for a in arguments if a not in ("--profile-of", "PROFILE")]
    odd = tmp_path / ("odd.html" if "ODD.html" in arguments else "odd")
    os.mkfifo(odd)
    places = {
        "MODEL": model, "TEXT": text, "PROFILE": profile, "FOLDER": tmp_path, "OUT": tmp_path / "o.gguf",
    }  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    done = inside(*[places.get(a, odd if a.startswith("ODD") else a) for a in arguments], returns=2)
    assert re.search(r"odd(\.html)? is (a pipe|not a folder)", done.stderr)
    assert stat.S_ISFIFO(odd.stat().st_mode)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("subcommand", ["profile", pytest.param("plan", marks=pytest.mark.backend("triton"))])
def test_no_subcommand_replaces_the_model_that_it_reads(tmp_path: Path, subcommand: str) -> None:
    model = write_sparse(tmp_path / "m.gguf", dialect="gguf")
    (tmp_path / "text.txt").write_text(TEXT)
    more = {"profile": ["-f", tmp_path / "text.txt", *REFERENCE], "plan": ["--device", "simulated"]}[
        subcommand
    ]
    data = model.read_bytes()
    done = inside(subcommand, model, "-o", model, *more, returns=None)
    assert (done.returncode, model.read_bytes() == data) == (2, True)
    assert "is one of the files that are read" in done.stderr


@needs_pipes
def test_pipe_in_place_of_a_sidecar_moves_it_to_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    model = write_sparse(tmp_path / "m.gguf", dialect="gguf")
    with hotset.load(model, device="reference", sparsity="predicted", predictor="svd:32"):
        built = [path.name for path in tmp_path.glob("*.hotset.gguf")]
    assert built
    for name in built:
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    with hotset.load(model, device="reference", sparsity="predicted", predictor="svd:32"):
        assert all(stat.S_ISFIFO((tmp_path / name).stat().st_mode) for name in built)
        assert len(list((tmp_path / "home").rglob("*.hotset.gguf"))) == len(built)


def test_every_writer_goes_through_the_door() -> None:
    """Check that no other code renames files or opens them to write, except downloads, which resume."""
    writes = re.compile(
        r"os\.(replace|rename|link|truncate)\(|\.write_(text|bytes)\(|\.rename\(|mkstemp|NamedTemporaryFile"
        r"|open\([^)]*[\"'][wxa]b?\+?[\"']|np\.save|torch\.save\((?!state, file\))"
    )
    source = Path(hotset.__file__).parent
    allowed = {"files.py", "storage/download.py", "storage/wheel.py"}
    found = [
        f"{path.relative_to(source)}: {line.strip()}"
        for path in sorted(source.rglob("*.py"))
        if path.relative_to(source).as_posix() not in allowed
        for line in path.read_text("utf-8").splitlines()
        if writes.search(line)
    ]
    # Exceptions: open files, an incomplete last line, a log, a trace, and click's text.
    expected = [
        "formatter.write_text(",
        'path.open("ab", buffering=0)',
        'self._file = path.open("w")',
        "np.save(file,",
        "np.savez(file,",
        "os.truncate(path, len(whole))",
    ]
    assert [line for line in found if not any(one in line for one in expected)] == []
