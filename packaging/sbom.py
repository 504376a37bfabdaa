"""Write the components of a hotset installation as a CycloneDX 1.6 document: `make sbom`.

    python packaging/sbom.py [EXTRA ...] -o hotset.cdx.json

The packages are hotset's requirements in the running interpreter, with versions and licences, plus the
components bundled in the wheel (THIRD_PARTY_NOTICES.md). An extra adds its requirements.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

VENDOR = Path(__file__).resolve().parents[1] / "src/hotset/server/page/vendor"
BUNDLED = (
    ("nanobind", "BSD-3-Clause", "pkg:pypi/nanobind"),
    ("tsl::robin_map", "MIT", "pkg:github/Tessil/robin-map"),
    ("GGML", "MIT", "pkg:github/ggml-org/ggml"),
    ("marked", "MIT", "pkg:npm/marked"),
    ("highlight", "BSD-3-Clause", "pkg:npm/%40highlightjs/cdn-assets"),
    ("pdf", "Apache-2.0", "pkg:npm/pdfjs-dist"),
    ("core-js", "MIT", "pkg:npm/core-js"),
    ("temml", "MIT", "pkg:npm/temml"),
    ("LLVM's runtimes", "Apache-2.0 WITH LLVM-exception", "pkg:github/llvm/llvm-project"),
    ("MinGW-w64's runtime", "ZPL-2.1", "pkg:generic/mingw-w64"),
)
"""Name as in THIRD_PARTY_NOTICES.md, licence, address. Only wheels built with zig have the last two."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("extras", nargs="*")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document(options.extras), indent=1) + "\n", "utf-8")
    print(options.output)


def document(extras: Iterable[str] = ()) -> dict[str, Any]:
    """Return the bill of materials of the installed hotset."""
    main, needs = distribution("hotset"), {}
    _add(main, extras, needs)
    found = {name: distribution(name) for name in needs if name != "hotset"}
    hotset = component(main)
    bundled = [bundled_component(*one) for one in BUNDLED]
    refs = {name: component(one)["bom-ref"] for name, one in found.items()} | {"hotset": hotset["bom-ref"]}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": hotset | {"type": "application", "components": bundled}},
        "components": [component(one) for _, one in sorted(found.items())],
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[need] for need in needs[name])}
            for name in sorted(needs)
        ],
    }


def _add(one: Distribution, extras: Iterable[str], needs: dict[str, set[str]]) -> None:
    """Collect in `needs` the requirements of a package, recursively."""
    name = canonical(one.metadata["Name"])
    known = needs.setdefault(name, set())
    for text in one.requires or ():
        requirement = Requirement(text)
        wanted = [{"extra": extra} for extra in ("", *extras)]
        if requirement.marker and not any(requirement.marker.evaluate(names) for names in wanted):
            continue
        needed = canonical(requirement.name)
        if needed in known:
            continue
        try:
            found = distribution(needed)
        except PackageNotFoundError:
            raise SystemExit(f"{needed}, which {name} requires, is not installed") from None
        known.add(needed)
        if needed not in needs or requirement.extras:
            _add(found, requirement.extras, needs)


def bundled_component(name: str, licence: str, url: str) -> dict[str, Any]:
    """Return a bundled component. Files of the chat page state their version in the first lines."""
    texts = [
        path.read_text("utf-8") for path in sorted(VENDOR.glob(f"{name}.*")) if path.suffix != ".LICENSE"
    ]
    version = next((m[1] for text in texts if (m := re.search(r"\bv(\d+\.\d+\.\d+)\b", text[:400]))), "")
    purl = f"{url}@{version}" if version else url
    made = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "purl": purl,
        "licenses": [{"expression": licence}],
    }
    return made | ({"version": version} if version else {})


def component(one: Distribution) -> dict[str, Any]:
    name, version = canonical(one.metadata["Name"]), one.version
    purl = f"pkg:pypi/{name}@{version}"
    made: dict[str, Any] = {
        "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
    }  # fmt: skip
    if expression := one.metadata["License-Expression"]:
        made["licenses"] = [{"expression": expression}]
    elif stated := licence_of(one):
        made["licenses"] = [{"license": {"name": stated}}]
    return made


def licence_of(one: Distribution) -> str:
    """Return the licence from the classifiers, otherwise the first line of the licence field."""
    classified = [
        text.rpartition(" :: ")[2]
        for text in one.metadata.get_all("Classifier", ())
        if text.startswith("License :: ")
    ]
    return "; ".join(classified) or (one.metadata["License"] or "").partition("\n")[0]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
