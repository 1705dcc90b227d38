"""`python -m docs.site [FOLDER]`, or `make docs`: puts all pages together and builds build/site."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from docs.site import links
from docs.site.assembly import assemble


def build(to: Path) -> int:
    """Build the site in a folder; returns an exit code, not 0 if a link or an anchor leads nowhere."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        assemble(work / "docs")
        settings = yaml.safe_load((links.ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
        settings |= {"docs_dir": "docs", "site_dir": "site"}
        (work / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        argv = [sys.executable, "-m", "zensical", "build", "--strict"]
        code = subprocess.run(argv, cwd=work, check=False).returncode
        if code == 0:
            shutil.rmtree(to, ignore_errors=True)
            shutil.copytree(work / "site", to)
        return code


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else links.ROOT / "build" / "site"
    code = build(folder)
    if code == 0:
        print(folder / "index.html")  # noqa: T201
    sys.exit(code)
