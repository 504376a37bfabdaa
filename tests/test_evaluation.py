"""Multiple-choice questions: their formats, hostile files, and sums compared with whole logits."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from byte_models import BOS, write_sparse
from byte_models import write_model as write_bytes
from cli_runs import inside

import hotset
from hotset.evaluation import evaluate
from hotset.text.multiple_choice import LONGEST_LINE, Question, read_questions

HELLASWAG: dict[str, Any] = {
    "ind": 4, "activity_label": "Removing ice", "ctx_a": "[header] A man [title] He has snow.",
    "ctx_b": "the Man", "ctx": "not read where its halves are there",
    "endings": ["starts to  dance.", "cleans it [step] up.", "eats.", "is a car."], "label": 1,
}  # fmt: skip
AI2_ARC: dict[str, Any] = {
    "id": "x",
    "question": {
        "stem": "Which is hot?",
        "choices": [{"text": "ice", "label": "1"}, {"text": "fire ", "label": "2"}],
    },
    "answerKey": "2",
}
HF_ARC: dict[str, Any] = {
    "id": "x", "question": "Which is hot?",
    "choices": {"text": ["fire", "ice", "snow"], "label": ["A", "B", "C"]}, "answerKey": "A",
}  # fmt: skip
PIQA: dict[str, Any] = {"goal": "to cut", "sol1": "use a knife", "sol2": "use a spoon", "label": 0}


def lines(*questions: object) -> list[bytes]:
    return [json.dumps(question).encode() for question in questions]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bytes(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def model(path: Path) -> Iterator[hotset.Model]:
    with hotset.load(path, device="reference", max_batch=32) as model:
        yield model


# -- formats -------------------------------------------------------------------------------------


def test_each_format_asks_like_the_harness() -> None:
    (swag,) = read_questions(lines(HELLASWAG), "f")
    context = "Removing ice:  A man. He has snow. The man".replace("  ", " ")
    assert swag == Question(
        "hellaswag", context, ("starts to dance.", "cleans it up.", "eats.", "is a car."), 1, "f, line 1"
    )
    only_ctx = {"ctx": "A dog", "endings": ["runs", "flies"], "label": "0"}
    assert read_questions(lines(only_ctx), "f") == [
        Question("hellaswag", "A dog", ("runs", "flies"), 0, "f, line 1")
    ]
    asked = "Question: Which is hot?\nAnswer:"
    assert read_questions([b"", *lines(AI2_ARC, HF_ARC), b"  "], "f") == [
        Question("arc", asked, ("ice", "fire "), 1, "f, line 2"),
        Question("arc", asked, ("fire", "ice", "snow"), 0, "f, line 3"),
    ]
    assert read_questions(lines(PIQA), "f") == [
        Question("piqa", "Question: to cut\nAnswer:", ("use a knife", "use a spoon"), 0, "f, line 1")
    ]


def test_labels_may_be_in_a_separate_file() -> None:
    bare = {key: value for key, value in PIQA.items() if key != "label"}
    found = read_questions(lines(bare, bare), "f", [b"1\n", b"0\r\n", b""])
    assert [question.answer for question in found] == [1, 0]
    with pytest.raises(hotset.FormatError, match="f, line 2, has no label: there are more questions"):
        read_questions(lines(bare, bare), "f", [b"1"])
    with pytest.raises(hotset.FormatError, match="fewer questions than there are labels"):
        read_questions(lines(bare), "f", [b"1", b"0"])


def changed(question: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps(question | fields).encode()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"goal": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b'"text"', "is not a JSON object"),
        (b" " * LONGEST_LINE + b"{}", "is longer than"),
        (b"{}", "is not a known question"),
        (changed(HELLASWAG, label=4), "names choice 4 of 4"),
        (changed(HELLASWAG, label=""), "has no label"),
        (changed(HELLASWAG, label=True), "has no label"),
        (changed(HELLASWAG, label=-1), "has no label"),
        (changed(HELLASWAG, label="0\u0663"), "has no label"),
        (changed(HELLASWAG, endings=["one"]), "has 1 choices"),
        (changed(HELLASWAG, endings=["x"] * 1025), "has 1025 choices"),
        (changed(HELLASWAG, endings="abcd"), "list of texts as endings"),
        (changed(HELLASWAG, endings=["[all]", "b", "c", "d"]), "an empty choice"),
        (b'{"ctx": "[x] ", "endings": ["a", "b"], "label": 0}', "an empty text"),
        (changed(HELLASWAG, ctx_b=None), "must have a text as ctx_b, not None"),
        (changed(AI2_ARC, answerKey="3"), "has the answer '3'"),
        (changed(AI2_ARC, answerKey=2), "must have a text as answerKey"),
        (changed(HF_ARC, choices={"text": ["a", "b"], "label": ["A", "A"]}), "has the answer 'A'"),
        (changed(HF_ARC, choices={"text": ["a"], "label": ["B", "A"]}), "has the answer 'A'"),
        (changed(HF_ARC, choices=["a", "b"]), "has no choices"),
        (changed(HF_ARC, choices=None), "has no choices"),
        (changed(PIQA, goal=["x"]), "must have a text as goal"),
        (changed(HELLASWAG, ctx="x"), "is a question of hellaswag, and those before it are of piqa"),
    ],
)
def test_line_without_a_question_is_named_by_its_number(line: bytes, said: str) -> None:
    with pytest.raises(hotset.FormatError, match="some file, line 2,") as told:
        read_questions([*lines(PIQA), line], "some file")
    assert said in str(told.value)
    assert len(str(told.value)) < 500


def test_a_file_without_questions_is_refused() -> None:
    with pytest.raises(hotset.FormatError, match="f holds no questions"):
        read_questions([b"", b"\n"], "f")


# -- sums ----------------------------------------------------------------------------------------


def by_hand(model: hotset.Model, context: list[int], whole: list[int]) -> float:
    """Return Σ ln p of the tokens after the context, from the logits of the whole text in float64."""
    logits = model.logits(whole, reuse_prefix=False).astype(np.float64)
    log_p = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
    return float(sum(log_p[i - 1, whole[i]] for i in range(len(context), len(whole))))


def test_accuracy_equals_independent_sums(model: hotset.Model) -> None:
    rng = np.random.default_rng(3)
    words = ["he", "hear", "cat", "dog", "ran", "the", "a", "under", "stones", "it"]

    def text(n: int) -> str:
        return " ".join(rng.choice(words, n))

    questions = read_questions(
        lines(
            *({"goal": text(4), "sol1": text(2), "sol2": text(5), "label": int(i % 4 > 0)} for i in range(20))
        ),
        "f",
    )
    right, right_norm = [], []
    for question in questions:
        context = [BOS, *model.tokenizer.encode(question.context, add_special=False)]
        sums = []
        for choice in question.choices:
            whole = [
                BOS,
                *model.tokenizer.encode(question.context + question.delimiter + choice, add_special=False),
            ]
            assert whole[: len(context)] == context
            sums.append(by_hand(model, context, whole))
        lengths = [len(choice) for choice in question.choices]
        right.append(int(np.argmax(sums)) == question.answer)
        right_norm.append(int(np.argmax(np.divide(sums, lengths))) == question.answer)
    results = list(evaluate(model, questions))
    assert [result.n_done for result in results] == [8, 16, 20]
    last = results[-1]
    assert (last.task, last.n_questions) == ("piqa", 20)
    assert (last.accuracy, last.accuracy_norm) == (np.mean(right), np.mean(right_norm))
    assert 0 < last.accuracy < 1
    assert last.accuracy != last.accuracy_norm  # so that swapping them would fail
    assert last.accuracy_error == pytest.approx(np.std(right, ddof=1) / math.sqrt(20))
    assert last.accuracy_norm_error == pytest.approx(np.std(right_norm, ddof=1) / math.sqrt(20))
    pool = model.engine.scheduler.pool
    assert pool.n_available == pool.n_blocks  # nothing is left behind


def test_the_sums_themselves(model: hotset.Model) -> None:
    from hotset.engine.log_likelihood import Continuation, log_likelihoods

    rng = np.random.default_rng(4)
    common = rng.integers(0, 256, 70).tolist()  # more than a block, which is computed once
    texts = [common + rng.integers(0, 256, n).tolist() for n in (1, 9, 30)] + [[5, 6]]
    firsts = [70, 72, 71, 1]
    with model.thread.exclusive() as engine:
        sums = log_likelihoods(engine, [Continuation(*one) for one in zip(texts, firsts, strict=True)])
        alone = [log_likelihoods(engine, [Continuation(*one)])[0] for one in zip(texts, firsts, strict=True)]
    expected = [by_hand(model, text[:first], text) for text, first in zip(texts, firsts, strict=True)]
    assert sums == pytest.approx(expected, rel=1e-5)
    assert sums == pytest.approx(alone, rel=1e-5)


def test_thresholds_apply_to_the_question_too(path: Path, tmp_path: Path) -> None:
    from hotset.engine.log_likelihood import Continuation, log_likelihoods
    from hotset.model.thresholds import LayerThresholds
    from hotset.sparsity.thresholds import Calibrated, Thresholds

    text = np.random.default_rng(6).integers(0, 256, 40).tolist()
    file = tmp_path / "t.json"
    found = []
    for how in ({}, {"thresholds": file}, {"thresholds": file, "sparse_prompts": True}):
        with hotset.load(path, device="reference", **how) as model:
            if not file.exists():
                layers = (LayerThresholds(attn_in=0.3, ffn_in=0.3),) * 2
                Thresholds(Calibrated.of(model.gguf), layers).save(file)
            with model.thread.exclusive() as engine:
                found.append(log_likelihoods(engine, [Continuation(text, 38)])[0])
    assert found[0] != found[1] == found[2]


def test_a_token_that_grows_across_the_border_counts_for_every_choice(tmp_path: Path) -> None:
    """Use the token "th": after "xt" the choice "h" begins inside the last token of the question."""
    plain = write_sparse(tmp_path / "plain.gguf", dialect="gguf")
    with hotset.load(plain, device="reference") as model:
        together, apart = model.encode("xth"), model.encode("xtd")
        assert (len(together), len(apart)) == (2, 3)
        sums = [by_hand(model, together[:1], whole) for whole in (together, apart)]
        for answer in (0, 1):
            (result,) = evaluate(model, [Question("piqa", "xt", ("h", "d"), answer, "f", delimiter="")])
            assert result.accuracy == (int(np.argmax(sums)) == answer)
            assert (result.accuracy_error, result.n_done) == (0.0, 1)
        alone = by_hand(model, apart[:2], apart)  # the sum of "d" without the token before it
    assert np.argmax([sums[0], alone]) != np.argmax(sums)


def test_mismatch_is_reported_with_its_line(model: hotset.Model) -> None:
    fits = Question("piqa", "x", ("a", "b"), 0, "f, line 1")
    long = Question("piqa", "y" * model.n_ctx, ("a", "b"), 0, "f, line 7")
    with pytest.raises(hotset.ContextLengthError, match=r"f, line 7, has .* or use fewer examples"):
        next(evaluate(model, [fits, long]))


def test_a_text_that_begins_with_nothing_needs_a_question(tmp_path: Path) -> None:
    plain = write_sparse(tmp_path / "plain.gguf", dialect="gguf")  # no BOS, and "th" is a token
    nothing = pytest.raises(hotset.FormatError, match="f, line 3, has no token before its choices")
    with hotset.load(plain, device="reference") as model, nothing:
        next(evaluate(model, [Question("piqa", "t", ("h", "a"), 0, "f, line 3", delimiter="")]))


def test_numbers_equal_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tiny_models = pytest.importorskip("tiny_models")
    recipe = tiny_models.RECIPES["llama"]
    theirs = tiny_models.build(recipe)
    rng = np.random.default_rng(5)
    words = ["the", "in", "them", "thin", "cat", "on", "hat"]
    goals = [{"goal": " ".join(rng.choice(words, 3)), "sol1": " ".join(rng.choice(words, 3)),
              "sol2": " ".join(rng.choice(words, 2)), "label": i % 2} for i in range(12)]  # fmt: skip
    questions = read_questions(lines(*goals), "f")
    right = []
    with hotset.load(tiny_models.to_gguf(recipe, theirs, tmp_path), device="reference") as model:
        for question in questions:
            n = len(model.encode(question.context))
            sums = []
            for choice in question.choices:
                ids = torch.tensor([model.encode(question.context + question.delimiter + choice)])
                with torch.no_grad():
                    log_p = theirs(ids).logits[0].double().log_softmax(-1)
                sums.append(float(sum(log_p[i - 1, ids[0, i]] for i in range(n, ids.shape[1]))))
            right.append(int(np.argmax(sums)) == question.answer)
        *_, result = evaluate(model, questions)
    assert result.accuracy == np.mean(right)
    assert 0 < result.accuracy < 1


# -- the subcommand ------------------------------------------------------------------------------------


def test_the_subcommand_in_every_mode(tmp_path: Path) -> None:
    model = write_sparse(tmp_path / "m.gguf")
    data = tmp_path / "piqa.jsonl"
    data.write_bytes(
        b"\n".join(lines(*({**PIQA, "goal": f"to {c}", "label": i % 2} for i, c in enumerate("abcdef"))))
    )
    found = {}
    for mode in ("dense", "exact", "predicted"):
        done = inside("eval", model, data, "--device", "reference", "--sparsity", mode, "--json")
        assert "piqa: 6 of 6 questions" in done.stderr
        found[mode] = json.loads(done.stdout)
        assert found[mode]["sparsity"] == mode
    assert found["predicted"]["predictor"] == "mlp"
    assert found["exact"]["acc"] == found["dense"]["acc"]
    assert found["dense"]["questions"] == 6
    fields = {"task", "questions", "acc", "acc_error", "acc_norm", "acc_norm_error", "sparsity", "predictor",
              "file", "model", "shots"}  # fmt: skip
    assert found["dense"].keys() == fields
    table = inside("eval", model, data, "--device", "reference", "--limit", 2)
    assert "piqa" in table.stdout
    assert "±" in table.stdout


def test_subcommand_names_the_fault(path: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(lines(PIQA)[0] + b"\n{}\n")
    assert "line 2, is not a known question" in inside("eval", path, data, returns=1).stderr
    labels = tmp_path / "labels.lst"
    labels.write_text("1\n")
    data.write_bytes(lines(PIQA)[0])
    done = inside("eval", path, data, "--labels", labels, "--json", "--device", "reference")
    assert json.loads(done.stdout)["questions"] == 1


# -- examples, questions, results --------------------------------------------------------------------


def write_piqa(path: Path, goals: str) -> Path:
    path.write_bytes(
        b"\n".join(lines(*({**PIQA, "goal": f"to {c}", "label": i % 2} for i, c in enumerate(goals))))
    )
    return path


def test_questions_and_answers_are_written(path: Path, tmp_path: Path) -> None:
    data, log = write_piqa(tmp_path / "piqa.jsonl", "abcdefghij"), tmp_path / "log.jsonl"
    options = ["--shots", 2, "--examples", data, "--device", "cpu", "--json", "--log-samples", log]
    done = inside("eval", path, data, *options)
    result = json.loads(done.stdout)
    assert result["shots"] == 2
    rows = [json.loads(line) for line in log.read_bytes().splitlines()]
    assert [row["doc_id"] for row in rows] == list(range(10))
    assert np.mean([row["acc"] for row in rows]) == result["acc"]
    assert np.mean([row["acc_norm"] for row in rows]) == result["acc_norm"]
    with hotset.load(path, device="cpu") as model:
        for row in rows:
            *examples, asked = row["context"].split("\n\n")
            assert len(examples) == 2
            assert not any(example.startswith(asked) for example in examples)
            context = [BOS, *model.tokenizer.encode(row["context"], add_special=False)]
            for choice, stored in zip(row["choices"], row["log_likelihoods"], strict=True):
                text = row["context"] + row["delimiter"] + choice
                whole = [BOS, *model.tokenizer.encode(text, add_special=False)]
                assert stored == pytest.approx(by_hand(model, context, whole), rel=1e-5)
            assert row["acc"] == (int(np.argmax(row["log_likelihoods"])) == row["answer"])
    again = tmp_path / "again.jsonl"
    inside("eval", path, data, *options[:-1], again)
    assert again.read_bytes() == log.read_bytes()
    other = tmp_path / "other.jsonl"
    inside("eval", path, data, *options[:-1], other, "--seed", 5)
    assert other.read_bytes() != log.read_bytes()


def test_a_log_is_whole_or_not_there_and_replaces_nothing_that_is_read(path: Path, tmp_path: Path) -> None:
    data, log = write_piqa(tmp_path / "piqa.jsonl", "ab"), tmp_path / "log.jsonl"
    before = data.read_bytes()
    done = inside("eval", path, data, "--log-samples", data, returns=None)
    assert (done.returncode, data.read_bytes()) == (2, before)
    assert "is one of the files that are read" in done.stderr
    data.write_bytes(lines({**PIQA, "goal": "x" * 9000})[0])
    done = inside("eval", path, data, "--log-samples", log, "--device", "reference", returns=1)
    assert "but the context has" in done.stderr.replace("\n", " ")
    assert not log.exists()


def test_log_is_not_a_file_of_the_task(path: Path, tmp_path: Path) -> None:
    data, task = tmp_path / "piqa.jsonl", tmp_path / "task.yaml"
    write_piqa(data, "abc")
    before = data.read_bytes()
    task.write_text(
        "task: own\ndataset_path: json\ndataset_kwargs: {data_files: {test: piqa.jsonl}}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: goal\ndoc_to_target: label\n"
        'doc_to_choice: "{{[sol1, sol2]}}"\n'
    )
    done = inside("eval", path, task, "--log-samples", data, returns=None)
    assert (done.returncode, data.read_bytes()) == (2, before)
    assert "is one of the files that are read" in done.stderr


def test_a_task_file(path: Path, tmp_path: Path) -> None:
    write_piqa(tmp_path / "piqa.jsonl", "abcdef")
    task = tmp_path / "task.yaml"
    task.write_text(
        "task: own\ndataset_path: json\ndataset_kwargs: {data_files: {test: piqa.jsonl}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "Question: {{goal}}\\nAnswer:"\ndoc_to_target: label\n'
        'doc_to_choice: "{{[sol1, sol2]}}"\nfewshot_split: test\nnum_fewshot: 1\n'
    )
    own = json.loads(inside("eval", path, task, "--json", "--device", "reference").stdout)
    data = tmp_path / "piqa.jsonl"
    known = inside("eval", path, data, "--shots", 1, "--examples", data, "--json", "--device", "reference")
    same = {"task": "own", "file": str(task)}
    assert own == json.loads(known.stdout) | same
    assert own["shots"] == 1
    bare = inside("eval", path, task, "--num-fewshot", 0, "--json", "--device", "reference", "--limit", 3)
    assert json.loads(bare.stdout)["questions"] == 3
    assert json.loads(bare.stdout)["shots"] == 0
    done = inside("eval", path, task, "--examples", data, returns=2)
    assert "is a task file, which says itself" in done.stderr


def test_invalid_examples(path: Path, tmp_path: Path) -> None:
    data, arc = write_piqa(tmp_path / "piqa.jsonl", "abc"), tmp_path / "arc.jsonl"
    arc.write_bytes(lines(HF_ARC)[0])
    for given, code, said in (
        (["--shots", 1], 2, "--shots requires --examples"),
        (["--shots", 1, "--examples", arc], 2, "has questions of arc"),
        (
            ["--shots", 3, "--examples", data],
            1,
            "has 3 examples for a question, and 3 shots need that many and one",
        ),
    ):
        assert said in inside("eval", path, data, *given, returns=code).stderr.replace("\n", " ")
    labels = tmp_path / "labels.lst"
    labels.write_text("1\n1\n1\n")
    given = ["--shots", 1, "--examples", data, "--example-labels", labels, "--log-samples", tmp_path / "log"]
    inside("eval", path, data, *given, "--device", "reference")
    contexts = [json.loads(line)["context"] for line in (tmp_path / "log").read_bytes().splitlines()]
    assert all("use a spoon\n\n" in context for context in contexts)


def test_a_result_as_a_table(model: hotset.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))
    questions = [Question("<t>", f"to {c}", ("run", "sit"), 0, f"f, line {c}") for c in "abc"]
    *_, result = evaluate(model, questions)
    table = result.to_pandas()
    assert table["where"] == [question.where for question in questions]
    assert table["log_likelihoods"] == [list(answer.log_likelihoods) for answer in result.answers]
    assert np.mean(table["acc"]) == result.accuracy
    assert repr(result).startswith("EvaluationResult('<t>', 3 of 3 questions, acc=")
    html = result._repr_html_()
    assert "&lt;t&gt;: 3 of 3 questions" in html
    assert f"{100 * result.accuracy:.2f} ±" in html


def test_spaces_at_the_end_of_a_question_belong_to_its_choices(tmp_path: Path) -> None:
    recipe = write_sparse(tmp_path / "plain.gguf", dialect="gguf")
    with hotset.load(recipe, device="reference") as model:
        (result,) = evaluate(model, [Question("t", "xx  ", ("9", "d"), 0, "f", delimiter="")])
        whole = model.encode("xx  9")
        assert result.answers[0].log_likelihoods[0] == pytest.approx(
            by_hand(model, model.encode("xx"), whole), rel=1e-5
        )
        assert by_hand(model, model.encode("xx  "), whole) != pytest.approx(
            result.answers[0].log_likelihoods[0], rel=1e-3
        )
