"""Puts the pages together: those of docs/, those made from the code, and the files that they link to."""

from __future__ import annotations

import shutil
from pathlib import Path

from docs.site import examples, links, reference

# Files at the root of the repository that are pages.
_OWN = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
_ASSETS = (".svg", ".png", ".css")


def sources() -> dict[str, tuple[str, str]]:
    """Return the text of every page by its place on the site, each with its path in the repository."""
    made = {**reference.pages(), **examples.pages()}
    pages = {uri: (text, f"docs/{uri}") for uri, text in made.items()}
    files = {
        path.relative_to(links.ROOT / "docs").as_posix(): path for path in (links.ROOT / "docs").rglob("*.md")
    }
    files |= {uri: links.ROOT / name for uri, name in _OWN.items()}
    for uri, path in files.items():
        pages[uri] = (path.read_text(encoding="utf-8"), path.relative_to(links.ROOT).as_posix())
    return pages


def assemble(to: Path) -> None:
    """Write everything that the site is made of into a folder.

    Raises FileNotFoundError for a link to a file that the repository does not have.
    """
    copied = set(reference.linked_files())
    for uri, (text, source) in sources().items():
        copied |= links.linked(text, source=source)
        page = to / uri
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(links.rewritten(text, source=source, page=uri), encoding="utf-8")
    for path in copied:
        _copy(links.ROOT / path, to / links.COPIES / path)
    for file in (links.ROOT / "docs").rglob("*"):
        if file.suffix in _ASSETS:
            _copy(file, to / file.relative_to(links.ROOT / "docs"))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
