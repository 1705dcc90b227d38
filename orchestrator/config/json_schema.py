"""The JSON schema of job.yaml and its reference page, made of the definition of its keys.

`python -m autotune.orchestrator.config.json_schema > configs/job.schema.json`; with `--page`, docs/job.md.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from autotune.orchestrator.config.schema import JobFile


class _Untitled(GenerateJsonSchema):
    """A schema in which a key has its own name and no second one."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def schema() -> dict[str, Any]:
    """Return the JSON schema of job.yaml, for editors."""
    made = JobFile.model_json_schema(schema_generator=_Untitled)
    return {"$schema": _Untitled.schema_dialect, **made, "title": "autotune job"}


def text() -> str:
    """Return the JSON schema as it is committed."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
