"""`autotune skill`."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

import autotune.configs
from autotune.orchestrator.cli.shared.options import Options, given, global_options
from autotune.orchestrator.errors import UserError, reason_of
from autotune.policies.values.value import Value

_CODES = """\b
Exit codes:
  0    the skill is written
  2    the file exists and is not autotune's, the folder is not writable, or an option is wrong"""
_NAME = "autotune"
_TEXT = Path(__file__).with_name("shared") / "SKILL.md"
_SCHEMAS = Path(next(iter(autotune.configs.__path__)), "schemas")
_OURS = "\nname: autotune\n"  # in the head of every SKILL.md written by this command


class SkillDocument(Value, frozen=True, kw_only=True):
    """The answer of `autotune skill --json`."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    skill: str  # the file of instructions
    files: tuple[str, ...]  # written files, the skill first


def write(folder: Path, *, options: Options) -> None:
    """Write the skill and its schemas below `folder`, and print its path; raises Failure."""
    home = folder / _NAME
    target = home / "SKILL.md"
    texts = {target: _TEXT.read_text(encoding="utf-8")}
    for schema in sorted(_SCHEMAS.iterdir()):
        texts[home / "references" / schema.name] = schema.read_text(encoding="utf-8")
    try:
        if target.exists() and _OURS not in target.read_text(encoding="utf-8", errors="replace"):
            raise UserError(
                f"`{target}` exists and was not written by autotune",
                hint="pass another folder, or move the file",
            )
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = reason_of(error)
        raise UserError(
            f"cannot write `{error.filename or home}`: {reason}",
            hint="pass a folder that you can write: `autotune skill DIR`",
        ) from None
    if options.json:
        click.echo(msgspec.json.encode(SkillDocument(skill=str(target), files=tuple(map(str, texts)))))
    else:
        click.echo(str(target))


@click.command("skill", epilog=_CODES)
@click.argument(
    "folder", metavar="[DIR]", default=".agents/skills", type=click.Path(path_type=Path, file_okay=False)
)
@global_options
@click.pass_context
def command(context: click.Context, folder: Path) -> None:
    """Write instructions for coding agents that use autotune, in the Agent Skills format.

    DIR is the folder of the skills; default: .agents/skills. A skill that autotune wrote before is replaced.

    \b
    Example:
      autotune skill .claude/skills
    """  # noqa: D301 - click reads the backspace
    write(folder, options=given(context))
