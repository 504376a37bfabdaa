"""Reading of whole files, and safe writing.

Reading: a path from a user or a download may be a pipe without a writer, an endless device, or a file of a
terabyte. So the caller limits the size of a file that is read whole.

Writing: files are written completely or not at all, and only regular files are replaced. A new file is
written next to its target, without a name if the system allows it (Linux), otherwise with a temporary one. It
is synchronised to the disk and then renamed. So a reader gets the old file or the new one, an error leaves
nothing behind, and on Linux neither does a killed process.
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

# Ten times the largest published tokenizers and tensor listings.
SMALL_FILE = 256 << 20


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading bytes. Raises FileNotFoundError, or FormatError for anything else.

    This checks the opened file, not its name, because the name may be given to another file in between.
    """
    # Do not wait for the writer of a pipe; for a regular file O_NONBLOCK has no effect.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # no permission, a socket; a name with a zero byte
        if isinstance(error, PermissionError) and os.path.isdir(path):  # Windows cannot open a folder
            raise _is_no_file(path, stat.S_IFDIR) from None
        raise FormatError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _is_no_file(path, mode)
    return os.fdopen(descriptor, "rb")


def _is_no_file(path: str | os.PathLike[str], mode: int) -> FormatError:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return FormatError(f"{path} is not a regular file but {kind}: choose a file.")


def read_small_file(path: str | os.PathLike[str], limit: int = SMALL_FILE) -> bytes:
    """Return the bytes of a regular file. Raises as `open_regular`, and FormatError above `limit` bytes."""
    with open_regular(path) as file:
        return read_bounded(file, Path(path), limit)


def read_bounded(file: BinaryIO, name: Path | str, limit: int) -> bytes:
    """Return the rest of an open file, pipe or device.

    Raises FormatError above `limit` bytes, and if reading fails.
    """
    data = bytearray()
    try:
        # In pieces: memory is allocated for received bytes, not for a claimed size (0 for files of /proc).
        while len(data) <= limit and (piece := file.read(min(1 << 20, limit + 1 - len(data)))):
            data += piece
    except OSError as error:
        raise FormatError(f"{name} cannot be read ({error.strerror or error})") from None
    if len(data) > limit:
        raise FormatError(f"{name} is larger than {human_size(limit)}, the limit for such a file.")
    return bytes(data)


def read_small_text(path: str | os.PathLike[str], limit: int = SMALL_FILE) -> str:
    """Return UTF-8 text with newlines as "\\n". Raises as `read_small_file`, and FormatError if not UTF-8."""
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


def missing(path: str | os.PathLike[str], kind: str = "file", remedy: str = "check the path") -> str:
    """Return the message about a path that does not exist."""
    return f"there is no {kind} {path}; {remedy}"


def unreadable(path: str | os.PathLike[str], error: OSError) -> str:
    """Return the message about a path that the system does not let be read."""
    is_missing = isinstance(error, FileNotFoundError)
    return missing(path) if is_missing else f"{path} cannot be read ({error.strerror or error})"


def check_target(path: str | os.PathLike[str], reads: Iterable[Path] = ()) -> None:
    """Raise InvalidRequestError if the path of a new file is already something other than a regular file.

    A rename would silently replace a device, a pipe or a socket. A link to a file may be replaced, like the
    file, but not a link of the system (/dev/stdout). Subcommands check before their work, and every writer
    checks again. reads: the model's files, which must not be replaced either.
    """
    path = Path(path)
    if any(_same(path, read) for read in reads):
        raise InvalidRequestError(f"{path} is one of the files that are read; write to another file")
    if path.name in ("", ".."):
        raise InvalidRequestError(f"{path} is a folder; choose a file to write")
    try:
        mode = path.stat().st_mode
        link = os.readlink(path) if path.is_symlink() else ""
    except OSError:  # missing or not accessible: writing will show it
        return
    if link.startswith("/proc/"):
        raise InvalidRequestError(f"{path} is a link of the system; choose a file to write")
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "not a regular file")
        raise InvalidRequestError(f"{path} is {kind}, which is not replaced; choose a file to write")


