"""A model file that is truncated while it is in use: an error message, not the end of the process.

Each case runs in a process of its own, which ends without a word (SIGBUS) where the guard fails.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from byte_models import write_model
from fresh_python import run_python

from hotset.errors import FormatError
from hotset.formats.gguf import GGUFWriter, open_gguf
from hotset.formats.mapped import MappedFile, check_unharmed, truncated_files
from hotset.formats.quants import GGMLType

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a mapped file cannot be cut here")
PAGE = mmap.PAGESIZE
CUT = "was cut short, or could not be read, while it was in use; put the whole file there and load it again"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


STEP = """
import os, sys
import hotset

path, backend, n_threads, size, handler = sys.argv[1:]
if handler == "before":
    import faulthandler
    faulthandler.enable()
model = hotset.load(path, n_ctx=64, device=backend, n_threads=int(n_threads))
model.generate("hello", seed=1, max_tokens=3)
if handler == "after":
    import faulthandler
    faulthandler.enable()
os.truncate(path, os.path.getsize(path) * int(size) // 100 if int(size) >= 0 else os.path.getsize(path) - 1)
for _ in range(2):  # and it stays so
    try:
        model.generate("hello", seed=1, max_tokens=3, reuse_prefix=False)
    except hotset.FormatError as error:
        print(error)
model.close()
"""


@pytest.mark.parametrize(
    ("backend", "n_threads", "size", "handler"),
    [
        ("cpu", 1, 50, "before"),
        ("cpu", 4, 50, "after"),
        ("cpu", 2, 0, "none"),
        ("cpu", 1, -1, "none"),  # no page is missing
        ("reference", 1, 50, "none"),
    ],
)
def test_a_model_that_is_cut_while_it_runs(
    path: Path, backend: str, n_threads: int, size: int, handler: str
) -> None:
    done = run_python(STEP, path, backend, n_threads, size, handler)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"{path.name} {CUT}"] * 2


SUBCOMMAND = """
import os, sys
from hotset.formats.gguf import GGUFFile, _Cursor
from hotset.cli.main import main

path, where, at = sys.argv[1], sys.argv[2], int(sys.argv[3])
n_calls = 0

def cutting(function):
    def cut(*args, **kwargs):
        global n_calls
        n_calls += 1
        result = function(*args, **kwargs)
        if n_calls == at:
            os.truncate(path, 0)
        return result
    return cut

if where == "step":
    from hotset.backends.cpu.backend import CpuBackend
    CpuBackend.step = cutting(CpuBackend.step)
elif where == "data":
    GGUFFile.data = cutting(GGUFFile.data)
else:
    _Cursor.name = cutting(_Cursor.name)
sys.argv[1:] = sys.argv[4:]
main()
"""


@pytest.mark.parametrize(
    ("where", "at", "subcommand"),
    [
        ("step", 3, ["run", "{path}", "hello", "-n", "8", "-c", "64", "--temp", "0"]),
        ("data", 5, ["run", "{path}", "hello", "-n", "8", "-c", "64", "--temp", "0"]),
        ("header", 7, ["run", "{path}", "hello", "-n", "8", "-c", "64", "--temp", "0"]),
        ("header", 7, ["show", "{path}"]),
        ("data", 4, ["quantize", "{path}", "{out}", "--type", "q8_0"]),
        ("data", 9, ["quantize", "{path}", "{out}", "--type", "q8_0"]),
    ],
)
def test_subcommands_say_so(path: Path, tmp_path: Path, where: str, at: int, subcommand: list[str]) -> None:
    out = tmp_path / "out.gguf"
    arguments = [word.format(path=path, out=out) for word in subcommand]
    done = run_python(SUBCOMMAND, path, where, at, *arguments)
    assert done.returncode == 1, done.stderr
    assert " ".join(done.stderr.split()).endswith(f"error: {path.name} {CUT}."), done.stderr
    assert not out.exists()


def test_nothing_is_written_from_a_file_that_was_cut(tmp_path: Path) -> None:
    """Check encoded bytes, and bytes that the system copies directly."""
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    values = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    for type_ in (GGMLType.F32, GGMLType.Q8_0):
        writer = GGUFWriter(source, "llama")
        writer.add_tensor("a", values, GGMLType.F32)
        writer.write()
        gguf = open_gguf(source)
        copy = GGUFWriter(out, "llama")
        data = gguf.data("a")
        copy.add_tensor("a", data if type_ == GGMLType.F32 else data.view("<f4").reshape(512, 1024), type_)
        os.truncate(source, 2 * PAGE)
        with pytest.raises(FormatError, match="was cut short"):
            copy.write()
        assert os.listdir(tmp_path) == ["source.gguf"]
        with pytest.raises(FormatError, match="was cut short"):
            gguf.data("a")
        gguf.close()
        source.unlink()


def test_a_map_that_was_cut_is_remembered_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5 * PAGE)
    before = truncated_files()
    with path.open("rb") as file:
        whole, mapped = MappedFile(path, file.fileno()), MappedFile(path, file.fileno())
    whole.check()
    whole.close()
    check_unharmed(before)
    os.truncate(path, 3 * PAGE)
    assert mapped[3 * PAGE - 1] == ord("x")
    assert mapped[5 * PAGE - 1] == mapped[3 * PAGE] == 0
    mapped.close()
    assert {cut for _, cut in truncated_files() - before} == {path}
    with pytest.raises(FormatError, match="was cut short"):
        check_unharmed(before)
    os.truncate(path, 0)
    path.write_bytes(b"y" * 5 * PAGE)  # the name again, with a new file
    with path.open("rb") as file:
        again = MappedFile(path, file.fileno())
    assert again[-1] == ord("y")
    again.check()
    again.close()


FOREIGN = """
import mmap, os, signal, sys
from pathlib import Path
from hotset.formats.mapped import MappedFile

path, how, handler = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def enable():
    import faulthandler
    faulthandler.enable()
if handler == "before":
    enable()
path.write_bytes(bytes(4 * mmap.PAGESIZE))
with path.open("rb") as file:
    own = MappedFile(path, file.fileno())
    foreign = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
if handler == "after":
    enable()
own.check()
if how == "sent":
    os.kill(os.getpid(), signal.SIGBUS)
os.truncate(path, 0)
print(own[0], own[-1], flush=True)
print(foreign[0])
"""


@pytest.mark.parametrize("handler", ["none", "before", "after"])
@pytest.mark.parametrize("how", ["fault", "sent"])
def test_other_faults_end_the_process_as_ever(tmp_path: Path, how: str, handler: str) -> None:
    done = run_python(FOREIGN, tmp_path / "file", how, handler)
    assert done.returncode == -signal.SIGBUS, done.stderr
    assert done.stdout == ("0 0\n" if how == "fault" else "")
    assert ("Fatal Python error: Bus error" in done.stderr) == (handler != "none")


N_CACHED, N_PAGES = 12, 48

MAP_CACHED = """
import ctypes, mmap, os, re, sys
from pathlib import Path
import numpy as np
from hotset.formats.mapped import MappedFile

n_cached, n_pages = int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)

