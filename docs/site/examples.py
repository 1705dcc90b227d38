"""The page of example jobs: every file of configs/, as it is."""

from __future__ import annotations

from docs.site.links import ROOT

_HEAD = """\
# Example jobs

The files of `configs/`, as they are. Paths of models and data are those of the frameworks' guides; replace
them by yours.
"""
_KINDS = {".yaml": "yaml", ".sbatch": "bash"}


def pages() -> dict[str, str]:
    """Return the page by its place on the site."""
    parts = [_HEAD]
    for folder, title in (("", "Jobs"), ("operations", "Places to run")):
        parts.append(f"## {title}\n")
        for file in sorted((ROOT / "configs" / folder).iterdir()):
            if file.suffix in _KINDS:
                text = file.read_text(encoding="utf-8").rstrip()
                name = file.relative_to(ROOT).as_posix()
                parts.append(f"### {name}\n\n```{_KINDS[file.suffix]}\n{text}\n```\n")
    return {"examples.md": "\n".join(parts)}
