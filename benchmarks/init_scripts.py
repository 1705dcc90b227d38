"""What `autotune init` makes of real launch scripts: python -m benchmarks.init_scripts FOLDER [--held-out].

FOLDER holds checkouts named as in `init_scripts.json`, which says repository and commit of each. A script
counts as accepted when its framework is recognised, a prediction is made, and `launch -n` prints what the
script itself gives to a stub on its PATH: the same program and every setting with the same value, beside what
autotune adds so that attempts can be resumed. The script runs in namespaces of its own, without network, on a
file system of which nothing but the stubs' record can be written. The scripts whose path has an odd hash are
held out: they count with --held-out only.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from click.testing import CliRunner

_LIST = Path(__file__).with_name("init_scripts.json")
_NOW = 1_795_000_000  # the clock of both sides, Unix seconds
_STUBS = (
    "python python3 torchrun ray uv accelerate deepspeed nvidia-smi pkill kill sleep pip pip3 curl wget git "
    "hf huggingface-cli ps srun hostname npu-smi mkdir trl swift"
)
_REAL = "bash cat dirname basename seq tr wc cut head tail grep sed awk realpath readlink env sort uniq"
# What autotune itself sets so that an attempt can be resumed and watched, by framework.
_OURS: Mapping[str, str] = {
    "verl": r"trainer\.(default_local_dir|resume_mode|logger|save_freq|max_\w+_ckpt_to_keep)"
    r"|ray_kwargs\.ray_init\.runtime_env\.env_vars\..*",
    "areal": r"recover\..*|stats_logger\..*|scheduler\.type|\w+\.backend|allocation_mode",
    "slime": r"save|load|save-interval|finetune|no-load-optim|no-load-rng|start-rollout-id|ckpt-step"
    r"|tb-experiment-name",
}
_OURS = {
    **_OURS,
    "relax": f"{_OURS['slime']}|use-health-check|max-global-restart",
    "miles": _OURS["slime"],
    "openrlhf": r"logger\.wandb\.run_name|ckpt\.(path|output_dir|save_steps|max_num|load_enable|disable_ds)",
    "skyrl": r"trainer\.(logger|resume_mode|resume_path|ckpt_path|ckpt_interval|max_ckpts_to_keep)",
    "nemo-rl": r"checkpointing\..*|logger\..*",
    "trl": r"output_dir|save_\w+|report_to|num_processes|resume_from_checkpoint",
    "ms-swift": r"output_dir|save_\w+|report_to|add_version|n\w+_per_node|nnodes|node_rank|master_\w+"
    r"|resume_from_checkpoint",
}
_OF_FLAGS = ("slime", "relax", "miles", "openrlhf", "trl", "ms-swift")
_INSIDE = r"""
set -e
root=$1 repo=$2 out=$3 stubs=$4
mount -t tmpfs tmpfs "$root"
mkdir -p "$root"/{usr,tmp,root,dev,proc,etc,out,stubs,tools} "$root$repo"
for name in bin lib lib64; do ln -s "usr/$name" "$root/$name"; done
mount --rbind /usr "$root/usr"; mount -o remount,bind,ro "$root/usr"
mount --bind "$repo" "$root$repo"; mount -o remount,bind,ro "$root$repo"
ln -s "$repo" "$root/root/${repo##*/}"
mount --bind "$out" "$root/out"; mount --bind "$stubs" "$root/stubs"
touch "$root/dev/null"; mount --bind /dev/null "$root/dev/null"
for name in TOOLS; do ln -s "/usr/bin/$name" "$root/tools/$name"; done
cd "$root"
shift 4
exec chroot "$root" /usr/bin/env -i HOME=/root PATH=/stubs:/tools BASH_ENV=/stubs/.bashrc "$@"
"""
_STUB = r"""#!/usr/bin/bash
unset BASH_ENV
record=$(/usr/bin/mktemp /out/XXXXXXXX)
printf '%s\0' "${0##*/}" "$@" > "$record"
case "${0##*/} $1" in python*" -c"|python*" -"|nvidia-smi*|npu-smi*|"ray status") exit 1 ;; esac
case "$1" in */model_args_utils.py) exec /usr/bin/python3 "$@" ;; esac
exit 0
"""


class Case(msgspec.Struct, frozen=True):
    """One script of the list."""

    checkout: str
    path: str  # `README.md#2`: the second command of a document
    env: dict[str, str] = {}  # what its head says one has to set
    arguments: list[str] = []  # ... and to pass
    folder: str = ""  # of the checkout, where its document says to stand
    sample: str = "2026-11-23"  # the day on which the script was drawn

    @property
    def is_held_out(self) -> bool:
        """Whether the script counts only in the end."""
        return hashlib.sha256(self.path.encode()).digest()[0] % 2 == 1


class Judged(msgspec.Struct):
    """What became of one script."""

    case: Case
    framework: str = ""
    settings: int = 0
    problem: str = ""
    refused: bool = False  # by the version of the framework that autotune knows
    broken: bool = False  # the script itself starts no training


def main() -> None:
    """Judge the scripts of the list and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--held-out", action="store_true", help="judge the held-out half instead")
    parser.add_argument("--sample", default="", help="the day of a sample; default: all")
    parser.add_argument("--quiet", action="store_true", help="print the counts only")
    parser.add_argument("--only", default="", help="part of a path")
    options = parser.parse_args()
    listed = msgspec.json.decode(_LIST.read_bytes())
    cases = msgspec.convert(listed["scripts"], list[Case])
    results = []
    for case in cases:
        wanted = case.is_held_out == options.held_out and options.only in f"{case.checkout}/{case.path}"
        if wanted and options.sample in ("", case.sample):
            result = judged(case, (options.folder / case.checkout).resolve())
            results.append(result)
            if options.quiet:
                continue
            mark = "ok" if not result.problem else "--"
            print(
                f"{mark} {result.framework or '?':7} {result.settings:4} {case.checkout}/{case.path}",
                result.problem,
            )
    accepted = sum(not result.problem for result in results)
    refused = sum(result.refused for result in results)
    broken = sum(result.broken for result in results)
    rest = max(1, len(results) - refused - broken)
    print(f"\naccepted {accepted} of {len(results)} ({accepted / max(1, len(results)):.0%});", end=" ")
    print(f"{refused} are refused by the version that autotune knows,", end=" ")
    print(f"{broken} start no training themselves;", end=" ")
    print(f"{accepted / rest:.0%} of the other {rest}")