def address(mapped):
    return ctypes.c_void_p(np.frombuffer(mapped, np.uint8).ctypes.data)

def in_cache(mapped):
    pages = (ctypes.c_ubyte * n_pages)()
    assert libc.mincore(address(mapped), ctypes.c_size_t(n_pages * mmap.PAGESIZE), pages) == 0
    return [i for i, page in enumerate(pages) if page & 1]

def present(mapped):
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address(mapped).value // mmap.PAGESIZE * 8)
        entries = np.frombuffer(file.read(8 * n_pages), np.uint64)
    return np.flatnonzero(entries >> 63).tolist()

with open(sys.argv[1], "rb") as file:
    locked = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if libc.mlock(address(locked), ctypes.c_size_t(n_cached * mmap.PAGESIZE)) != 0:
        sys.exit("mlock: " + os.strerror(ctypes.get_errno()))
    mapped = MappedFile(Path(sys.argv[1]), file.fileno())
    cached = in_cache(mapped)
    mapped.map_cached(mmap.PAGESIZE + 32, len(mapped))
    print(cached, present(mapped), in_cache(mapped))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports what its cache has and maps it")
def test_cached_pages_are_mapped_and_others_not_read(tmp_path: Path) -> None:
    """Check that locked pages stay in the page cache, and that a hole that was never read is not in it."""
    path = tmp_path / "file"
    path.write_bytes(bytes(N_CACHED * PAGE))
    os.truncate(path, N_PAGES * PAGE)
    done = run_python(MAP_CACHED, path, N_CACHED, N_PAGES)
    assert done.returncode == 0, done.stderr
    cached, present, cached_then = json.loads("[" + done.stdout.replace("] [", "],[") + "]")
    assert set(range(N_CACHED)) <= set(cached)
    assert set(range(1, N_CACHED)) <= set(present) <= set(cached)
    assert cached_then == cached
