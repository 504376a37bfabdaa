"""The doors through which files are read whole and written.

Reading: a path from a person or a download may be a pipe without a writer, a device without an end, or a
file of a terabyte. The caller says how large a file that is read whole may be.

Writing: whole or not at all, and never in the place of what is no file. A file grows beside its place,
without a name where the system has such files (Linux), else under a temporary one; it goes to the disk and
then takes its name. So a reader meets the old file or the new one, an error leaves nothing, and on Linux a
killed process leaves nothing either.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from hotset.errors import FormatError, HotsetError, InvalidRequestError
from hotset.units import human_size

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_in_process = threading.Lock()

# Above the largest of published tokenizers and listings of tensors by a factor of ten.
SMALL_FILE = 256 << 20


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """A regular file, open for reading bytes. Raises FileNotFoundError, and FormatError for what is none.

    The file that was opened is looked at, not its name: what stands there may change between the two.
    """
    # A pipe is opened without waiting for its writer; for a regular file O_NONBLOCK means nothing.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # no permission, a socket; a name with a zero byte
        if isinstance(error, PermissionError) and os.path.isdir(path):  # Windows opens no folder
            raise _is_no_file(path, stat.S_IFDIR) from None
        raise FormatError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _is_no_file(path, mode)
    return os.fdopen(descriptor, "rb")


def _is_no_file(path: str | os.PathLike[str], mode: int) -> FormatError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return FormatError(f"{path} is not a regular file but {kind}: name a file.")


def read_small_file(path: str | os.PathLike[str], limit: int = SMALL_FILE) -> bytes:
    """The bytes of a regular file. Errors as `open_regular`; FormatError too above `limit` bytes."""
    with open_regular(path) as file:
        return read_bounded(file, Path(path), limit)


def read_bounded(file: BinaryIO, name: Path | str, limit: int) -> bytes:
    """What is left in an open file, pipe or device. Raises FormatError above `limit` bytes, and where
    reading fails."""
    data = bytearray()
    try:
        # Piece by piece: memory is taken for what comes, not for what a size says (files of /proc say 0).
        while len(data) <= limit and (piece := file.read(min(1 << 20, limit + 1 - len(data)))):
            data += piece
    except OSError as error:
        raise FormatError(f"{name} cannot be read: {error.strerror or error}.") from None
    if len(data) > limit:
        raise FormatError(f"{name} is larger than {human_size(limit)}, the most that is read of such a file.")
    return bytes(data)


def read_small_text(path: str | os.PathLike[str], limit: int = SMALL_FILE) -> str:
    """UTF-8 text with every newline as "\\n". Errors as `read_small_file`; FormatError too for other text."""
    data = read_small_file(path, limit)
    try:
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text (byte {error.start}).") from None


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def check_target(path: str | os.PathLike[str], reads: Iterable[Path] = ()) -> None:
    """Raises InvalidRequestError where something that is no regular file stands in the way of a new file.

    A rename would replace a device, a pipe or a socket without a word. A link to a file may be replaced, as
    the file may, but not one that the system keeps (/dev/stdout). Subcommands ask before their work, and
    every writer asks again. reads: files of the model that is read, which are no targets either.
    """
    path = Path(path)
    if any(_same(path, read) for read in reads):
        raise InvalidRequestError(f"{path} is a file that is read; write to another file")
    if path.name in ("", ".."):
        raise InvalidRequestError(f"{path} is a folder; name a file to write")
    try:
        mode = path.stat().st_mode
        link = os.readlink(path) if path.is_symlink() else ""
    except OSError:  # nothing there, or nothing that can be seen: writing will show it
        return
    if link.startswith("/proc/"):
        raise InvalidRequestError(f"{path} is a link of the system; name a file to write")
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise InvalidRequestError(f"{path} is {kind}, which is not replaced; name a file to write")


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with ~ and ~user written out. Raises InvalidRequestError for a user without a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InvalidRequestError(
            f"{path} begins with a user who has no home here; write it in full"
        ) from None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False  # one of them is not there


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raises InvalidRequestError where something that is no folder stands in the way of one."""
    path = Path(path)
    try:
        is_other = not stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return
    if is_other:
        raise InvalidRequestError(f"{path} is no folder; name one")


def entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], remedy: str = "choose another folder", *, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """A new file, open for writing bytes, which takes the place of `path` if the block ends without an error.

    mode: its permissions, less the umask. Raises InvalidRequestError where what stands there is no file, and
    HotsetError, which ends with `remedy`, where the system refuses.
    """
    with _replacing_all([Path(path)], remedy, mode=mode) as files:
        yield files[0]


def write_whole(
    contents: Mapping[Path, bytes | str],
    remedy: str = "choose another folder",
    *,
    sync: bool = True,
    mode: int = 0o666,
) -> None:
    """Writes files (text as UTF-8), and gives them their names when all are written. Errors as `replacing`.

    sync: False for what can be made again, such as a cache: a power cut may leave it empty. mode: the
    permissions of the files, less the umask.
    """
    with _replacing_all(list(contents), remedy, sync=sync, mode=mode) as files:
        for file, (path, data) in zip(files, contents.items(), strict=True):
            with _file_errors(path, remedy):
                file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def appending(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file, open for writing bytes behind its end. Errors as `replacing`."""
    path = Path(path)
    check_target(path)
    with _file_errors(path, "choose another folder"), _closing(path.open("ab")) as file:
        yield file


def lock(file: BinaryIO, *, wait: bool) -> bool:
    """Keeps every other process from this lock until the file is closed: POSIX, and file systems that have
    locks; elsewhere nothing is kept. wait: for one that has it; False: returns False where one has."""
    if fcntl is not None:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    return True


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """For a file that is read, changed and written whole: no other thread or process that asks so too changes
    it meanwhile. The lock is a file beside it, for it is not the same file afterwards."""
    beside = path.with_name(f".{path.name}.lock")
    with _file_errors(path.parent, "choose another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _in_process, appending(beside) as file:
        lock(file, wait=True)
        yield


@contextlib.contextmanager
def _replacing_all(
    paths: list[Path], remedy: str, *, sync: bool = True, mode: int = 0o666
) -> Iterator[list[BinaryIO]]:
    for path in paths:
        check_target(path)
    temporary = [
        path.with_name(f".{path.name[:50]}.{os.getpid()}-{secrets.token_hex(4)}.tmp") for path in paths
    ]
    try:
        with contextlib.ExitStack() as opened:
            files = []
            for path, place in zip(paths, temporary, strict=True):
                with _file_errors(path, remedy):
                    files.append(opened.enter_context(_closing(_create(place, mode))))
            with _file_errors(paths[0] if len(paths) == 1 else None, remedy):
                yield files
            for path, place, file in zip(paths, temporary, files, strict=True):
                with _file_errors(path, remedy):
                    file.flush()
                    if sync:
                        os.fsync(file.fileno())
                    _name(file, place)
                    file.close()
        for path, place in zip(paths, temporary, strict=True):
            check_target(path)  # what came meanwhile is not replaced either
            with _file_errors(path, remedy):
                os.replace(place, path)
    except BaseException:
        for place in temporary:
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
        raise
    if sync:
        for folder in {path.parent for path in paths}:
            with contextlib.suppress(OSError):  # the files are there, whatever a power cut would do
                _sync_folder(folder)


@contextlib.contextmanager
def _file_errors(path: Path | None, remedy: str) -> Iterator[None]:
    """A system error in the block as one error message."""
    try:
        yield
    except OSError as error:
        where = path or error.filename or "a file"
        reason = error.strerror or error
        raise HotsetError(f"{where} cannot be written ({reason}); {remedy}.") from error


@contextlib.contextmanager
def _closing(file: BinaryIO) -> Iterator[BinaryIO]:
    """Close a file after the block. The error of the block is the one to report: on a full disk closing
    writes the rest of the buffer, and fails again."""
    try:
        yield file
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        raise
    file.close()


def _create(temporary: Path, mode: int) -> BinaryIO:
    """A new file without a name, gone with the process; where there are none, one named `temporary`."""
    if hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").is_dir():
        with contextlib.suppress(OSError):  # not every file system has them
            return open(os.open(temporary.parent, os.O_TMPFILE | os.O_WRONLY, mode), "wb")
    return open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, mode))


def _name(file: BinaryIO, temporary: Path) -> None:
    """Gives a file of `_create` its temporary name, if it has none yet."""
    if os.fstat(file.fileno()).st_nlink:
        return
    folder = os.open(temporary.parent, os.O_RDONLY)
    try:  # with a folder given, Python follows the link in /proc to the file
        os.link(f"/proc/self/fd/{file.fileno()}", temporary.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable (POSIX; elsewhere a folder cannot be opened)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
