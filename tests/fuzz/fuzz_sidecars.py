"""Fuzzes the files stored next to models, and bundles: damaged ones, and valid ones with odd contents.

usage: python tests/fuzz/fuzz_sidecars.py [--seconds 60] [--seed 0] [--keep FOLDER]

The script opens and replays traces, sums up and merges profiles, runs a model with thresholds, resumes a
session, runs a bundled model mapped and under a RAM budget, and reads Modelfiles. Each may work, or fail with
one error message. A case that does anything else (another exception, more than 10 s) is kept in a folder
whose name is printed, and the exit status is 1.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # as pytest does for the tests
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("support", "")]

from fuzz import fuzz_gguf, fuzz_models
from tiny_gguf import write_llama, write_relu

import hotset
from hotset.cli.session import Session
from hotset.convert.reorder import reorder
from hotset.errors import HotsetError
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.loader.modelfile import Modelfile
from hotset.memory import own_memory
from hotset.model.thresholds import LayerThresholds
from hotset.report.replay import replay
from hotset.sparsity.profile import Profile
from hotset.sparsity.thresholds import Calibrated, Thresholds
from hotset.sparsity.trace import EVERY, NeuronTrace, RouteTrace, StoredGroup, open_trace

SLOW_S = 10.0
ROOM = 400 << 20  # beyond what this process has already
RUN = ("he", "-n", 2, "--temp", 0, "-c", 64, "-t", 1, "--device", "cpu")
SIZES: dict[str, Any] = {"n_vocab": 259, "n_ff": 64}
PROMPT = "a text of more than two blocks of the cache; " * 4
MODELFILE = """FROM cut.gguf
SYSTEM \"\"\"Answer
in one sentence.\"\"\"
PARAMETER temperature 0.2
PARAMETER stop "END"
MESSAGE user What is water?
MESSAGE assistant H2O.
"""


def write_traces(folder: Path) -> None:
    """Write a trace of experts and one of neurons."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((40, 3, 8))
    facts: dict[str, Any] = {"starts": (0, 9), "model": "m", "name": "n", "data": "d"}
    groups = [StoredGroup(EVERY, 21, 64, 4096, 4096, 21)]
    RouteTrace(
        routes=np.argsort(scores, axis=2)[:, :, :2].astype(np.int32), n_experts=8, layers=(0, 1, 2),
        expert_bytes=(100, 101, 102), stored=tuple(StoredGroup(i, 8, 128, 4096, 9000, 2) for i in range(3)),
        **facts,
    ).save(folder / "experts.gguf")  # fmt: skip
    NeuronTrace(
        bits=tuple(np.packbits(rng.random((40, n)) < 0.2, axis=1, bitorder="little") for n in (16, 21)),
        n_neurons=(16, 21), neuron_bytes=(64, 64), sparsity="exact", layers=(1, 4),
        stored=(*groups, StoredGroup(0, 16, 64, 4096, 2000, 16), StoredGroup(1, 21, 64, 4096, 2500, 5)),
        **facts,
    ).save(folder / "neurons.gguf")  # fmt: skip


def write_seeds(folder: Path) -> None:
    """Write valid files of each kind, and the models that some of them belong to."""
    write_traces(folder)
    counts = tuple(np.arange(12, dtype=np.uint64) + i for i in range(2))
    Profile(counts, 30, "m", ("t",), {1: np.arange(4, dtype=np.uint64)}).save(folder / "profile.gguf")
    q8 = lambda name: GGMLType.Q8_0 if "ffn" in name else GGMLType.F16  # noqa: E731
    model = write_llama(folder / "cut.gguf", keys=fuzz_models.BPE, head_dim=16, type_of=q8, **SIZES)
    with open_gguf(model) as gguf:
        layer_thresholds = (LayerThresholds(gate=0.1, attn_in=0.3, down_in=0.05),) * 2
        Thresholds(Calibrated.of(gguf), layer_thresholds, text={"hash": "h"}).save(
            folder / "cut.thresholds.json"
        )
    relu = write_relu(folder / "relu.gguf", keys=fuzz_models.BPE, **SIZES)
    moe_layer = write_llama(
        folder / "moe_layer.gguf", keys=fuzz_models.BPE, head_dim=16, experts=(4, 2), type_of=q8, **SIZES
    )
    answer(model, folder / "cut.session", keep=True)
    (folder / "Modelfile").write_text(MODELFILE)
    reorder(relu, folder / "bundle.gguf", None, bundle=True)
    reorder(moe_layer, folder / "bundle-experts.gguf", None, bundle=True)


def exercise_trace(path: Path) -> None:
    """Open a trace, replay it, and write it again."""
    trace = open_trace(path)
    assert trace.token_cycle >= 0
    found = replay(trace, (0.1, 0.6), sizes=[0, 1000, 1 << 30])
    assert all(0 <= rate <= 1 for point in found.points for rate in point.hit_rates.values())
    assert all(0 <= point.cache_hit_rate <= 1 and point.disk_bytes_per_token >= 0 for point in found.points)
    trace.save(path.with_name("again.gguf"))


