"""Correct steps on a device, before any speed: synchronisation, captures, a long prompt, and experts.

Experts are cached, fetched or computed by the CPU. It also measures whether a budget is kept and used, and
the speed of whole models compared with llama.cpp. A unit is a separate process (trial.py, decode.py, `hotset
bench`, llama-bench) with a time limit, so that one that hangs or breaks its device does not affect others.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, get_args

import hybrid
from hybrid import GIB, Setup
from ledger import Ledger
from peers import print_table, verdict
from synthetic import Shape, write_model

from hotset.backends.triton.cpu_offload import Kind
from hotset.backends.triton.devices import device_name
from hotset.formats.quants import GGMLType

TRIAL = Path(__file__).with_name("trial.py")
SHARES = (0.25, 0.5, 0.75)  # of the model, as budgets
USED = 0.95  # of a budget at least, if the model is larger
PROMPT_TOKENS, PROMPT, ANSWER = 1800, 512, 64
EXPERTS = Shape(512, 256, 4, 8, 4, experts=32, used=4)
RATIOS = {"pp": 0.8, "tg": 1.0}  # of llama.cpp's, with everything on the device


def run(ledger: Ledger, setup: Setup) -> None:
    """Run synchronisation, captured steps, long prompts with and without waiting launches, and experts."""
    path, device = hybrid._model(setup.folder, setup.models[0]), device_name(setup.device)
    n_tokens = 48 if setup.options else PROMPT_TOKENS
    rows = []
    for kind in get_args(Kind) if setup.device.type != "cpu" else ("direct",):  # the device's kinds
        found = _trial(ledger, f"synchronisation-{kind}", what="synchronisation", device=device, kind=kind)
        if found is not None:
            rows.append(
                [
                    f"host-device synchronisation {kind}",
                    _micros(found),
                    "" if kind == "direct" else _works(found),
                ]
            )
    for place, share in (("whole", None), ("half", 0.5)):
        task = {"what": "replays", "device": device, "path": str(path), "share": share}
        task |= {"sizes": [1]} if setup.options else {}
        found = _trial(ledger, f"replays-{place}", **task)
        if found is not None:
            good = found.get("different") == [] and not found["notes"]
            good = good and (share is None or found["split"] > 0)
            rows.append([f"captured steps, {place} on the device", _said(found), verdict(good)])
    prompts = []
    for name, value in (("as it is", "0"), ("launches that wait", "1")):
        task = {"what": "prompt", "device": device, "path": str(path), "n_tokens": n_tokens}
        key = "prompt-blocking" if value == "1" else "prompt"
        found = _trial(ledger, key, env=os.environ | {"CUDA_LAUNCH_BLOCKING": value}, **task)
        if found is not None:
            prompts.append(found.get("logits"))
            same = len(prompts) < 2 or (prompts[0] is not None and prompts[0] == prompts[1])
            rows.append([f"prompt of {n_tokens} tokens, {name}", _said(found), verdict(same)])
    rows += _experts(ledger, setup)
    print_table(["what", "found", ""], rows)
    print(ledger.closing())


def _experts(ledger: Ledger, setup: Setup) -> list[list[str]]:
    """Return rows on an MoE model's answers, which must not depend on who computes missing experts."""
    path = setup.folder / "experts.gguf"
    if not path.exists():
        setup.folder.mkdir(parents=True, exist_ok=True)
        write_model(path, EXPERTS, GGMLType.Q4_0, n_vocab=1000)
    device, n_tokens = device_name(setup.device), 4 if setup.options else ANSWER
    rows, answers = [], []
    for share, misses in ((None, "cpu"), (0.25, "cpu"), (0.25, "fetch")):
        key = f"experts-{'all' if share is None else 'some'}-{misses}"
        task = {"what": "experts", "device": device, "path": str(path), "share": share, "n_tokens": n_tokens}
        found = _trial(ledger, key, env=os.environ | {"HOTSET_EXPERT_MISSES": misses}, **task)
        if found is not None:
            answers.append(found.get("answer"))
            good = answers[0] is not None and answers[0] == answers[-1] and not found.get("notes")
            if share is not None:  # some experts were not on the device
                good &= found.get("found", {}).get("on the CPU" if misses == "cpu" else "fetched", 0) > 0
            where = "all in the cache" if share is None else f"{share:.0%} in the cache, others by {misses}"
            rows.append([f"experts, {where}", _said(found), verdict(good)])
    return rows


