"""What the pages of the reference start with."""

from __future__ import annotations

_MADE = "<!-- Made from the code while the documentation is built. -->\n"

_INTROS = {
    "Commands": """
`autotune COMMAND --help` prints the same. RUN is a run's id or the start of one, by default the latest run.
""",
    "Knobs": """
A knob is a setting that autotune may change, under one name for all frameworks: the vocabulary of
`--set knob=value`, `search.vary` and `recovery.deny`. *Saves* says which memory it saves, and which way.
""",
    "Remedies": """
A remedy turns a knob one way. None changes what is trained: batch sizes, lengths, learning rate and data are
yours. The settings of a framework, with their limits, and what became of the advice of public guides:
{frameworks}.
""",
    "Remedies for {framework}": """
`autotune remedies {framework}` prints the same, with what each frees and slows; [Remedies](remedies.md) has
them by name. Limits are those of the example jobs.
""",
    "Causes and rules": """
What `autotune explain` and the watch of a running job recognise. `autotune explain --rule ID` shows a rule's
pattern and its remedies. A line alone stops no job: see [When a running job is stopped](../stops.md).
""",
    "JSON documents": """
What `--json` prints. Fields are added, never renamed; sizes are bytes, times are UTC, and `schema` is the
version of a document. A schema file has all of a document, nested types included.
""",
    "Settings of the built-in job": """
`settings:` of a job with `framework: builtin`; what it is: [the built-in job](../frameworks/builtin.md).
Sizes may be written as `120MiB`.
""",
    "Models and cards": """
`--gpus 8xH100`, `--gpus 2x8xH100-80GB` (nodes x cards) and `gpu:` under `cluster:` take the names of cards,
whatever their case, dashes and spaces.

The models are the hub names whose shape is known without their files. Of any other model, `model:` of the
job names the folder or the `config.json`, or gives the shape.
""",
}


def head(title: str, **values: str) -> str:
    """Return the title of a page and what stands below it, with its `{names}` filled in."""
    return f"# {title}\n\n{_MADE}{_INTROS[title]}".format(**values)