def check_output(path: str | os.PathLike[str], reads: Iterable[Path] = ()) -> None:
    """Check a path that a user names for a new file: as `check_target`, and its folder must exist.

    Raises InvalidRequestError.
    """
    check_target(path, reads)
    try:
        Path(path).parent.stat()
    except FileNotFoundError:
        folder, name = Path(path).parent, Path(path).name
        raise InvalidRequestError(missing(folder, "folder", f"make it for {name}")) from None
    except OSError:  # not accessible: writing will show it
        pass


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path with ~ and ~user expanded. Raises InvalidRequestError for a user without a home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InvalidRequestError(
            f"{path} begins with a user who has no home folder here; write it in full"
        ) from None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False  # one of them does not exist


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise InvalidRequestError if the path is something other than a folder."""
    path = Path(path)
    try:
        is_other = not stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return
    if is_other:
        raise InvalidRequestError(f"{path} is not a folder; choose one")


def entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], remedy: str = "choose another folder", *, mode: int = 0o666
) -> Iterator[BinaryIO]:
    """Open a new file for writing bytes, which replaces `path` if the block ends without an error.

    mode: its permissions, before the umask. Raises InvalidRequestError if `path` is not a regular file, and
    HotsetError, whose message ends with `remedy`, if the system refuses.
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
    """Write files (text as UTF-8), and rename them to their names once all are written.

    sync: False for files that can be created again, such as a cache: a power cut may leave them empty. mode:
    the permissions of the files, before the umask. Raises as `replacing`.
    """
    with _replacing_all(list(contents), remedy, sync=sync, mode=mode) as files:
        for file, (path, data) in zip(files, contents.items(), strict=True):
            with _file_errors(path, remedy):
                file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def appending(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for appending bytes. Raises as `replacing`."""
    path = Path(path)
    check_target(path)
    with _file_errors(path, "choose another folder"), _closing(path.open("ab")) as file:
        yield file


def lock(file: BinaryIO, *, wait: bool) -> bool:
    """Keep other processes from this lock until the file is closed; return whether this process has it.

    wait: wait for another process that has it. On Windows, and on file systems without locks, nothing is
    locked, and the result is True.
    """
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
    """Keep other threads and processes that call this from changing a file in the block.

    It is for a file that is read, changed and replaced. The lock is a separate file next to it, because
    replacing gives the name to another file.
    """
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
                    files.append(opened.enter_context(_closing(create(place, mode))))
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
            check_target(path)  # something may have been created there since
            with _file_errors(path, remedy):
                os.replace(place, path)
    except BaseException:
        for place in temporary:
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
        raise
    if sync:
        for folder in {path.parent for path in paths}:
            with contextlib.suppress(OSError):  # the files exist, even if a power cut could still lose them
                _sync_folder(folder)


@contextlib.contextmanager
def _file_errors(path: Path | None, remedy: str) -> Iterator[None]:
    """Raise a system error in the block as one error message."""
    try:
        yield
    except OSError as error:
        where = path or error.filename or "a file"
        reason = error.strerror or error
        raise HotsetError(f"{where} cannot be written ({reason}); {remedy}.") from error


@contextlib.contextmanager
def _closing(file: BinaryIO) -> Iterator[BinaryIO]:
    """Close a file after the block.

    An error of the block is the one to report: on a full disk, closing writes the rest of the buffer, and
    fails again.
    """
    try:
        yield file
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()
        raise
    file.close()


def create(temporary: Path, mode: int) -> BinaryIO:
    """Create a file without a name, which ends with the process; if unsupported, one named `temporary`."""
    if hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").is_dir():
        with contextlib.suppress(OSError):  # not every file system supports them
            return open(os.open(temporary.parent, os.O_TMPFILE | os.O_WRONLY, mode), "wb")
    return open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, mode))


def _name(file: BinaryIO, temporary: Path) -> None:
    """Give a file from `create` its temporary name, unless it has one."""
    if os.fstat(file.fileno()).st_nlink:
        return
    folder = os.open(temporary.parent, os.O_RDONLY)
    try:  # given a folder, Python follows the link in /proc to the file
        os.link(f"/proc/self/fd/{file.fileno()}", temporary.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable (only on POSIX, because elsewhere a folder cannot be opened)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
