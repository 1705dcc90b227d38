"""What `autotune init` makes of real launch scripts: python -m benchmarks.init_scripts [--held-out].

`init_scripts.json` names repositories, commits, scripts and their digests; git fetches them into --cache, and
what cannot be fetched is not run. Each script runs on stubs (`launch_stubs`), and what it gives them is
compared with the job file that `init` writes from it: every setting, without exception. What the first
attempt sets otherwise is counted apart, by key, and put to the code of the job's own checkout (`own_code`).

A script is well read where the framework and every setting are right, or where each setting that is not is
named as needing an edit (exit code 1); every other value is wrong. Half of each sample, by the hash of
repository and path, is held out: it counts with --held-out only. With --all-known every assumption counts as
known, which shows what the difference between the two is worth.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import yaml
from click.testing import CliRunner

from autotune.policies.values.provenance import Origin
from benchmarks.launch_stubs import CALLER, NOW, starts_of
from benchmarks.own_code import refusal_of

_LIST = Path(__file__).with_name("init_scripts.json")
_CACHE = Path.home() / ".cache/autotune-benchmarks/init-scripts"
_BY_REPOSITORY = "2026-11-27"  # since this sample the repository is part of the hash
_OF_FLAGS = ("slime", "relax", "miles", "openrlhf", "trl", "ms-swift")
_LEFT_OPEN = re.compile("is a placeholder|is known only where a shell runs it")
_MEMORY = re.compile(
    r"batch_size|batch-size|max_token_len|max[-_]tokens|(?:memory|mem)[-_](?:utilization|fraction)|fraction"
    r"|tensor_(?:model_)?parallel|pipeline|context-parallel|offload|gradient_checkpoint|recompute|zero_stage|deepspeed"
    r"|max_\w*(?:length|len|seqs)|(?:response|prompt)-len|num_generations|rollout\.n$|n_samples|n-samples|colocate"
)


class Case(msgspec.Struct, frozen=True):
    """One script of the list."""

    checkout: str
    path: str  # `README.md#2`: the second command of a document
    digest: str = ""  # the first 16 digits of the SHA-256 of the file
    env: dict[str, str] = {}  # what its head says one has to set
    arguments: list[str] = []  # ... and to pass
    folder: str = ""  # of the checkout, where its document says to stand
    sample: str = "2026-11-23"  # the day on which the script was drawn

    @property
    def is_held_out(self) -> bool:
        """Whether the script counts only in the end."""
        key = f"{self.checkout}/{self.path}" if self.sample >= _BY_REPOSITORY else self.path
        return hashlib.sha256(key.encode()).digest()[0] % 2 == 1


class Score(msgspec.Struct):
    """What became of one script; None is a question that does not arise."""

    script: str
    not_run: str = ""  # why, where it is not here
    starts: bool = True  # the script starts a training on stubs
    framework: str = ""
    exit: int | None = None
    is_framework_right: bool | None = None
    settings: int = 0
    wrong: list[str] = []  # settings that the job file has with another value, or not at all
    named: list[str] = []  # of these, those that the output names as needing an edit
    wrong_memory: int = 0
    has_shape: bool = False
    has_prediction: bool = False
    refusal: str | None = None  # by the job's own code; empty: it takes the command line
    changed: list[str] = []  # what the first attempt sets otherwise than the script, by key
    harms: list[str] = []  # of these, knobs that autotune turned before the first start
    asks: bool = False  # only to fill in what the script leaves open
    is_undecided: bool = False  # refused: it runs several different trainings at the same time, and it does
    output: str = ""

    @property
    def is_well_read(self) -> bool:
        """Whether no value is silently wrong."""
        return self.is_undecided or (self.is_framework_right is True and set(self.wrong) <= set(self.named))

    @property
    def is_accepted(self) -> bool:
        """Whether the job file can be launched as it is, and trains as the script does."""
        return self.exit == 0 and self._is_right and not self.wrong

    @property
    def is_to_fill_in(self) -> bool:
        """Whether nothing is missing but what the script leaves open, and the job file asks for that."""
        return self.is_undecided or (self.asks and self._is_right and set(self.wrong) <= set(self.named))

    @property
    def _is_right(self) -> bool:
        return self.is_framework_right is True and not self.refusal and not self.harms


def main() -> None:
    """Judge the scripts of the list and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cache", type=Path, default=_CACHE, help="folder of the checkouts")
    parser.add_argument("--held-out", action="store_true", help="judge the held-out half instead")
    parser.add_argument("--all-known", action="store_true", help="let every assumption count as known")
    parser.add_argument("--sample", default="", help="the day of a sample; default: all")
    parser.add_argument("--quiet", action="store_true", help="print the counts only")
    parser.add_argument("--only", default="", help="part of a path")
    parser.add_argument("--json", type=Path, help="write every score into this file")
    options = parser.parse_args()
    listed = msgspec.json.decode(_LIST.read_bytes())
    cases = msgspec.convert(listed["scripts"], list[Case])
    scores = []
    for case in cases:
        if case.is_held_out != options.held_out or options.sample not in ("", case.sample):
            continue
        if options.only not in f"{case.checkout}/{case.path}":
            continue
        with nothing_assumed() if options.all_known else contextlib.nullcontext():
            score = score_of(case, listed["checkouts"][case.checkout], options.cache)
        scores.append(score)
        if not options.quiet:
            print(_line(score), flush=True)
    print("\n" + "\n".join(_summary(scores)))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(scores)))


