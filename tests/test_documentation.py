"""The documentation: it builds, its links lead somewhere, its commands and jobs are what autotune takes."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from markdown_it import MarkdownIt
from markdown_it.token import Token

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.cli import COMMANDS, main
from autotune.orchestrator.config.loader import load, parse_elsewhere
from autotune.orchestrator.errors import JobErrors
from autotune.orchestrator.run import journal
from docs.site import links, pictures, rooms
from docs.site.__main__ import build
from docs.site.assembly import assemble, sources

ROOT = Path(__file__).parents[1]
README = "README.md"
_MARKDOWN = MarkdownIt("commonmark").enable("table")
_TITLE = re.compile(r'title="([^"]+)"')
_VARIABLES = re.compile(r"^(?:[A-Z_]+=\S+ )+")


def texts() -> dict[str, str]:
    """Return every page and the README by path in the repository."""
    return {source: text for text, source in sources().values()} | {README: (ROOT / README).read_text()}


PAGES = texts()
WRITTEN = sorted(path for path in PAGES if (ROOT / path).exists())


def tokens(text: str) -> Iterator[Token]:
    """Yield all tokens of a page, those within lines too."""
    for token in _MARKDOWN.parse(text):
        yield token
        yield from token.children or ()


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language line and text of every block of code."""
    for token in tokens(text):
        if token.type in ("fence", "code_block"):
            yield token.info, token.content


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of every `autotune ...` that a page shows, in blocks and within sentences.

    Left out are placeholders in capitals for the command itself.
    """
    lines = [line for _, block in blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    lines += [token.content for token in tokens(text) if token.type == "code_inline"]
    for line in lines:
        output = _VARIABLES.sub("", line.strip().removeprefix("$ ").split(" | ")[-1])
        output = re.sub(r"^(?:\.venv/bin/|ray job submit .*?-- )(?=autotune )", "", output)
        if output.startswith("autotune ") and "·" not in output:
            words = shlex.split(output, comments=True)[1:]
            if not (words and words[0].isupper()):
                yield words


def parses(words: list[str]) -> str:
    """Return what the command line's parser objects to; empty for nothing."""
    context = click.Context(main, info_name="autotune", **main.context_settings)
    try:
        _, rest, _ = main.make_parser(context).parse_args(list(words))
        if not rest:
            return ""
        command = main.get_command(context, rest[0])
        if command is None:
            return f"no command `{rest[0]}`"
        own = click.Context(command, info_name=rest[0], parent=context, **command.context_settings)
        values, _, _ = command.make_parser(own).parse_args(rest[1:])
        for option in command.params:
            if isinstance(option.type, click.Choice | click.IntRange) and values.get(option.name) is not None:
                option.type_cast_value(own, values[option.name])
    except click.UsageError as error:
        return error.format_message()
    return ""


def test_a_user_reads_at_most_15000_words_on_16_pages() -> None:
    """The pages of docs/ and one framework's; methods, figures and what is made from the code aside."""
    pages = {path for path in (ROOT / "docs").glob("*.md") if path.name != "job.md"}
    frameworks = [len(path.read_text().split()) for path in (ROOT / "docs/frameworks").glob("*.md")]
    assert len(pages) + 1 <= 16
    assert sum(len(path.read_text().split()) for path in pages) + max(frameworks) <= 15_000
    assert len((ROOT / README).read_text().splitlines()) <= 50


def test_contributing_is_short_and_its_picture_is_that_of_the_import_contracts() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 150
    drawn = textwrap.indent(rooms.picture(), "    ")
    assert drawn in text
    named = re.findall(r"`((?:benchmarks|docs|launchers|orchestrator|policies|tests)/[\w/.]+)`", text)
    assert len(named) > 40
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_way_of_a_failure_names_functions_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    way = text.partition("### A failure's way")[2].partition("###")[0]
    named = re.findall(r"`([a-z/_]+\.py)` `(\w+)`", way)
    assert len(named) == 13
    for path, function in named:
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert function in functions, path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    assert build(folder) == 0
    return folder


def test_the_site_builds_without_a_link_or_an_anchor_that_leads_nowhere(site: Path) -> None:
    pages = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    assert {"index", "job", "frameworks/verl", "reference/commands", "reference/remedies-trl"} <= pages
    assert all(f"frameworks/{name}" in pages for name in FRAMEWORKS)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = re.findall(r"'([^']+)\.md'", str(settings["nav"]))
    assert sorted(named) == sorted(pages - {"404"})
    assert (site / "repository/configs/builtin-cpu.yaml").is_file()


