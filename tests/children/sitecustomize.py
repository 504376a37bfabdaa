"""Runs at the start of every Python process that a test starts: the guards of `seeded.py` hold there too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

import seeded

seeded.guard_modules()