def judged(case: Case, repository: Path) -> Judged:
    """Return what `init` and `launch -n` make of one script, against what it does itself."""
    with tempfile.TemporaryDirectory(prefix="init-scripts-") as scratch:
        script = _script_of(case, repository, Path(scratch))
        result = Judged(case=case)
        is_script = script.suffix == ".sh"
        started = list(starts_of(script, repository, case, Path(scratch))) if is_script else []
        code, said = _autotune(
            ["init", str(script), "--gpus", "H100", "-o", f"{scratch}/job.yaml", "--", *case.arguments],
            repository / case.folder,
            case.env,
        )
        if not Path(scratch, "job.yaml").exists():
            result.problem = said.strip().split("\n")[0]
            return result
        text = Path(scratch, "job.yaml").read_text()
        result.framework = re.search(r"^framework: ([\w-]+)", text, re.M)[1]  # type: ignore[index]
        if code:
            wrong = [line for line in said.splitlines() if line.startswith("error")]
            result.problem = f"the framework refuses it: {(wrong or [said])[0]}"
            result.refused = True
            return result
        if "predicted peak" not in said:
            result.problem = "no prediction: " + next((x for x in said.splitlines() if "estimate" in x), "")
            return result
        code, said = _autotune(
            ["launch", "-n", "--json", f"{scratch}/job.yaml"], repository / case.folder, case.env
        )
        if code:
            result.problem = said.strip().split("\n")[0]
            return result
        ours = json.loads(said[said.index("{") :].splitlines()[0])["argv"]
        if not is_script:
            result.problem = "" if str(script) in ours else f"`{case.path}` is not passed on: {ours}"
            return result
        training = [argv for argv in started if _is_training(argv, result.framework)]
        if not training:
            result.broken = True
            result.problem = f"the script started no training: {[argv[:3] for argv in started][-3:]}"
            return result
        result.settings, result.problem = compared(_program(training[0]), ours, result.framework)
        return result


def compared(theirs: list[str], ours: list[str], framework: str) -> tuple[int, str]:
    """Return how many settings a script gives, and in what the two command lines differ."""
    read = _flags if framework in _OF_FLAGS else _overrides
    program, wanted = read(_without_entry(theirs), framework)
    own_program, given = read(_without_entry(ours), framework)
    words = [re.sub(r".*\{python\}$", "python3", word) for word in own_program]
    if [_plain(w) for w in words] != [_plain(w) for w in program]:
        return len(wanted), f"program {words} instead of {program}"
    own = re.compile(_OURS[framework])
    lost = [name for name in wanted if name not in given and not own.fullmatch(name)]
    shown = {name for name, value in given.items() if not value.startswith("${")}  # a secret is masked
    differing = [n for n in wanted if n in shown and given[n] != wanted[n] and not own.fullmatch(n)]
    added = [name for name in given if name not in wanted and not own.fullmatch(name)]
    parts = [f"lost {lost}" if lost else "", f"added {added}" if added else ""]
    parts += [f"{name}: {given[name]} instead of {wanted[name]}" for name in differing[:3]]
    return len(wanted), "; ".join(part for part in parts if part)


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
            found = re.fullmatch(
                rf"\S*python3?\s(?:\S*/)?{script}", " ".join(words[: 1 + len(script.split())])
            )
            if found:
                return [*name.split(), *words[1 + len(script.split()) :]]
    return words


