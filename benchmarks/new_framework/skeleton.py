"""The files of a new framework, from the templates beside this module."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jinja2

TEMPLATES = Path(__file__).parent / "templates"
DIALECTS: Mapping[str, str] = {
    "overrides": "`key=value` words behind its program, as SkyRL's",
    "flags": "flags of an argparse parser, as OpenRLHF's",
    "file": "a YAML file, and `key=value` words that change it, as NeMo-RL's",
}
# The settings that the templates read, by the name that they give them: made up, to be replaced.
SETTINGS: Mapping[str, tuple[str, str, object]] = {
    "model": ("model.path", "str", ""),
    "nodes": ("cluster.nodes", "int", 1),
    "gpus": ("cluster.gpus_per_node", "int", 8),
    "batch": ("train.batch_size", "int", 128),
    "samples": ("rollout.samples_per_prompt", "int", 8),
    "micro_batch": ("train.micro_batch_size", "int", 4),
    "recompute": ("train.gradient_checkpointing", "bool", False),
    "steps": ("train.steps", "int", 100),
    "prompt": ("data.max_prompt_length", "int", 512),
    "answer": ("data.max_response_length", "int", 1024),
    "fraction": ("engine.gpu_memory_utilization", "float", 0.9),
    "tensor": ("engine.tensor_parallel_size", "int", 1),
    "folder": ("checkpoint.folder", "str", "checkpoints"),
    "every": ("checkpoint.every", "int", 10),
    "resume": ("checkpoint.resume", "bool", False),
    "logger": ("train.logger", "str", "console"),
}
_MODULES = ("__init__", "adapter", "advice", "config", "layout", "rows")
_DATA = ("lines", "presets", "start", "trial")


class _Insertion(NamedTuple):
    """A line of a registry, and the pattern of the line before which it goes."""

    file: str
    before: str
    line: str


def write(root: Path, name: str, *, title: str, dialect: str) -> list[str]:
    """Write the files of a framework and return their paths; raises FileExistsError for one that is there."""
    package = name.replace("-", "_")
    class_name = "".join(part.capitalize() for part in name.split("-"))
    values = {
        "name": name,
        "package": package,
        "title": title,
        "class_name": class_name,
        "dialect": dialect,
        "keys": {each: spelling(key, dialect) for each, (key, _, _) in SETTINGS.items()},
        "settings": {spelling(key, dialect): (kind, default) for key, kind, default in SETTINGS.values()},
    }
    folder = f"launchers/frameworks/{package}"
    own = (*(f"{module}.py" for module in _MODULES), *(f"{data}.yaml" for data in _DATA))
    files = {f"{folder}/{file}": file for file in own}
    files |= {
        f"{folder}/facts/0.0.0.json": f"facts-{'flags' if dialect == 'flags' else 'types'}.json",
        **({f"{folder}/defaults.yaml": "defaults.yaml"} if dialect == "flags" else {}),
        f"configs/{name}-example.yaml": "example.yaml",
        f"docs/frameworks/{name}.md": "page.md",
        f"tests/launchers/frameworks/test_{package}.py": "test_adapter.py",
        f"tests/contracts/test_{package}.py": "test_contract.py",
        f"tests/lookalikes/{package}_main.py": "lookalike.py",
        f"tests/orchestrator/explain/words/{name}.txt": "words.txt",
    }
    for file in files:
        if (root / file).exists():
            raise FileExistsError(file)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    for file, template in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(environment.get_template(f"{template}.jinja").render(values))
    modules = [file for file in files if file.endswith(".py")]
    for command in (("check", "--fix", "--select", "I"), ("format",)):  # names decide the order of imports
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", *modules]
        subprocess.run(ruff, cwd=root, check=True)
    return [*files, *_register(root, name, package=package, class_name=class_name, title=title)]


def spelling(key: str, dialect: str) -> str:
    """Return a made-up setting as a framework of that dialect would name it."""
    return key.replace(".", "-").replace("_", "-") if dialect == "flags" else key


def _register(root: Path, name: str, *, package: str, class_name: str, title: str) -> list[str]:
    rows = (
        _Insertion(
            "launchers/frameworks/__init__.py",
            r'^    "command": \(',
            f'    "{name}": ("{package}", "{class_name}"),\n',
        ),
        _Insertion(
            "launchers/frameworks/__init__.py",
            r'^    "command": Traces\(',
            f'    "{name}": Traces(("{package}/", "{package}.train")),  # TODO: of its logs alone\n',
        ),
        _Insertion(
            "mkdocs.yml", r"^      - Built-in job: frameworks/", f"      - {title}: frameworks/{name}.md\n"
        ),
        _Insertion(
            "mkdocs.yml",
            r"^          - Built-in job: reference/remedies",
            f"          - {title}: reference/remedies-{name}.md\n",
        ),
    )
    for row in rows:
        path = root / row.file
        path.write_text(
            re.sub(
                row.before, lambda match, row=row: row.line + match[0], path.read_text(), count=1, flags=re.M
            )
        )
    imports = root / ".importlinter"
    imports.write_text(
        imports.read_text().replace(
            " | builtin | command | tools", f" | {package} | builtin | command | tools"
        )
    )
    return sorted({*(row.file for row in rows), ".importlinter"})
