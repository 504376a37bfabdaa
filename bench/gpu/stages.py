"""Tests and measurements on a machine with a GPU, in stages that can be stopped and resumed.

usage: python bench/gpu/stages.py vulkan --out RESULTS --models FOLDER [--llama-source llama.cpp] [--part ...]
       python bench/gpu/stages.py check  [--device cuda:0] [--part kernels|models|memcheck|racecheck ...]
       python bench/gpu/stages.py kernels --out RESULTS
       python bench/gpu/stages.py hybrid  --out RESULTS --models FOLDER [--model 7b-q4_0 ...]
                                          [--llama BUILD/bin] [--powerinfer BUILD/bin/main]
       python bench/gpu/stages.py steps | budgets | speed | build   (options as of hybrid)

vulkan   the Vulkan backend: bits, costs of launches, speed by operation, llama.cpp on the same files
check    kernels on the device compared with the fallback and the CPU, then under the memory and race checkers
steps    every host-device synchronisation, captured and uncaptured steps, a long prompt; each
in its own process
kernels  each kernel compared with its fallback, and its share of the measured read rate
budgets  allocated bytes compared with the plan and the budget
build    llama.cpp and PowerInfer for CUDA, from --llama-source and --powerinfer-source
speed    prompts and answers of a synthetic 7B and of --real files, dense, and llama.cpp's
hybrid   tokens per second at 25, 50 and 100% of a model in GPU memory: hybrid, CPU only, GPU only, peers

A stage starts no unit of work after --seconds, ends within nine minutes whatever its programs do, and
continues when it is called again with the same --out. It prints a table last and keeps raw results. Without
a GPU, --device simulated --small runs every line of it with meaningless sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # peers.py and synthetic.py of bench/

from ledger import LIMIT, Ledger, run_within

from hotset.backends.triton.devices import SIMULATED
from hotset.cores import usable_cores

PROCESSES = 12  # each with a context on the device
ROOT = Path(__file__).parents[2]
KERNEL_TESTS = "tests/backends/triton/interpreted_gpu_kernels.py"
PARTS = {
    "kernels": "each compiled kernel compared with its fallback",
    "models": "logits of whole models compared with the CPU engine's",
    "memcheck": "out-of-bounds and misaligned accesses of the kernels",
    "racecheck": "races in shared memory",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "stage", choices=["vulkan", "check", "steps", "kernels", "budgets", "build", "speed", "hybrid"]
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--vulkan", default="vulkan", help="the device of stage vulkan")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of raw results")
    parser.add_argument("--seconds", type=float, help="start no unit after this time (480)")
    parts = [*PARTS, "parity", "costs", "speed", "peers", "gate", "tests"]
    parser.add_argument(
        "--part", action="append", choices=parts, help="of check or vulkan; repeatable; all of the stage"
    )
    # One core is left for the thread that waits for the device.
    parser.add_argument(
        "--threads", type=int, default=max(usable_cores() - 1, 1), help="of the CPU, for all programs"
    )
    parser.add_argument("--again", action="store_true", help="measure units with results again")
    parser.add_argument("--small", action="store_true", help="sizes for trying the scripts out")
    parser.add_argument("--models", type=Path, default=Path("gpu-models"), help="folder for synthetic models")
    parser.add_argument("--model", action="append", help="of hybrid; repeatable; all, the smallest first")
    parser.add_argument("--llama", type=Path, help="bin folder of a llama.cpp build for this GPU")
    parser.add_argument("--powerinfer", type=Path, help="PowerInfer's program main, built for this GPU")
    parser.add_argument("--llama-source", type=Path, help="of build, which --llama then need not name")
    parser.add_argument("--powerinfer-source", type=Path, help="of build")
    parser.add_argument(
        "--real", type=Path, action="append", default=[], help="a model for speed; repeatable"
    )
    args = parser.parse_args()
    seconds = args.seconds or 480.0
    if args.stage == "check":
        end = min(args.seconds or LIMIT, LIMIT)
        sys.exit(check(args.device, args.part or list(PARTS), end, small=args.small))
    if args.stage == "build":
        import build

        sources = {"llama.cpp": args.llama_source, "PowerInfer": args.powerinfer_source}
        given = {name: source for name, source in sources.items() if source is not None}
        build.run(Ledger(args.out / "build", seconds, again=args.again), given)
        return
    if args.stage == "vulkan":
        import vulkan

        how = vulkan.Setup(args.vulkan, args.device, args.models, args.llama_source, args.small)
        vulkan.run(Ledger(args.out / "vulkan", seconds, again=args.again), how, args.part or vulkan.PARTS)
        return
    from hotset.backends.triton.devices import find_device
    from hotset.errors import HotsetError

    try:
        device = find_device(args.device)
    except HotsetError as error:
        sys.exit(str(error))
    ledger = Ledger(args.out / args.stage, seconds, again=args.again)
    if args.stage == "kernels":
        import kernels

        kernels.run(ledger, device, kernels.SMALL if args.small else kernels.Sizes())
        return
    import hybrid
    import steps

    import build

    if args.llama is None and args.llama_source is not None:
        built = build.program_of(args.llama_source, "llama.cpp CUDA")
        args.llama = built.parent if built.exists() else None
    if args.powerinfer is None and args.powerinfer_source is not None:
        built = build.program_of(args.powerinfer_source, "PowerInfer")
        args.powerinfer = built if built.exists() else None
    if args.stage == "steps" and args.model is None:
        args.model = ["small"]
    setup = hybrid.Setup.of(args, device)
    match args.stage:
        case "steps":
            steps.run(ledger, setup)
        case "budgets":
            steps.budgets(ledger, setup)
        case "speed":
            steps.speed(ledger, setup, args.real)
        case _:
            hybrid.run(ledger, setup)


def check(device: str, parts: list[str], seconds: float, *, small: bool = False) -> int:
    """Run the kernels' tests on the device, also under compute-sanitizer if installed, and whole models.

    A part that has not ended after `seconds` is a failure.
    """
    end, code = time.monotonic() + seconds, 0
    for part in parts:
        left = end - time.monotonic()
        if left < 1:
            print(f"no time is left for {part}: run check --part {part}")
            return 1
        print(f"\n{part}: {PARTS[part]}", flush=True)
        if device == SIMULATED and part != "models":
            print("the kernels are compiled only for GPUs; `make test` runs them in Triton's interpreter")
            continue
        code |= _part(part, device, left, small)
    return code


def _part(part: str, device: str, seconds: float, small: bool) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", KERNEL_TESTS]
    environment = os.environ | {"HOTSET_TEST_DEVICE": device}
    if part == "models":
        command = [sys.executable, str(Path(__file__).with_name("models.py")), device]
        command += ["--small"] if small else []
    elif part == "kernels":
        if importlib.util.find_spec("xdist") is not None:  # Triton's compiler takes most of the time
            command += ["-n", str(min(usable_cores(), PROCESSES))]
    else:
        if (sanitizer := shutil.which("compute-sanitizer")) is None:
            print("compute-sanitizer is not installed: this was not checked")
            return 0
        # The allocator keeps freed memory, and divides one piece among many tensors: out-of-bounds reads
        # would be within its memory.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        command = [sanitizer, "--tool", part, "--error-exitcode", "1", *command]
    try:
        return run_within(command, seconds, cwd=ROOT, env=environment).returncode
    except subprocess.TimeoutExpired:
        print(f"{part} has not ended after {seconds:.0f} s: run check --part {part}")
        return 1


if __name__ == "__main__":
    main()