def _plain(word: str) -> str:
    return "python" if re.fullmatch(r"python3?", word) or word.endswith("/python") else word


def _overrides(argv: list[str], framework: str) -> tuple[list[str], dict[str, str]]:
    program, given = [], dict[str, str]()
    for word in argv:
        found = re.fullmatch(r"([+~]{0,2})([A-Za-z_][\w.@/-]*)=(.*)", word, re.DOTALL)
        if found and ("." in found[2] or found[2] == "model_engine" or framework == "areal"):
            given[found[2]] = _normal(found[3])
        else:
            program.append(word)
    return program, given


def _flags(argv: list[str], framework: str) -> tuple[list[str], dict[str, str]]:
    program, given, name = [], dict[str, list[str]](), ""
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given[name] = [value] if equals else []
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
        lambda found: repr(float(found[0])),
        text,
    )


def _program(argv: list[str]) -> list[str]:
    return argv[argv.index("--") + 1 :] if argv[:3] == ["ray", "job", "submit"] and "--" in argv else argv


def _is_training(argv: list[str], framework: str) -> bool:
    words = " ".join(argv)
    marks = {
        "verl": r"actor_rollout_ref\.",
        "areal": r"--config",
        "slime": r"train(_async)?\.py .*--",
        "miles": r"train(_async)?\.py .*--",
        "relax": r"relax.entrypoints.train",
        "openrlhf": r"openrlhf.cli.train_ppo_ray",
        "skyrl": r"trainer\.",
        "nemo-rl": r"run_\w*grpo\w*\.py",
        "trl": r"^trl grpo|grpo\w*\.py",
        "ms-swift": r"^swift rlhf",
    }
    return re.search(marks.get(framework, "train"), words, re.DOTALL) is not None


def starts_of(script: Path, repository: Path, case: Case, scratch: Path) -> Iterator[list[str]]:
    """Yield the command lines that a script gives to the stubs, in their order."""
    out, stubs, root = scratch / "out", scratch / "stubs", scratch / "root"
    for folder in (out, stubs, root):
        folder.mkdir()
    for name in _STUBS.split():
        (stubs / name).write_text(_STUB)
        (stubs / name).chmod(0o755)
    (stubs / "date").write_text(f'#!/usr/bin/bash\nunset BASH_ENV\nexec /usr/bin/date -d @{_NOW} "$@"\n')
    (stubs / "date").chmod(0o755)
    (stubs / "tee").write_text("#!/usr/bin/bash\nexec /usr/bin/cat > /dev/null\n")
    (stubs / "tee").chmod(0o755)
    (stubs / ".bashrc").write_text("command_not_found_handle() { return 0; }\n")
    inside = _INSIDE.replace("TOOLS", _REAL)
    given = [f"{name}={value}" for name, value in case.env.items()]
    place = script if script.is_relative_to(repository) else stubs / script.name
    if place is not script:
        place.write_text(script.read_text())
    seen_as = place if script.is_relative_to(repository) else Path("/stubs", script.name)
    started = f"cd {shlex.quote(str(repository / case.folder))} && bash {shlex.quote(str(seen_as))} "
    started += shlex.join(case.arguments)
    namespaces = ["unshare", "-r", "-m", "-n", "-p", "-f", "--kill-child"]
    arguments = [str(root), str(repository), str(out), str(stubs), *given, "bash", "-c", started]
    with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for other nodes
        subprocess.run(
            [*namespaces, "bash", "-c", inside, "sandbox", *arguments],
            capture_output=True,
            timeout=20,
            check=False,
            env={"PATH": os.environ["PATH"]},
        )
    for record in sorted(out.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        yield record.read_bytes().decode(errors="replace").split("\0")[:-1]


def _autotune(words: list[str], folder: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Return the exit code of a command and all that it says."""
    from autotune.orchestrator.cli import main as cli

    kept, here = dict(os.environ), Path.cwd()
    os.environ.clear()
    os.environ.update({"HOME": "/root", "PATH": "/stubs:/tools", "SOURCE_DATE_EPOCH": str(_NOW), **env})
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
