"""Perplexity of hotset and llama.cpp on the same model and text: do fast kernels compute the right thing?

usage: python bench/perplexity.py --llama BUILD/bin --model SmolLM2.gguf --text wikitext2-test.txt

The same protocol for both: chunks of n_ctx tokens, the second half of each scored. Needs no quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import peers

TOLERANCE = 0.005  # of the peer's perplexity
ESTIMATE = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")


def run(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (env or {}), check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama", type=Path, required=True, help="bin folder of a llama.cpp build")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--ctx", type=int, default=512, help="tokens of a chunk (512)")
    parser.add_argument("--chunks", type=int, default=40)
    parser.add_argument("--isa", help="force hotset's kernels: avx2, avx512, scalar, ...")
    args = parser.parse_args()

    options = ["-f", str(args.text), "-c", str(args.ctx), "--chunks", str(args.chunks)]
    ours = json.loads(
        run(
            [sys.executable, "-m", "hotset.cli.main", "perplexity", str(args.model), *options, "--json"],
            {"HOTSET_ISA": args.isa} if args.isa else None,
        ).stdout
    )
    done = run([str(args.llama / "llama-perplexity"), "-m", str(args.model), *options])
    estimate = ESTIMATE.search(done.stdout + done.stderr)
    if estimate is None:
        sys.exit("llama-perplexity printed no final estimate: run it yourself to see why.")
    peer, peer_error = map(float, estimate.groups())
    difference = ours["ppl"] / peer - 1
    print(f"\n{args.model.name}, {args.text.name}, {args.chunks} chunks of {args.ctx} tokens\n")
    peers.print_table(
        ["hotset", "llama.cpp", "difference", f"target {TOLERANCE:.1%}"],
        [
            [
                f"{ours['ppl']:.3f} ± {ours['error']:.3f}",
                f"{peer:.3f} ± {peer_error:.3f}",
                f"{difference:+.2%}",
                peers.verdict(abs(difference) <= TOLERANCE),
            ]
        ],
    )
    print()
    peers.print_json("perplexity", machine=peers.machine(), isa=args.isa, ours=ours, peer=peer)


if __name__ == "__main__":
    main()