def exercise_profile(path: Path) -> None:
    """Open a profile, make the summary that a user sees, and merge the profile with itself."""
    profile = Profile.open(path)
    json.dumps([layer.as_dict() for layer in profile.summary()])
    for i in range(len(profile.counts)):
        profile.frequencies(i)
    profile.merge(replace(profile, data=("another text",))).save(path.with_name("again.gguf"))
    profile.check_model("m")


def exercise_thresholds(path: Path) -> None:
    """Run the model with thresholds."""
    model = path.with_name("cut.gguf")
    run("run", model, *RUN, "--sparsity", "threshold", "--thresholds", path)


def answer(path: Path, session: Path | None, *, keep: bool = False) -> list[int]:
    """Return a model's answer to PROMPT with the cache of a session. keep: also write the session."""
    with hotset.load(path, n_ctx=256, n_threads=1, device="cpu") as model, redirect_stderr(io.StringIO()):
        kept = None if session is None else Session(model, session)
        found = model.generate(PROMPT, max_tokens=2, temperature=0).tokens
        if kept is not None and keep:
            kept.save([{"role": "user", "content": PROMPT}])
    return found


def exercise_session(path: Path) -> None:
    """Check that a damaged session changes no answer: damaged blocks are not found."""
    model = path.with_name("cut.gguf")
    assert answer(model, path) == answer(model, None)


def exercise_modelfile(path: Path) -> None:
    """Read a Modelfile, and check that writing and reading it again gives the same."""
    read = Modelfile.parse(path.read_text(errors="replace"))
    assert not read.can_be_written or Modelfile.parse(read.text) == read


def exercise_bundle(path: Path) -> None:
    """Run the bundle mapped and under a budget, and show it."""
    run("run", path, *RUN)
    run("run", path, *RUN, "--ram-budget", (own_memory() + ROOM) / 2**30)
    run("show", path, "--tensors")


def run(*arguments: object) -> None:
    """Run a subcommand. Raise HotsetError if it failed with a message."""
    done = fuzz_models.subcommand(*arguments)
    assert not done.problem, f"{arguments[0]}: {done.problem}"
    if done.status:
        raise HotsetError("it failed, and said why.")


KINDS: dict[str, Callable[[Path], None]] = {
    "experts.gguf": exercise_trace, "neurons.gguf": exercise_trace, "profile.gguf": exercise_profile,
    "cut.thresholds.json": exercise_thresholds, "cut.session": exercise_session,
    "Modelfile": exercise_modelfile, "bundle.gguf": exercise_bundle, "bundle-experts.gguf": exercise_bundle,
}  # fmt: skip


def mutate(source: Path, target: Path, rng: np.random.Generator) -> str:
    """Write a file with damaged bytes or an odd key, tensor or entry, and return a description."""
    if source.suffix == ".json" and rng.integers(3):
        value = json.loads(source.read_text())
        said = "; ".join(fuzz_models.change_within(value, rng) for _ in range(rng.integers(1, 3)))
        target.write_text(json.dumps(value))
        return said
    if source.suffix == ".gguf" and rng.integers(3):
        return fuzz_models.mutate(source, target, rng)
    target.write_bytes(fuzz_gguf.mutate({"": source.read_bytes()}, rng)[""])
    return "bytes"


def exercise(path: Path, of: str) -> str:
    """Use a file as its kind is used. Return the problem, or ""."""
    started = time.monotonic()
    try:
        KINDS[of](path)
    except HotsetError as error:
        message = str(error)
        if "\n" in message or len(message) > 4096:
            return f"no message: {message}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "slow" if time.monotonic() - started > SLOW_S else ""


def attack(
    seed: int, more: Callable[[int], bool], on_problem: Callable[[int, Path, str], None]
) -> tuple[int, int]:
    """Run cases while more(number of the case). Return the numbers of all cases and of failed cases.

    on_problem: called with the number of a failed case, its folder, and a text with the change and the
    problem.
    """
    rng = np.random.default_rng(seed)
    n_cases = n_failed = 0
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        os.environ["HOTSET_HOME"] = f"{scratch}/home"
        seeds, case = Path(scratch) / "seeds", Path(scratch) / "case"
        seeds.mkdir()
        write_seeds(seeds)
        warnings.simplefilter("ignore", RuntimeWarning)
        for of, sound in KINDS.items():
            sound(seeds / of)  # the unchanged file must pass, or a failure of a changed one shows nothing
        while more(n_cases):
            case.mkdir()
            of = list(KINDS)[int(rng.integers(len(KINDS)))]
            if of.startswith("cut."):
                shutil.copy(seeds / "cut.gguf", case)
            change = mutate(seeds / of, case / of, rng)
            problem = exercise(case / of, of)
            if problem:
                n_failed += 1
                on_problem(n_cases, case, f"{of}: {change}\n{problem}")
            shutil.rmtree(case)
            n_cases += 1
    return n_cases, n_failed


if __name__ == "__main__":
    sys.exit(fuzz_models.work_through(attack, "sidecars", __doc__))
