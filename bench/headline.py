"""The README's table: hotset compared with llama.cpp, ik_llama.cpp and PowerInfer on this machine.

usage: python bench/headline.py --models DIR --llama-cpp BUILD --ik-llama BUILD --powerinfer BUILD
           [--rows decode,prefill,depth,server,sparse,7b,moe] [--runs 5] [--resume] [--write-docs]

Real models first: SmolLM2 from the store, and the models of DIR that have the shape of a known one. Then
SmolLM2 made sparse, then synthetic files, which are written into OUT/files. Programs run in turn, in separate
processes, on the same file with the same threads. Each finished row is written to OUT/headline.json, and
--resume continues there. At the end OUT has the tables and the chart; --write-docs also puts them into README
and docs. Without --rows every row is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import headline_report as report
import peers
import serve_load
from peers import Comparison, Job, Runner
from synthetic import LLAMA_FTYPES, SHAPES, write_model, write_sparse_model

import hotset
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.storage import on_this_machine

ROOT = Path(__file__).parents[1]
ADAPTERS = ROOT / "adapters" / "smollm2-135m-relu.safetensors"
IMATRIX = ADAPTERS.with_suffix(".imatrix")
GROUPS = ("decode", "prefill", "depth", "server", "sparse", "7b", "moe")
KNOWN = [("llama", 30, 576), ("qwen2", 24, 896), ("qwen2", 28, 1536)]  # architecture, layers, width
TYPES = {number: name for name, number in LLAMA_FTYPES.items()}
SMALL = 200 << 20  # bytes; a process measures a smaller model three times
DEPTH, PROMPTS, STREAMS, ANSWER = 4096, (256, 2048), (1, 16), 96
MOE = {  # shape, layers, type
    "qwen3-30b-a3b, 6 layers, Q4_K": ("qwen3-30b", 6, GGMLType.Q4_K),
    "olmoe, 8 layers, Q4_0": ("olmoe", 8, GGMLType.Q4_0),
}


class Subject(NamedTuple):
    """A real model: its name in tables, and its file."""

    name: str
    path: Path


class Task(NamedTuple):
    """Rows that are measured together.

    run: returns comparisons by test, or one by "" for `test`.
    """

    group: str
    model: str
    test: str
    run: Callable[[], dict[str, Comparison]]
    synthetic: bool = False
    peers: tuple[str, ...] = report.PEERS[:2]

    @property
    def key(self) -> str:
        return f"{self.group} {self.model} {self.test}"


# -- models --------------------------------------------------------------------------------------


def name_of(path: Path) -> tuple[tuple[str, int, int], str]:
    """Return the shape of a file's model (architecture, layers, width), and its name in tables."""
    with open_gguf(path) as file:
        about: dict[str, Any] = dict(file.metadata)
    architecture = about["general.architecture"]
    shape = architecture, about[f"{architecture}.block_count"], about[f"{architecture}.embedding_length"]
    base = about.get("general.basename", path.stem).replace("smollm2", "SmolLM2")
    type = TYPES.get(about.get("general.file_type", -1), "")
    return shape, " ".join(f"{base} {about.get('general.size_label', '')} {type}".split())


def subjects(folder: Path | None, given: list[Path]) -> list[Subject]:
    """Return the given files, or the known models of the store and the folder, the smallest first."""
    if given:
        return [Subject(name_of(path)[1], path) for path in given]
    paths = [model.path for model in on_this_machine()]
    paths += sorted(folder.glob("*.gguf")) if folder else []
    found: dict[tuple[str, int, int], Subject] = {}
    for path in paths:
        shape, name = name_of(path)
        if shape in KNOWN:
            found.setdefault(shape, Subject(name, path))
    for shape in KNOWN:
        if shape not in found:
            print(f"no model of the shape {shape} is in the store or in {folder}", file=sys.stderr)
    return [found[shape] for shape in KNOWN if shape in found]


