"""`hotset embed` and `hotset rerank`: their output and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import write_reranker
from cli_runs import inside

import hotset

TEXTS = ["hello", "a text of more tokens", "x"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("reranker") / "tiny.gguf")


@pytest.fixture(scope="module")
def expected(model: Path) -> np.ndarray:
    with hotset.load(model) as loaded:
        return loaded.embed(TEXTS)


def stdout(*arguments: object, **how: Any) -> str:
    done = inside(*arguments, **how)
    return done.stdout


def numbers(text: str) -> np.ndarray:
    return np.array([line.split() for line in text.splitlines()], np.float32)


def test_a_text_gives_a_line_of_numbers(model: Path, expected: np.ndarray, tmp_path: Path) -> None:
    np.testing.assert_array_equal(numbers(stdout("embed", model, *TEXTS)), expected)
    file = tmp_path / "texts.txt"
    file.write_bytes("\r\n".join(TEXTS[1:]).encode() + b"\r\n")
    np.testing.assert_array_equal(numbers(stdout("embed", model, TEXTS[0], "-f", file)), expected)
    given = stdout("embed", model, "--file", "-", stdin="\n".join(TEXTS))
    np.testing.assert_array_equal(numbers(given), expected)


def test_pooling_and_dimensions(model: Path, tmp_path: Path) -> None:
    found = json.loads(stdout("embed", model, *TEXTS, "--pooling", "last", "--dimensions", 5, "--json"))
    with hotset.load(model) as loaded:
        vectors = loaded.embed(TEXTS, pooling="last", dimensions=5)
        of_tokens = loaded.embed_tokens(TEXTS)
    np.testing.assert_array_equal(np.array(found["embeddings"], np.float32), vectors)
    assert (found["pooling"], found["dimensions"]) == ("last", 5)
    assert found["model"] == str(model)
    lines = numbers(stdout("embed", model, *TEXTS, "--pooling", "none"))
    np.testing.assert_array_equal(lines, np.concatenate(of_tokens))


def test_vectors_are_written_to_a_file(model: Path, expected: np.ndarray, tmp_path: Path) -> None:
    assert stdout("embed", model, *TEXTS, "-o", tmp_path / "a.npy") == ""
    found = np.load(tmp_path / "a.npy")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    stdout("embed", model, *TEXTS, "-o", tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == list(enumerate(TEXTS))
    np.testing.assert_array_equal(np.array([line["embedding"] for line in lines], np.float32), expected)
    stdout("embed", model, "x", "--pooling", "none", "-o", tmp_path / "b.jsonl")
    assert len(json.loads((tmp_path / "b.jsonl").read_text())["embedding"]) == 1


def test_many_texts_give_the_same_as_single_texts(model: Path) -> None:
    texts = [f"text {i % 7}" for i in range(300)]
    found = numbers(stdout("embed", model, "-f", "-", stdin="\n".join(texts)))
    np.testing.assert_array_equal(found, found[np.arange(300) % 7])


def test_documents_are_ranked(reranker: Path, tmp_path: Path) -> None:
    with hotset.load(reranker) as loaded:
        ranked = loaded.rerank("which?", TEXTS)
    found = json.loads(stdout("rerank", reranker, "which?", *TEXTS, "--json"))
    assert found["query"] == "which?"
    assert [(one["index"], one["document"]) for one in found["results"]] == [
        (one.index, one.document) for one in ranked
    ]
    assert [one["score"] for one in found["results"]] == [one.score for one in ranked]
    table = stdout("rerank", reranker, "which?", "-f", "-", "--top-n", 2, stdin="\n".join(TEXTS))
    rows = [line.split(maxsplit=2) for line in table.splitlines() if "." in line]
    assert [[row[0], int(row[1]), row[2].strip()] for row in rows] == [
        [f"{one.score:.4f}", one.index, one.document] for one in ranked[:2]
    ]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["embed", "MODEL"], 2, "give at least one, or --file"),
        (["embed", "MODEL", "a", ""], 2, "number 2 is empty"),
        (["embed", "MODEL", "-f", "-"], 2, "line 1 is empty"),
        (["embed", "MODEL", "a", "-o", "a.txt"], 2, "-o must end in .npy or .jsonl"),
        (["embed", "MODEL", "a", "-o", "a.npy", "--pooling", "none"], 2, "-o must end in .jsonl"),
        (
            ["embed", "MODEL", "a", "--pooling", "max"],
            2,
            "--pooling must be one of mean, cls, last, none",
        ),
        (["embed", "MODEL", "a", "--dimensions", "65"], 2, "from 1 to 64"),
        (["embed", "MODEL", "a", "--dimensions", "0"], 2, "--dimensions"),
        (["embed", "MODEL", "a " * 2000], 1, "do not fit in the context"),
        (["rerank", "MODEL", "a", "b"], 1, "no rank head"),
        (["rerank", "MODEL", "a"], 2, "give at least one, or --file"),
        (["rerank", "RERANKER", "a", "b", "--top-n", "0"], 2, "--top-n"),
        (["rerank", "RERANKER", "", "b"], 2, "must be a non-empty text"),
        (["embed", "RERANKER", "a"], 2, "the model is a reranker"),
    ],
)
def test_a_mistake_gives_one_message(
    model: Path, reranker: Path, arguments: list[str], status: int, said: str
) -> None:
    names = {"MODEL": str(model), "RERANKER": str(reranker)}
    done = inside(*(names.get(one, one) for one in arguments), returns=status)
    assert said in " ".join(done.stderr.replace("│", " ").split())
