"""The picture of the architecture in CONTRIBUTING.md, drawn from .importlinter: python -m docs.site.rooms."""

from __future__ import annotations

import configparser
import textwrap

from docs.site.links import ROOT

_WIDTH = 100


def picture() -> str:
    """Return the rooms of every folder in the order in which they may import, from left to right."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter", encoding="utf-8")
    folders = {}
    for name in contracts.sections():
        if "layers" in contracts[name]:
            folder = contracts[name]["containers"].strip().removeprefix("autotune").strip(".")
            folders[folder] = contracts[name]["layers"].split("\n")[1:]
    top = [layer.strip() for layer in folders.pop("")]
    lines = [" → ".join(top), ""]
    for folder in sorted(folders, key=lambda folder: top.index(folder.partition(".")[0])):
        text = " → ".join(layer.strip().replace(" | ", ", ") for layer in folders[folder])
        title = folder.replace(".", "/").ljust(21)
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=title, subsequent_indent=" " * 21, break_on_hyphens=False
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())  # noqa: T201
