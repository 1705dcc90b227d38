"""`python -m autotune.orchestrator.config.json_schema > configs/job.schema.json`."""

from __future__ import annotations

import json
import sys

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.config.schema import schema


def text() -> str:
    """Return the JSON schema of job.yaml as it is committed."""
    return json.dumps(schema(tuple(FRAMEWORKS)), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
