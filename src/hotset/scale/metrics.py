"""Metrics of several replicas as one text for Prometheus: each sample with a label that names its replica."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (.*)")


def with_replicas(texts: Mapping[str, str]) -> str:
    """Join the texts of /metrics by replica. The help and type of a family appear once."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if line not in heads.setdefault(family, []) and len(heads[family]) < 2:
                    heads[family].append(line)
            elif match := _SAMPLE.fullmatch(line):
                name, labels, rest = match.groups()
                labels = f'{labels},replica="{replica}"' if labels else f'replica="{replica}"'
                samples.setdefault(family, []).append(f"{name}{{{labels}}} {rest}")
    lines = [line for family, found in samples.items() for line in (*heads.get(family, ()), *found)]
    return "".join(f"{line}\n" for line in lines)
