"""Fills in the manifests of Homebrew, winget and conda for a release.

    python packaging/manifests.py --homepage URL --publisher NAME --files dist -o dist/manifests

Version, description and dependencies are those of pyproject.toml. --files: the folder of the release's
files, as `HOMEPAGE/releases/download/vVERSION/` has them: the source archive, and for winget the file for
Windows (onefile.py) as `hotset-VERSION-windows-x64.exe`. Without that winget's manifests are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import tomllib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TEMPLATES = ("homebrew/hotset.rb", "conda/recipe.yaml", *(
    f"winget/hotset{part}.yaml" for part in ("", ".installer", ".locale.en-US")
))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--homepage", required=True)
    parser.add_argument("--publisher", required=True)
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    for name, text in filled(options.homepage.rstrip("/"), options.publisher, options.files).items():
        target = options.output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
        print(target)


def filled(homepage: str, publisher: str, files: Path) -> dict[str, str]:
    """Path of a manifest → its text. FileNotFoundError where the source archive is missing."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text("utf-8"))["project"]
    version = project["version"]
    base = f"{homepage}/releases/download/v{version}"
    sdist, windows = files / f"hotset-{version}.tar.gz", files / f"hotset-{version}-windows-x64.exe"
    values = {
        "VERSION": version,
        "DESCRIPTION": project["description"],
        "HOMEPAGE": homepage,
        "PUBLISHER": publisher,
        "MAINTAINER": publisher,
        "SDIST_URL": f"{base}/{sdist.name}",
        "SDIST_SHA256": sha256(sdist),
        "CONDA_RUN": "\n".join(f"    - {one}" for one in conda_requirements(project)),
    }
    templates = TEMPLATES
    if windows.is_file():
        values |= {"WINDOWS_URL": f"{base}/{windows.name}", "WINDOWS_SHA256": sha256(windows).upper()}
    else:
        templates = tuple(name for name in templates if not name.startswith("winget/"))
    texts = {name: (FOLDER / name).read_text("utf-8") for name in templates}
    return {name: re.sub(r"@([A-Z_0-9]+)@", lambda m: values[m[1]], text) for name, text in texts.items()}


def conda_requirements(project: dict[str, object]) -> list[str]:
    """Of the package and of its server, with conda's names; without those of one system alone."""
    needs = [*project["dependencies"], *project["optional-dependencies"]["serve"]]  # type: ignore[index, misc]
    names = {"prompt-toolkit": "prompt_toolkit", "huggingface-hub": "huggingface_hub",
             "prometheus-client": "prometheus_client"}  # fmt: skip
    found = [f"python >={project['requires-python'].removeprefix('>=')}"]  # type: ignore[attr-defined]
    for need in needs:
        match = re.fullmatch(r"([\w-]+)(>=[\d.]+)?", need)
        if match:  # no marker
            found.append(f"{names.get(match[1], match[1])} {match[2] or ''}".strip())
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