def test_the_pages_ask_no_other_host_for_anything(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="(\w+:)?//', page.read_text())
        styles = re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="(?:\w+:)?//', page.read_text())
        assert not loaded and not styles, page


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    assemble(tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    page = tmp_path / "docs" / "stops.md"
    page.write_text(page.read_text() + "\n[a](nowhere.md) [b](job.md#nowhere)\n")
    argv = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "2 issues found" in done.stdout + done.stderr


def test_a_link_to_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="no file of the repository"):
        links.linked("[a](../configs/nowhere.yaml)", source="docs/page.md")
    assert links.linked("[a](../configs/builtin-cpu.yaml) [b](https://a.b)", source="docs/page.md") == {
        "configs/builtin-cpu.yaml"
    }


def test_the_readme_links_to_what_is_there() -> None:
    targets = [token.attrGet("href") or token.attrGet("src") for token in tokens(PAGES[README])]
    targets += re.findall(r'(?:src|href)="([^"]+)"', PAGES[README])
    for target in targets:
        if isinstance(target, str) and not target.startswith("http"):
            assert (ROOT / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_command_is_one_that_autotune_takes(page: str) -> None:
    wrong = {" ".join(words): error for words in commands(PAGES[page]) if (error := parses(words))}
    assert not wrong


def test_the_check_of_commands_can_fail() -> None:
    assert parses(["lunch", "job.yaml"]) and parses(["launch", "job.yaml", "--polcy", "ladder"])
    assert parses(["launch", "job.yaml", "--policy", "fastest"]) and parses(["search", "--trials", "-3"])
    items = [words for path in WRITTEN for words in commands(PAGES[path])]
    assert len(items) > 100
    assert {words[0] for words in items if words} >= COMMANDS.keys()


@pytest.mark.parametrize("page", WRITTEN)
def test_targets_and_modules_that_a_page_names_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = [block for _, block in blocks(PAGES[page])]
    code += [token.content for token in tokens(PAGES[page]) if token.type == "code_inline"]
    for text in code:
        for target in re.findall(r"(?:^|\s)make ([a-z0-9-]+)", text):
            assert target in targets, target
        for module in re.findall(r"python -m ((?:benchmarks|tests|docs|autotune)[\w.]*)", text):
            path = ROOT / module.replace("autotune.", "").replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").is_file(), module


@pytest.mark.parametrize("page", WRITTEN)
def test_code_that_is_yaml_or_json_is_well_formed_and_jobs_load(page: str) -> None:
    for info, block in blocks(PAGES[page]):
        language = info.split(" ")[0]
        if language == "json":
            json.loads(block)
        values = yaml.safe_load(block) if language in ("yaml", "yml") else None
        if isinstance(values, dict) and {"name", "framework"} <= values.keys():
            assert parse_elsewhere(block)[0].framework == values["framework"]


def test_a_job_on_a_page_is_read_by_the_real_loader() -> None:
    with pytest.raises(JobErrors, match="unknown"):
        parse_elsewhere("name: x\nframework: verl\ncommnd: []\n")


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_the_first_steps_of_a_framework_do_what_its_page_says(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGES[f"docs/frameworks/{framework}.md"]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for info, block in blocks(text):
        if title := _TITLE.search(info):
            (tmp_path / title[1]).write_text(block)
    calls = [words for info, block in blocks(text) if info == "sh" for words in commands(f"```\n{block}```")]
    assert [words[0] for words in calls][-2:] == ["plan", "launch"]
    outputs = {}
    for words in calls:
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output
        assert words[0] != "launch" or "-n" in words
        outputs[words[0]] = done.output
    job = next(word for word in calls[-1] if word.endswith(".yaml"))
    assert load(job).framework == framework if framework in ("builtin", "command") else True
    assert f"framework: {framework}\n" in (tmp_path / job).read_text()
    assert ("predicted peak" in outputs["plan"]) is (framework != "command")


def test_the_picture_is_that_of_the_journal_beside_it() -> None:
    drawn = pictures.launch_svg(journal.read(pictures.JOURNAL))
    assert pictures.LAUNCH.read_text() == drawn
    assert "http" not in drawn.replace("http://www.w3.org/", "").replace("https://www.textualize.io", "")
    assert "stable" in pictures.terminal_text(journal.read(pictures.JOURNAL))
    for file in (pictures.LAUNCH, pictures.REPORT):
        assert 5_000 < file.stat().st_size < 300_000
