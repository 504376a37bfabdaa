"""Compare the entries of the catalogue file with the hub, and record which ones agree.

    python packaging/check_catalogue.py [--write] [--file FILE] [NAME ...]

It checks for each entry that the repository exists, that it has a file of the quantisation, that hotset runs
its architecture, and that the licences agree. --write stores sizes, architectures, licences and the
date of the check; an entry that differs gets no date. The exit code is 1 if an entry differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hotset.errors import HotsetError
from hotset.model.architectures import ARCHITECTURES
from hotset.storage import catalogue
from hotset.storage.hub import repository_listing, select_files


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--file", type=Path, default=catalogue.LISTED)
    options = parser.parse_args()
    entries: list[dict[str, Any]] = json.loads(options.file.read_bytes())
    if unknown := set(options.names) - {entry["name"] for entry in entries}:
        parser.error(f"not in {options.file.name}: {', '.join(sorted(unknown))}")
    n_wrong = 0
    for entry in entries:
        if options.names and entry["name"] not in options.names:
            continue
        try:
            facts, problems = compared(entry)
        except HotsetError as error:
            facts, problems = {}, [str(error)]
        n_wrong += bool(problems)
        entry |= facts | {"checked": None if problems else datetime.now(UTC).date().isoformat()}
        print(f"{entry['name']}: {'; '.join(problems) or 'as on the hub'}", flush=True)
    if options.write:
        lines = ",\n".join(" " + json.dumps(entry) for entry in entries)
        options.file.write_text(f"[\n{lines}\n]\n", "utf-8")
    return int(n_wrong > 0)


def compared(entry: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the hub's facts of an entry, and their differences from it. Raises HotsetError."""
    selection = select_files(entry["repo"], entry["quant"])
    shards = [file for file in selection.files if file.path.endswith(".gguf")]
    listing = json.loads(repository_listing(entry["repo"]))
    architecture = (listing.get("gguf") or {}).get("architecture") or ""
    licences = [
        tag.removeprefix("license:") for tag in listing.get("tags") or [] if tag.startswith("license:")
    ]
    licence = licences[0] if licences else ""
    if licence == "other":  # a licence of its own, named by the model card
        licence = (listing.get("cardData") or {}).get("license_name") or licence
    problems = []
    if architecture not in ARCHITECTURES:
        problems.append(f"hotset does not run the architecture {architecture!r}")
    for name, found in (("architecture", architecture), ("licence", licence)):
        if entry[name] and entry[name] != found:
            problems.append(f"its {name} is {found!r}, not {entry[name]!r}")
    size = sum(file.size or 0 for file in shards)
    return {"size": size, "architecture": architecture, "licence": licence}, problems


if __name__ == "__main__":
    sys.exit(main())