@contextlib.contextmanager
def nothing_assumed() -> Iterator[None]:
    """Let every assumption count as known, for changes, refusals, added settings and verdicts."""
    with mock.patch.object(Origin, "is_assumed", False):
        yield


def _line(score: Score) -> str:
    if score.not_run:
        return f"-- not run   {score.script}: {score.not_run}"
    mark = "ok" if score.is_accepted else "~ " if score.is_well_read else "--"
    wrong = [name for name in score.wrong if name not in score.named]
    parts = [
        "starts no training itself" if not score.starts else "",
        "framework" if score.is_framework_right is False else "",
        f"wrong: {', '.join(wrong[:4])} ({len(wrong)})" if wrong else "",
        f"to edit: {len(score.named)}" if score.named else "",
        f"own code: {score.refusal}" if score.refusal else "",
        f"changes {', '.join(score.harms)}" if score.harms else "",
        score.output if score.exit else "",
    ]
    head = f"{mark} {score.framework or '?':9} {score.settings:3}{' p' if score.has_prediction else '  '}"
    return f"{head} {score.script}  {'; '.join(part for part in parts if part)}"


def _summary(scores: Sequence[Score]) -> list[str]:
    ran = [score for score in scores if not score.not_run and score.starts]
    judged = [score for score in ran if score.refusal is not None]
    comparable = [score for score in ran if score.settings]
    rows = {
        "accepted: exit 0, all settings right, own code takes it, nothing changed": sum(
            s.is_accepted for s in ran
        ),
        "accepted once the places are filled in that the script leaves open": sum(
            s.is_to_fill_in for s in ran
        ),
        "refused: it runs several trainings at the same time, and none is named": sum(
            s.is_undecided for s in ran
        ),
        "exit 0": sum(s.exit == 0 for s in ran),
        "framework right": sum(s.is_framework_right is True for s in ran),
        "well read: no value is silently wrong": sum(s.is_well_read for s in ran),
        "a wrong value with exit 0": sum(s.exit == 0 and bool(s.wrong) for s in ran),
        "model's shape": sum(s.has_shape for s in ran),
        "prediction": sum(s.has_prediction for s in ran),
        "changed before the first start": sum(bool(s.harms) for s in ran),
    }
    lines = [f"{len(scores)} scripts, {sum(bool(s.not_run) for s in scores)} not run, "]
    lines[0] += f"{sum(not s.starts for s in scores)} start no training on stubs; of the other {len(ran)}:"
    lines += [f"{count:5}  {name}" for name, count in rows.items()]
    lines.append(f"{sum(not s.wrong for s in comparable):5}  of {len(comparable)} have every setting right")
    memory = sum(not s.wrong_memory for s in comparable)
    lines.append(f"{memory:5}  of {len(comparable)} have every setting right that decides memory")
    takes = sum(not s.refusal for s in judged)
    lines.append(f"{takes:5}  of {len(judged)} command lines are taken by the code of the checkout")
    keys = Counter(name for s in ran for name in s.changed)
    lines.append("set for the first attempt otherwise than by the script: " + _counts(keys))
    return lines


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counted.most_common(12)) or "nothing"


def score_of(case: Case, origin: Mapping[str, str], cache: Path) -> Score:
    """Return what `init` and `plan` make of one script, against what it does itself."""
    score = Score(script=f"{case.checkout}/{case.path}")
    folder = cache / f"{origin['repository'].replace('/', '+')}@{origin['commit'][:12]}"
    path = folder / case.path.partition("#")[0]
    score.not_run = _fetched(origin, folder) or ("" if path.is_file() else "no such file")
    if not score.not_run and case.digest not in ("", hashlib.sha256(path.read_bytes()).hexdigest()[:16]):
        score.not_run = "the file has another digest"
    if score.not_run:
        return score
    with tempfile.TemporaryDirectory(prefix="init-scripts-") as scratch:
        _judge(score, case, folder.resolve(), Path(scratch))
    return score


