"""What a machine with a GPU is asked, in stages that can be stopped and resumed.

usage: python bench/gpu/stages.py check  [--device cuda:0]
       python bench/gpu/stages.py kernels --out RESULTS
       python bench/gpu/stages.py hybrid  --out RESULTS --models FOLDER [--model 7b-q4_0 ...]
                                          [--llama BUILD/bin] [--powerinfer BUILD/bin/main]

check    kernels on the device against their twins and the CPU, then under the memory and race checkers
kernels  each kernel against its twin, and its share of the measured read rate
hybrid   tokens per second at 25, 50 and 100% of a model in GPU memory: hybrid, CPU alone, GPU alone, peers

A stage begins no new unit of work after --seconds, and goes on where it was when it is called again with the
same --out. It prints a table last and keeps raw results. Without a GPU, --device cpu --small runs every line
of it on sizes that mean nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # peers.py and synthetic.py of bench/

ROOT = Path(__file__).parents[2]
KERNEL_TESTS = "tests/interpreted_gpu_kernels.py"
CHECKERS = {"memcheck": "out-of-bounds and misaligned accesses", "racecheck": "races in shared memory"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["check", "kernels", "hybrid"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of raw results")
    parser.add_argument("--seconds", type=float, default=480, help="begin no unit after so long (480)")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--small", action="store_true", help="sizes for trying the scripts out")
    parser.add_argument("--models", type=Path, default=Path("gpu-models"), help="folder for synthetic models")
    parser.add_argument("--model", action="append", help="of hybrid; repeatable; all, the smallest first")
    parser.add_argument("--llama", type=Path, help="bin folder of a llama.cpp build for this GPU")
    parser.add_argument("--powerinfer", type=Path, help="PowerInfer's program main, built for this GPU")
    args = parser.parse_args()
    if args.stage == "check":
        sys.exit(check(args.device))
    from ledger import Ledger

    from hotset.backends.gpu.devices import find_device
    from hotset.errors import HotsetError

    try:
        device = find_device(args.device)
    except HotsetError as error:
        sys.exit(str(error))
    ledger = Ledger(args.out / args.stage, args.seconds, again=args.again)
    if args.stage == "kernels":
        import kernels

        kernels.run(ledger, device, kernels.SMALL if args.small else kernels.Sizes())
    else:
        import hybrid

        hybrid.run(ledger, hybrid.Setup.of(args, device))


def check(device: str) -> int:
    """The kernels' tests on the device, under compute-sanitizer too where it is installed; whole models."""
    import models

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", KERNEL_TESTS]
    environment = os.environ | {"HOTSET_TEST_DEVICE": device}
    code = 0
    if device == "cpu":
        print("the kernels are compiled for GPUs alone; `make test` runs them in Triton's interpreter")
    else:
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        sanitizer = shutil.which("compute-sanitizer")
        for tool, what in CHECKERS.items() if sanitizer else ():
            print(f"\n{tool}: {what}", flush=True)
            checked = [str(sanitizer), "--tool", tool, "--error-exitcode", "1", *command]
            code = subprocess.run(checked, cwd=ROOT, env=environment).returncode or code
        if sanitizer is None:
            print("compute-sanitizer is not installed: accesses and races were not checked")
    return 0 if models.agree(device) and code == 0 else 1


if __name__ == "__main__":
    main()
