"""The arguments that releases of SGLang and vLLM take, read in their source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.facts.argparse_flags import flags_of
from benchmarks.facts.dataclass_fields import Field, fields_of, read

_FLAG = Field(kind="", default=None, section="")  # of the command line alone


def sglang(root: Path) -> dict[str, Any]:
    """Return types and defaults of `ServerArgs`; later releases assemble it of namespaces."""
    source = root / "sglang" / "srt"
    folder = source / "arg_groups" / "fields"
    found: dict[str, Field] = {}
    if folder.exists():
        namespaces = read(folder)
        for name in namespaces.classes:
            found |= fields_of(name, namespaces)
    return _facts(found | fields_of("ServerArgs", read(source / "server_args.py")))


def vllm(root: Path) -> dict[str, Any]:
    """Return types and defaults of the engine's arguments and of those of `vllm serve`, its HTTP server."""
    source = root / "vllm"
    engine = read(source / "config") | read(source / "engine" / "arg_utils.py")
    files = sorted((source / "entrypoints").rglob("cli_args.py"))  # its place changes between releases
    file, server = next((f, found) for f in files if "FrontendArgs" in (found := read(f)).classes)
    texts = ((source / "engine" / "arg_utils.py").read_text(), file.read_text())
    flags = {name.replace("-", "_"): _FLAG for text in texts for name in flags_of(text)}
    return _facts(flags | fields_of("FrontendArgs", server) | fields_of("AsyncEngineArgs", engine))


def _facts(found: dict[str, Field]) -> dict[str, Any]:
    return {
        "types": {key: field.kind or "any" for key, field in sorted(found.items())},
        "defaults": {
            key: field.default
            for key, field in sorted(found.items())
            if isinstance(field.default, bool | int | float | str)
        },
    }
