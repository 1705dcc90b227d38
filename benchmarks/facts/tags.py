"""Prints releases that a repository has a tag of and that are newer than what is known: not all are on PyPI.

python -m benchmarks.facts.tags
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import NamedTuple

from packaging.version import Version

from benchmarks.facts.__main__ import SUBJECTS

_GITHUB = "https://github.com"
_TAG = re.compile(r"refs/tags/(?:.*[-/])?v?(\d+(?:\.\d+)+(?:\.post\d+)?)$", re.MULTILINE)


class Repository(NamedTuple):
    """A repository on GitHub, and the newest release that is known beside the facts on record."""

    name: str
    known: str = ""


REPOSITORIES = {
    "areal": Repository("areal-project/AReaL", known="2.0.0"),  # which launch refuses
    "miles": Repository("radixark/miles", known="0.1.0"),
    "ms-swift": Repository("modelscope/ms-swift"),
    "nemo-rl": Repository("NVIDIA-NeMo/RL", known="0.7.0"),
    "openrlhf": Repository("OpenRLHF/OpenRLHF"),
    "sglang": Repository("sgl-project/sglang"),
    "skyrl": Repository("NovaSky-AI/SkyRL"),
    "slime": Repository("THUDM/slime", known="0.3.1"),
    "trl": Repository("huggingface/trl"),
    "verl": Repository("verl-project/verl"),
    "vllm": Repository("vllm-project/vllm"),
}


def newest_known(subject: str) -> Version:
    """Return the newest release whose facts are on record, or that is known beside them."""
    own = SUBJECTS.get(subject)
    files = own.folder.glob("*.json") if own is not None else ()
    known = [*(file.stem for file in files), REPOSITORIES[subject].known]
    return max(Version(version) for version in known if version)


def newest_tag(address: str) -> Version | None:
    """Return the newest release that a repository has a tag of, no candidate of one; None without tags."""
    words = ["git", "ls-remote", "--tags", "--refs", address]
    listed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return max(map(Version, _TAG.findall(listed)), default=None)


def main() -> int:
    """Print a line for each repository whose newest tag is not known; git fails where it cannot be read."""
    for subject, repository in REPOSITORIES.items():
        newest, known = newest_tag(f"{_GITHUB}/{repository.name}"), newest_known(subject)
        if newest is not None and newest > known:
            text = f"! {subject} {newest} is tagged in {repository.name}; the newest known is {known}"
            sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
