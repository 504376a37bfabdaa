"""Compares logits with hashes stored on another platform.

    python tests/platforms/hashes.py
    python tests/platforms/hashes.py Q4_0       # only names with one of the words

Needs only hotset and NumPy. Prints the number of equal hashes and the name of each different one. Exits with
1 if any differs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from logit_bits import DENSE_CASES, N_VOCAB, RELU_CASES, bits_of, write_case, written_bits

import hotset


def main() -> None:
    platform, known = written_bits()
    words = sys.argv[1:]
    cases = {
        name: case
        for name, case in (DENSE_CASES | RELU_CASES).items()
        if not words or any(word in name for word in words)
    }
    other = []
    for name, (_, settings) in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_case(name, Path(folder))
            with hotset.load(path, n_ctx=128, n_threads=2, device="cpu", **settings) as model:
                if bits_of(model, N_VOCAB) != known[name]:
                    other.append(name)
                    print(f"{name}: other bits than on {platform}")
    print(f"{len(cases) - len(other)} of {len(cases)} hashes are those of {platform}")
    sys.exit(bool(other) or not cases)


if __name__ == "__main__":
    main()