def made(path: Path, write: Callable[[Path], Any]) -> Path:
    """Return the file, written if it does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"part-{path.name}")
        write(part)
        part.replace(path)
    return path


# -- tasks ---------------------------------------------------------------------------------------


class Plan:
    """The tasks of a machine: which programs run on which files."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.files: Path = args.out / "files"
        self.folders = {"llama.cpp": args.llama_cpp, "ik_llama.cpp": args.ik_llama}
        self.dense: list[Runner] = [
            peers.llama_bench(folder, name, has_depth=name == "llama.cpp")
            for name, folder in self.folders.items()
            if folder
        ]
        self.subjects = subjects(args.models, args.model)

    def compare(self, job: Job, *turns: tuple[Runner, Path]) -> dict[str, Comparison]:
        job = replace(job, n_threads=self.args.threads)
        return {"": peers.compare(turns, job, self.args.runs, again=not self.args.force)}

    def of_model(self, group: str, name: str, test: str, job: Job, *, synthetic: bool = False) -> Task:
        """Return a task of hotset and the dense peers on one file."""
        turns = [(program, job.model) for program in (peers.hotset(), *self.dense)]
        return Task(group, name, test, lambda: self.compare(job, *turns), synthetic)

    def tasks(self) -> Iterator[Task]:
        for name, path in self.subjects:
            times = 3 if path.stat().st_size < SMALL else 1
            yield self.of_model("decode", name, "decode", Job(path, n_gen=64, repetitions=times))
            for n in PROMPTS:
                yield self.of_model("prefill", name, f"prefill {n:,}", Job(path, n, repetitions=1))
            deep = Job(path, n_gen=32, n_depth=DEPTH, repetitions=1)
            yield self.of_model("depth", name, f"decode at depth {DEPTH:,}", deep)
        for name, path in self.subjects:
            yield Task("server", name, "server", lambda path=path: self.serve(path))
        if self.subjects and "SmolLM2" in self.subjects[0].name:
            yield self.sparse(*self.subjects[0])
        yield self.planted()
        for name, (shape, layers, type) in MOE.items():
            yield from self.moe(name, shape, layers, type)

    def serve(self, model: Path) -> dict[str, Comparison]:
        """Measure the servers: a round starts each, and all streams generate at once."""
        args, slots = self.args, max(STREAMS)
        names = ["hotset", *(name for name, folder in self.folders.items() if folder)]
        failed: dict[str, str] = {}

        def command(name: str, port: int) -> list[str]:
            if name == "hotset":
                return serve_load.hotset_command(model, port, slots, args.threads)
            return serve_load.llama_command(self.folders[name], model, port, slots, args.threads)

        def one(i: int) -> dict[str, dict[int, float]]:
            rates = {}
            for name in names if i % 2 == 0 else reversed(names):
                if name in failed:
                    continue
                port = serve_load.free_port()
                try:
                    with serve_load.running(command(name, port), port) as server:
                        rates[name] = asyncio.run(throughputs(server.url, i))
                except peers.ProgramFailed as error:
                    if name == "hotset":
                        raise
                    failed[name] = str(error)
                    print(f"{name}: {error}", file=sys.stderr)
            return rates

        taken, disturbed = peers.undisturbed(args.runs, one, model.name, again=not args.force)
        return {
            f"{n} stream{'s' * (n > 1)}": Comparison(
                {name: [rates[name][n] for rates in taken] for name in names if name not in failed},
                failed=failed,
                disturbed=disturbed,
            )
            for n in STREAMS
        }

    def sparse(self, name: str, original: Path) -> Task:
        """Return the task of the model made sparse; the peers run the original."""

        def run() -> dict[str, Comparison]:
            relu = made(self.files / "relu.gguf", lambda path: make_sparse(original, path))
            turns: list[tuple[Runner, Path]] = [(peers.hotset(name="hotset original, dense"), original)]
            turns += [(mode(text), relu) for text in ("dense", "exact", "predicted")]
            turns += [(program, original) for program in self.dense]
            return self.compare(Job(original, n_gen=64), *turns)

        return Task("sparse", f"{name}, made sparse", "decode", run)

    def planted(self) -> Task:
        """Return the task of the 7B with planted activity; PowerInfer runs the sparse file."""

        def run() -> dict[str, Comparison]:
            sparse, plain = (
                made(
                    self.files / f"7b.{kind}.gguf",
                    lambda path, kind=kind: write_sparse_model(
                        path, SHAPES["7b"], GGMLType.Q4_0, plain=kind == "plain"
                    ),
                )
                for kind in ("powerinfer", "plain")
            )
            turns: list[tuple[Runner, Path]] = [
                (mode(text), sparse) for text in ("dense", "exact", "predicted")
            ]
            turns += [(program, plain) for program in self.dense]
            if self.args.powerinfer:
                main = peers.find_program(self.args.powerinfer, "main")
                turns.append((peers.PowerInfer(main), sparse))
            return self.compare(Job(sparse, n_gen=32, repetitions=1), *turns)

        name = "7B, Q4_0, planted activity, ideal predictor"
        return Task("7b", name, "decode", run, synthetic=True, peers=report.PEERS)

    def moe(self, name: str, shape: str, layers: int, type: GGMLType) -> Iterator[Task]:
        def write(path: Path) -> None:
            write_model(path, replace(SHAPES[shape], layers=layers), type)

        path = self.files / f"{shape}.gguf"
        for test, job in (("decode", Job(path, n_gen=64)), (f"prefill {PROMPTS[0]}", Job(path, PROMPTS[0]))):
            task = self.of_model("moe", name, test, replace(job, repetitions=1), synthetic=True)

            def run(task: Task = task) -> dict[str, Comparison]:
                made(path, write)
                return task.run()

            yield task._replace(run=run)


def mode(name: str) -> Runner:
    return peers.hotset(None, "--sparsity", name, name=f"hotset {name}")


