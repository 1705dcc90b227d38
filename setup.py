"""Refuses to build where the links of src/autotune were lost; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

_PACKAGE = Path(__file__).parent / "src" / "autotune"
_FOLDERS = ("configs", "launchers", "orchestrator", "policies")
_lost = [name for name in _FOLDERS if not (_PACKAGE / name / "__init__.py").is_file()]
if _lost:
    raise SystemExit(
        f"src/autotune/{_lost[0]} is not a link to {_lost[0]}/: this checkout has no symbolic links\n"
        "hint: git config core.symlinks true && git checkout -- src, or unpack a .tar.gz instead of a .zip"
    )

setup()
