"""Links of pages to files outside docs/: the same link works in the repository and on the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A file or folder of the repository that is a page of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "configs": "examples.md",
    "configs/schemas": "reference/json.md",
}
COPIES = "repository"  # the folder of the site that holds the other files
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
# The site's Markdown takes a bar within code as it is, where the repository's needs a backslash before it.
_CODE_IN_TABLE = re.compile(r"(?<=[| ])`[^`\n]*\\\|[^`\n]*`")
_ELSEWHERE = re.compile(r"[a-z]+:")


def linked(markdown: str, *, source: str) -> set[str]:
    """Return the files outside docs/ that a page links to, which are copied to the site.

    `source` is the page's path in the repository. Raises FileNotFoundError for a link that leads nowhere.
    """
    targets = (_repository_path(found["target"], source) for found in _LINK.finditer(markdown))
    return {path for path in targets if path and not path.startswith("docs/") and path not in PAGES}


def rewritten(markdown: str, *, source: str, page: str) -> str:
    """Return a page's text with its links as they are on the site, where the page is `page`."""

    def on_site(found: re.Match[str]) -> str:
        path = _repository_path(found["target"], source)
        if path is None:
            return found[0]
        target = PAGES.get(path) or (path[5:] if path.startswith("docs/") else f"{COPIES}/{path}")
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"{found['before']}{relative}{found['anchor'] or ''}"

    return _CODE_IN_TABLE.sub(lambda found: found[0].replace("\\|", "|"), _LINK.sub(on_site, markdown))


def _repository_path(target: str, source: str) -> str | None:
    """Return the path in the repository that a link means; None for an address."""
    if _ELSEWHERE.match(target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path.startswith("docs/") or path in PAGES:
        return path
    if not (ROOT / path).is_file():
        raise FileNotFoundError(f"{source} links to {target}, which is no file of the repository")
    return path
