"""`python -m orchestrator.job_schema > configs/job.schema.json`."""

from __future__ import annotations

import json
import sys

from launchers.frameworks import FRAMEWORKS
from orchestrator.job_format import schema


def text() -> str:
    """Return the JSON schema of job.yaml as it is committed."""
    return json.dumps(schema(tuple(FRAMEWORKS)), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