def budgets(ledger: Ledger, setup: Setup) -> None:
    """Compare the allocated bytes with the plan and the budget."""
    rows = []
    for name in setup.models:
        path = hybrid._model(setup.folder, name)
        size = path.stat().st_size / GIB
        for share in (0.85,) if setup.options else SHARES:
            given = {"device": device_name(setup.device), "vram_budget": share * size}
            key = f"{name}-{share:.0%}".replace("%", "")
            found = ledger.unit(key, lambda given=given, path=path: _kept(  # type: ignore[misc]
                hybrid._worker(ledger, setup, path, given)
            ))  # fmt: skip
            if found is None:
                continue
            if "error" in found:
                rows.append([name, f"{share * size:.2f}", found["error"], "", "", "", "FAIL"])
                continue
            planned, held = found["planned"] / GIB, found["held"] / GIB
            used = held / (share * size)
            good = held <= planned * 1.0001 and used <= 1.0 and used >= USED
            cells = [f"{share * size:.2f}", f"{planned:.2f}", f"{held:.2f}", f"{used:.0%}"]
            rows.append([name, *cells, f"{found['tokens_per_second']:.1f}", verdict(good)])
    print_table(["model", "budget GiB", "planned", "held", "of budget", "tokens/s", ""], rows)
    print(ledger.closing())


def speed(ledger: Ledger, setup: Setup, files: list[Path]) -> None:
    """Measure prompts and answers of whole dense models on the device, and llama.cpp's if it is given."""
    own = [hybrid._model(setup.folder, name, plain=True) for name in setup.models]
    n_prompt, n_gen = (16, 4) if setup.options else (PROMPT, ANSWER)
    rows = []
    for path in [*files, *own]:
        tests = ["-m", str(path), "-p", str(n_prompt), "-n", str(n_gen), "-r", "3", "-o", "json"]
        programs = {"hotset": [sys.executable, "-m", "hotset.cli.main", "bench", "--sparsity", "dense"]}
        programs["hotset"] += ["--device", device_name(setup.device)]
        if setup.llama is not None:
            programs["llama.cpp"] = [str(setup.llama / "llama-bench"), "-ngl", "999"]
        found = {
            program: ledger.unit(
                f"{path.stem}-{program}",
                lambda argv=argv, tests=tests: _kept(_bench(ledger, [*argv, *tests])),  # type: ignore[misc]
            )
            for program, argv in programs.items()
        }
        rows += _speed_rows(path.stem, found)
    print_table(["model", "test", "hotset", "llama.cpp", "ratio", "target"], rows)
    print(ledger.closing())


def _bench(ledger: Ledger, argv: list[str]) -> dict[str, Any]:
    done = hybrid._run(ledger, argv)
    if isinstance(done, str):
        return {"error": done}
    return {"pp" if one["n_prompt"] else "tg": one["avg_ts"] for one in json.loads(done.stdout)}


def _speed_rows(name: str, found: dict[str, dict[str, Any] | None]) -> list[list[str]]:
    rows = []
    ours, theirs = found.get("hotset") or {}, found.get("llama.cpp") or {}
    for test, target in RATIOS.items():
        ratio = ours[test] / theirs[test] if test in ours and test in theirs else None
        cells = [_rate(one, test) for one in (ours, theirs)]
        reached = "" if ratio is None else f"{target}× {verdict(ratio >= target)}"
        rows.append([name, test, *cells, "" if ratio is None else f"{ratio:.2f}×", reached])
    return rows


def _rate(found: dict[str, Any], test: str) -> str:
    return f"{found[test]:.1f}" if test in found else str(found.get("error", ""))


def _trial(ledger: Ledger, key: str, env: dict[str, str] | None = None, **task: Any) -> dict[str, Any] | None:
    """Return the result of a separate process, or {"error": ...}, which is not stored, so it is run again."""

    def measure() -> dict[str, Any]:
        done = hybrid._run(
            ledger, [sys.executable, str(TRIAL), json.dumps(task)], env=env or dict(os.environ)
        )
        return _kept(
            {"error": done} if isinstance(done, str) else dict(json.loads(done.stdout.splitlines()[-1]))
        )

    return ledger.unit(key, measure)


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    return found | {"failed": "error" in found}


def _micros(found: dict[str, Any]) -> str:
    return f"{found['seconds'] * 1e6:.0f} µs" if "seconds" in found else str(found["error"])


def _works(found: dict[str, Any]) -> str:
    return verdict("seconds" in found)


def _said(found: dict[str, Any]) -> str:
    if "error" in found:
        return str(found["error"])
    if "answer" in found:
        counts = ", ".join(f"{n} {where}" for where, n in found["found"].items())
        return "; ".join([f"answer {found['answer'][:8]}", counts, *found["notes"]])
    if "logits" in found:
        return f"{found['tokens_per_second']:.0f} tokens/s, logits {found['logits'][:8]}"
    different = f"; other bits with {found['different']} tokens" if found["different"] else ""
    split = f", {found['split']} layers shared" if found["budget"] is not None else ""
    return "; ".join([f"{found['captured']} sizes recorded{split}{different}", *found["notes"]])