def _fetched(origin: Mapping[str, str], folder: Path) -> str:
    """Return why a checkout is not here; empty where it is, or was fetched."""
    if folder.is_dir():
        return ""
    at = f"https://github.com/{origin['repository']}"
    steps = (
        ["init", "-q"],
        ["fetch", "-q", "--depth", "1", at, origin["commit"]],
        ["checkout", "-q", "FETCH_HEAD"],
    )
    with tempfile.TemporaryDirectory(dir=_made(folder.parent)) as scratch:
        made = Path(scratch) / "checkout"
        made.mkdir()
        for step in steps:
            ran = subprocess.run(
                ["git", "-C", str(made), *step], capture_output=True, text=True, check=False, timeout=600
            )
            if ran.returncode:
                return (ran.stderr.strip() or "git fails").split("\n")[-1]
        made.rename(folder)
    return ""


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _judge(score: Score, case: Case, repository: Path, scratch: Path) -> None:
    script = _script_of(case, repository, scratch)
    is_script = script.suffix not in (".yaml", ".yml")
    started = (
        list(
            starts_of(script, repository, scratch, folder=case.folder, env=case.env, arguments=case.arguments)
        )
        if is_script
        else []
    )
    theirs, expected = _training(started)
    score.starts = bool(theirs) or not is_script
    job = scratch / "job.yaml"
    score.exit, output = _autotune(
        ["init", str(script), "--gpus", "H100", "-o", str(job), "--", *case.arguments],
        repository / case.folder,
        case.env,
    )
    errors = [line for line in output.splitlines() if line.startswith("error")]
    score.asks = bool(errors) and all(map(_LEFT_OPEN.search, errors))
    score.output = (errors or output.strip().splitlines() or [""])[0][:160]
    if not job.exists():
        trainings = {tuple(line) for line, _ in map(_training, [[argv] for argv in started]) if line}
        score.is_undecided = "trainings at the same time" in output and len(trainings) > 1
        score.is_framework_right = None if score.is_undecided else False
        return
    document = yaml.safe_load(job.read_text())
    score.framework = document["framework"]
    if theirs:
        score.is_framework_right = score.framework == expected
        wanted, given = _read(theirs, expected), _of_job(document, expected)
        score.settings = len(wanted)
        score.wrong = [name for name in wanted if given.get(name) != wanted[name]]
        score.wrong_memory = sum(_MEMORY.search(name) is not None for name in score.wrong)
        score.named = [name for name in score.wrong if score.exit and name in output + job.read_text()]
    else:
        score.is_framework_right = score.framework in _MARKS
    code, planned = _autotune(["plan", "--json", str(job)], repository / case.folder, case.env)
    if code > 1 or not planned.startswith("{"):
        return
    plan = json.loads(planned.splitlines()[0])
    score.has_shape = bool(plan.get("model_from"))
    score.has_prediction = bool(plan.get("phases"))
    score.harms = sorted(plan.get("first") or {})
    if theirs and score.framework == expected:
        ours = _read(plan["command"], expected)
        score.changed = [name for name in ours if ours[name] != wanted.get(name, "")]
        score.refusal = refusal_of(plan["command"], theirs, expected, repository)


def _training(started: Sequence[list[str]]) -> tuple[list[str], str]:
    """Return the first command line that is a training, without what submits it, and its framework."""
    for argv in started:
        line = argv
        for wrapper in (["ray", "job", "submit"], ["uv", "run"]):
            if wrapper == argv[: len(wrapper)] and "--" in argv:
                line = argv[argv.index("--") + 1 :]
        for framework, mark in _MARKS.items():
            if re.search(mark, " ".join(line), re.DOTALL):
                return line, framework
    return [], ""


# In this order: a script of TRL's flags is TRL's, and what has an adapter comes before what has none.
_MARKS = {
    "verl": r"actor_rollout_ref\.",
    "areal": r"areal.* --config",
    "miles": r"train(_async)?\.py .*--miles",
    "slime": r"train(_async)?\.py .*--rollout-batch-size",
    "relax": r"relax.entrypoints.train",
    "openrlhf": r"openrlhf.cli.train_ppo_ray",
    "skyrl": r"trainer\.placement|generator\.",
    "nemo-rl": r"run_\w*grpo\w*\.py",
    "ms-swift": r"swift rlhf|cli/rlhf\.py",
    "trl": r"^trl grpo|grpo\w*\.py .*--",
    "command": r"start_\w+_pipeline\.py",
}


def _read(argv: Sequence[str], framework: str) -> dict[str, str]:
    """Return what a command line sets: overrides or flags by name, every other word by its place."""
    words = [re.sub(r".*\{python\}$", "python3", word) for word in _without_entry(list(argv))]
    read = _flags if framework in _OF_FLAGS else _overrides
    program, given = read(words, framework)
    kept = {f"word {n}": _plain(word) for n, word in enumerate(program)} if framework == "command" else {}
    return {**given, **kept}


