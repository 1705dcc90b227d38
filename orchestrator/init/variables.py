"""A draft with environment variables in place of secrets."""

from __future__ import annotations

import msgspec

from autotune.orchestrator.config.secrets import without_secrets
from autotune.orchestrator.init.bash.state import Note, Use
from autotune.orchestrator.init.draft import Draft
from autotune.policies.explain.secrets import masked
from autotune.policies.values.job import Job


def with_variables(draft: Draft) -> Draft:
    """Return a draft that names variables in place of its secrets, with a note on each of them."""
    job, variables = without_secrets(
        Job(name="", framework="", command=draft.command, settings=draft.settings, env=draft.env)
    )
    notes = [msgspec.structs.replace(note, message=masked(note.message)) for note in draft.notes]
    for name in variables:
        message = f"a secret is left out: `export {name}=...` where autotune runs"
        use = draft.assigned.get(name, Use(file=draft.source, line=1))
        notes.append(Note(file=use.file, line=use.line, message=message))
    return msgspec.structs.replace(
        draft,
        command=job.command,
        settings=job.settings,
        env=job.env,
        formulas={name: masked(formula) for name, formula in draft.formulas.items()},
        notes=tuple(notes),
    )