def make_sparse(original: Path, path: Path) -> None:
    command = [sys.executable, "-m", "hotset.cli.main", "sparse", "make", str(original), str(path)]
    command += ["--adapters", str(ADAPTERS), "--imatrix", str(IMATRIX)]
    subprocess.run(command, check=True, stdout=sys.stderr)


async def throughputs(url: str, seed: int) -> dict[int, float]:
    """Return tokens per second of all streams together, by their number."""
    client = serve_load.Client(url, seed)
    await serve_load.throughput(client, max(STREAMS), 4)  # warms up
    return {n: (await serve_load.throughput(client, n, ANSWER))["rate"] for n in STREAMS}


# -- results -------------------------------------------------------------------------------------


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results in OUT, or new ones without rows: machine, commit, date and versions."""
    path: Path = args.out / "headline.json"
    if not args.rows:  # nothing is measured
        return read(path if path.exists() else ROOT / report.JSON)
    machine = peers.machine()
    commit = machine.pop("hotset")
    machine.pop("load")
    data = {
        "bench": "headline",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit,
        "machine": machine,
        "threads": args.threads,
        "runs": args.runs,
        "versions": {"hotset": hotset.__version__, "python": sys.version.split()[0]},
        "files": {},
        "rows": [],
    }
    if not path.exists():
        return data
    if not args.resume:
        sys.exit(f"{path} exists: continue it with --resume, or choose another --out.")
    old = read(path)
    for key in ("commit", "machine", "threads", "runs"):
        if old[key] != data[key]:
            sys.exit(f"{path} has {key} {old[key]}, not {data[key]}: --resume cannot mix them.")
    return old


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return data


def measure(plan: Plan, data: dict[str, Any]) -> None:
    """Run the tasks that have no rows yet, and write the results after each."""
    path = plan.args.out / "headline.json"
    for name, file in plan.subjects:
        if name not in data["files"]:
            with file.open("rb") as stream:
                data["files"][name] = {"sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
    finished = {row["task"] for row in data["rows"]}
    for task in plan.tasks():
        if task.group not in plan.args.rows or task.key in finished:
            continue
        began = time.perf_counter()
        for test, found in task.run().items():
            builds = {name: build for name, build in found.builds.items() if not name.startswith("hotset")}
            data["versions"] |= builds
            row = {
                "task": task.key,
                "group": task.group,
                "model": task.model,
                "test": test or task.test,
                "synthetic": task.synthetic,
                "peers": task.peers,
                "found": asdict(found) | {"builds": builds},
            }
            data["rows"].append(
                json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.5g}"))
            )
            ratios = {peer: report.against(row, peer) for peer in task.peers}
            shown = ", ".join(f"{peer} {cell}" for peer, cell in ratios.items())
            print(f"{task.model}, {row['test']}: {shown} [{time.perf_counter() - began:.0f} s]", flush=True)
        report.write_json(path, data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, metavar="DIR", help="folder with the real models")
    parser.add_argument("--model", type=Path, action="append", default=[], help="another file; repeatable")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="build of llama.cpp, or its bin folder")
    parser.add_argument("--ik-llama", type=Path, metavar="DIR", help="build of ik_llama.cpp")
    parser.add_argument("--powerinfer", type=Path, metavar="DIR", help="build of PowerInfer, for the CPU")
    parser.add_argument(
        "--rows", default=",".join(GROUPS), help=f"of {','.join(GROUPS)}; none: only show the results in OUT"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each program (5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "headline", metavar="DIR")
    parser.add_argument("--resume", action="store_true", help="continue the results in OUT")
    parser.add_argument("--write-docs", action="store_true", help="put the results into README and docs")
    parser.add_argument("--force", action="store_true", help="measure even if the machine is not quiet")
    args = parser.parse_args()
    args.rows = [] if args.rows == "none" else args.rows.split(",")
    if unknown := set(args.rows) - set(GROUPS):
        parser.error(f"--rows must be of {', '.join(GROUPS)}, not {', '.join(sorted(unknown))}")
    args.out.mkdir(parents=True, exist_ok=True)
    data = begin(args)
    if args.rows:
        plan = Plan(args)
        peers.wait_until_quiet(args.force)
        measure(plan, data)
    texts = report.blocks(data)
    (args.out / "headline.md").write_text("\n\n".join(texts.values()) + "\n", "utf-8")
    (args.out / "headline.svg").write_text(report.chart(data), "utf-8")
    print(f"\n{texts['summary']}\n\n{texts['sparse-summary']}\n\n{texts['facts']}\n")
    if args.write_docs:
        for path, text in report.documents(data, ROOT).items():
            (ROOT / path).write_text(text, "utf-8")
        report.write_json(ROOT / report.JSON, data)
    peers.print_json("headline", **{key: data[key] for key in ("commit", "machine", "versions")})


if __name__ == "__main__":
    main()
