"""The files of the chat page over HTTP: which are served, and under which policy."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from hotset.sampling_parameters import PARAMETERS
from hotset.server import site

PAGE = Path(str(files("hotset.server") / "page"))
NAMES = sorted(str(path.relative_to(PAGE)) for path in PAGE.rglob("*") if path.is_file())
OURS = [name for name in NAMES if not name.startswith("vendor/")]


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.include_router(site.router)
    return TestClient(app)


def test_the_page_and_all_its_files_are_served(client: TestClient) -> None:
    index = client.get("/")
    assert index.status_code == 200
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    assert index.content == (PAGE / "index.html").read_bytes()
    types = {
        "js": "text/javascript",
        "mjs": "text/javascript",
        "css": "text/css",
        "svg": "image/svg+xml",
        "html": "text/html",
    }
    for name in NAMES:
        reply = client.get(f"/page/{name}")
        assert reply.status_code == 200, name
        assert reply.content == (PAGE / name).read_bytes()
        kind = types.get(name.rpartition(".")[2], "text/plain")
        assert reply.headers["content-type"].startswith(kind), name
        assert client.head(f"/page/{name}").content == b""


def test_the_page_offers_parameters_of_the_table(client: TestClient) -> None:
    reply = client.get("/page/parameters.js")
    assert reply.headers["content-type"].startswith("text/javascript")
    tables = [json.loads(line.partition(" = ")[2].removesuffix(";")) for line in reply.text.splitlines()]
    fields, loading = ({one["name"]: one for one in table} for table in tables)
    assert loading["n_ctx"]["min"] == 1
    assert fields["top_k"] == {
        "name": "top_k", "label": "Top-k", "note": PARAMETERS["top_k"].summary, "whole": True,
        "min": -1, "max": None, "slider": [0, 200],
    }  # fmt: skip
    assert set(fields) <= set(PARAMETERS)


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/none.js"])
def test_security_headers(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_unchanged_files_are_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/style.css")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        reply = client.get("/page/style.css", headers={"If-None-Match": known})
        assert (reply.status_code, reply.content) == (304, b"")
        assert reply.headers["etag"] == tag
    assert client.get("/page/style.css", headers={"If-None-Match": '"other"'}).status_code == 200
    assert len({client.get(f"/page/{name}").headers["etag"] for name in NAMES}) == len(NAMES)


OUTSIDE = """/page/ /page/none.js /page/../site.py /page/%2e%2e/site.py /page/..%2fsite.py /page//etc/passwd
/page/%2fetc%2fpasswd /page/vendor /page/vendor/../../app.py /page/style.css%00 /page/STYLE.CSS"""


@pytest.mark.parametrize("path", OUTSIDE.split())
def test_no_other_file_is_served(client: TestClient, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 404
    assert "import" not in reply.text


def test_the_page_loads_nothing_from_other_hosts(client: TestClient) -> None:
    """Every referenced file exists, and the files contain no address except the SVG namespace's."""
    index = (PAGE / "index.html").read_text("utf-8")
    named = re.findall(r'(?:src|href)="([^"#]+)"', index)
    assert named
    for name in named:
        assert (PAGE / name.removeprefix("page/")).is_file(), name
    for name in OURS:
        text = (PAGE / name).read_text("utf-8")
        for place in re.findall(r'(?:from |import\()"\./([^"]+)"', text):
            assert client.get(f"/page/{place}").status_code == 200, (name, place)
        found = set(re.findall(r"https?://[\w.-]+", text))
        assert found <= {"http://www.w3.org"}, (name, found)
        assert "@import" not in text
        assert "url(" not in text


def test_the_page_never_turns_text_into_code() -> None:
    index = (PAGE / "index.html").read_text("utf-8")
    assert not re.search(r"\son\w+=|style=|<style|javascript:", index)
    assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", index))
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    )
    for name in OURS:
        if name.endswith(".js"):
            code = re.sub(r"//[^\n]*|/\*.*?\*/", "", (PAGE / name).read_text("utf-8"), flags=re.DOTALL)
            assert not re.search(forbidden, code), name


def test_vendored_files_have_a_version_and_a_licence() -> None:
    for name in NAMES:
        if name.startswith("vendor/") and name.endswith(("js", "css")):
            head = (PAGE / name).read_text("utf-8")[:400]
            assert re.search(r"v\d+\.\d+\.\d+", head)
            licence = PAGE / "vendor" / f"{Path(name).name.split('.')[0]}.LICENSE"
            granted = (
                r"Permission is hereby granted|Redistribution and use in source|Grant of Copyright License"
            )
            assert re.search(granted, licence.read_text("utf-8"))