def _of_job(document: Mapping[str, Any], framework: str) -> dict[str, str]:
    """Return what a job file sets, as `_read` returns it."""
    words = [*document.get("command", [])]
    if document.get("config"):
        words += ["--config", document["config"]]
    given = _read([word.replace("{{", "{").replace("}}", "}") for word in words], framework)
    for name, value in (document.get("settings") or {}).items():
        given[name.lstrip("+")] = _text(value, framework)
    return given


def _text(value: Any, framework: str) -> str:
    if isinstance(value, list):
        texts = [_text(item, framework) for item in value]
        return " ".join(texts) if framework in _OF_FLAGS else _normal("[" + ",".join(texts) + "]")
    if value is True and framework in _OF_FLAGS:
        return "true" if framework in ("trl", "ms-swift") else ""
    return _normal("null" if value is None else str(value))


def _without_entry(argv: list[str]) -> list[str]:
    """Return the command line of a Hugging Face trainer as module and flags, whichever way it is started."""
    at = [n for n, word in enumerate(argv) if word.endswith("/entry.py")]
    behind = at[-1] + 3 if at else 0  # the entry's own words: the run, and which checkpoints it may continue
    words = [word for n, word in enumerate(argv) if n not in at and not (at and at[-1] < n < behind)]
    for module, name in (("trl.scripts.grpo", "trl grpo"), ("swift.cli.rlhf", "swift rlhf")):
        if module in words:  # behind `accelerate launch` or torchrun and their own flags
            at = words.index(module)
            around = [
                w for n, w in enumerate(words[:at]) if w.startswith("--") or words[n - 1].startswith("--")
            ]
            return [*name.split(), *around, *words[at + 1 :]]
        for script in (f"{module.replace('.', '/')}.py", f"-m {module}"):
            match = re.fullmatch(
                rf"\S*python3?\s(?:\S*/)?{script}", " ".join(words[: 1 + len(script.split())])
            )
            if match:
                return [*name.split(), *words[1 + len(script.split()) :]]
    return words


def _plain(word: str) -> str:
    return "python" if re.fullmatch(r"python3?", word) or word.endswith("/python") else word


def _overrides(argv: list[str], framework: str) -> tuple[list[str], dict[str, str]]:
    program, given = [], dict[str, str]()
    for word in argv:
        match = re.fullmatch(r"([+~]{0,2})([A-Za-z_][\w.@/-]*)=(.*)", word, re.DOTALL)
        if match and ("." in match[2] or match[2] == "model_engine" or framework == "areal"):
            given[match[2]] = _normal(match[3])
        else:
            program.append(word)
    return program, given


def _flags(argv: list[str], framework: str) -> tuple[list[str], dict[str, str]]:
    program, given, name = [], dict[str, list[str]](), ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given[name] = [value] if equals else []
        elif name and word.endswith(".py") and given[name]:  # behind the flags of a launcher
            program.append(word)
            name = ""
        elif name:
            given[name].append(word)
        else:
            program.append(word)
    switch = "true" if framework in ("trl", "ms-swift") else ""  # Hugging Face's parser takes both
    return program, {name: " ".join(map(_normal, values)) or switch for name, values in given.items()}


def _normal(text: str) -> str:
    """Return a value without what neither Hydra nor argparse tells apart: quotes, blanks, ways of numbers."""
    text = re.sub(r"[\s'\"\\]", "", text)
    if text.lower() in ("true", "false", "null", "none"):
        return text.lower().replace("none", "null")
    return re.sub(
        r"(?<![\w./:-])[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![\w./:-])",
        lambda match: repr(float(match[0])),
        text,
    )


def _autotune(words: list[str], folder: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Return the exit code of a command and all that it says."""
    from autotune.orchestrator.cli import main as cli

    kept, here = dict(os.environ), Path.cwd()
    os.environ.clear()
    os.environ.update(
        {"HOME": "/root", "PATH": "/stubs:/tools", "SOURCE_DATE_EPOCH": str(NOW), **CALLER, **env}
    )
    os.chdir(folder)
    try:
        result = CliRunner().invoke(cli, words)
        return result.exit_code, result.stdout + result.stderr
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(kept)


def _script_of(case: Case, repository: Path, scratch: Path) -> Path:
    """Return the script of a case; a command of a document becomes one."""
    path, _, number = case.path.partition("#")
    if not number:
        return repository / path
    text = (repository / path).read_text()
    blocks = re.findall(r"^ *```(?:bash|shell|sh)\n(.*?)^ *```", text, re.M | re.S)
    marks = (
        r"(?s)(?=.*--config).*python" if case.checkout == "areal" else r"(?s).*(?:\bpython|accelerate|trl )"
    )
    starting = [block for block in blocks if re.match(marks, block)]
    script = scratch / "command.sh"
    script.write_text(textwrap.dedent(starting[int(number) - 1]))
    return script


if __name__ == "__main__":
    sys.exit(main())
