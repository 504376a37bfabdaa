"""Reading whole files: no pipe, device or endless file makes a program wait or fill the memory."""

from __future__ import annotations

import errno
import io
import os
import socket
import sys
from pathlib import Path

import pytest

from hotset.errors import FormatError, HotsetError, ModelNotFoundError
from hotset.files import open_regular, read_bounded, read_small_file, read_small_text

posix = pytest.mark.skipif(os.name != "posix", reason="pipes and devices with names are POSIX's")


def test_a_small_file_is_read_whole_and_a_larger_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345678")
    assert read_small_file(path) == read_small_file(path, 8) == b"12345678"
    with pytest.raises(FormatError, match="larger than 7 B"):
        read_small_file(path, 7)
    path.write_bytes(b"")
    assert read_small_file(path, 0) == b""
    with pytest.raises(FileNotFoundError):
        read_small_file(tmp_path / "none")
    with pytest.raises(FormatError, match="is not a regular file"):
        read_small_file(tmp_path)
    with pytest.raises(FormatError, match="cannot be read"):
        read_small_file(tmp_path / "a\0b")


def test_streamed_reads_are_bounded_too() -> None:
    class Dripping(io.RawIOBase):
        """An endless stream that gives three bytes at a time."""

        given = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            n = min(3, len(buffer))
            buffer[:n] = b"abc"[:n]
            self.given += n
            return n

    stream = Dripping()
    with pytest.raises(FormatError, match=r"a pipe is larger than 1000 B"):
        read_bounded(stream, "a pipe", 1000)  # type: ignore[arg-type]
    assert stream.given == 1001


def test_a_read_that_fails_is_an_error_with_the_name_of_the_file() -> None:
    class Failing(io.RawIOBase):
        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(FormatError, match=r"a disk cannot be read \(Input/output error\)"):
        read_bounded(Failing(), "a disk", 1000)  # type: ignore[arg-type]


def test_text_has_plain_newlines_and_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes("a\r\nb\rc\nü".encode())
    assert read_small_text(path) == path.read_text(encoding="utf-8") == "a\nb\nc\nü"
    path.write_bytes(b"ab\xff")
    with pytest.raises(FormatError, match=r"not UTF-8 text \(byte 2\)"):
        read_small_text(path)


@posix
def test_special_file_is_refused_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket has at most 107 bytes
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(FormatError, match="is not a regular file"):
            open_regular(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        with pytest.raises(FormatError, match="cannot be read"):
            open_regular(tmp_path / "s")


@posix
@pytest.mark.parametrize("endless", ["fifo", "/dev/zero"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
     "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt"],
)  # fmt: skip
def test_a_checkpoint_of_pipes_and_devices_is_refused(tmp_path: Path, name: str, endless: str) -> None:
    from hotset.convert.hf_checkpoint import Checkpoint
    from hotset.convert.hf_config import read_json
    from hotset.convert.hf_tokenizer import tokenizer_keys

    path = tmp_path / name
    if endless == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(endless)
    if name == "merges.txt":
        (tmp_path / "vocab.json").write_text("{}")
    if name == "chat_template.jinja":
        (tmp_path / "vocab.json").write_text('{"a": 0}')
        (tmp_path / "merges.txt").write_text("")

    def read() -> None:
        if name == "config.json":
            read_json(path)
        elif name.endswith((".bin", ".json", "safetensors")) and name.startswith(("model", "pytorch")):
            Checkpoint(tmp_path)
        else:
            tokenizer_keys(tmp_path, {"vocab_size": 10})

    with pytest.raises(HotsetError, match="not a regular file"):
        read()


@posix
def test_activation_counts_in_a_pipe_are_refused(tmp_path: Path) -> None:
    from hotset.formats.torch_file import read_torch

    os.mkfifo(tmp_path / "activation_0.pt")
    with pytest.raises(FormatError, match="not a regular file"):
        read_torch(tmp_path / "activation_0.pt")


def test_missing_config_gives_the_same_message(tmp_path: Path) -> None:
    from hotset.convert.hf_config import read_json

    with pytest.raises(ModelNotFoundError, match="name the folder of a checkpoint"):
        read_json(tmp_path / "config.json")


@posix
def test_a_prompt_may_come_from_a_pipe_but_not_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotset.cli import console, run

    reader, writer = os.pipe()
    os.write(writer, b"hello\n")
    os.close(writer)
    assert run._arguments("m", None, None, Path(f"/dev/fd/{reader}")) == ("m", "hello")
    os.close(reader)
    monkeypatch.setattr(console, "LONGEST_TEXT", 1 << 16)
    for read in (
        lambda: run._arguments("m", None, None, Path("/dev/zero")),
        lambda: console.read_text(Path("/dev/zero"), "-f"),
    ):
        with pytest.raises(FormatError, match=r"/dev/zero is larger than 64\.0 KiB"):
            read()
    with Path("/dev/zero").open("rb") as endless:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(endless))
        with pytest.raises(FormatError, match="the standard input is larger"):
            run._arguments("m", None, None, None)
