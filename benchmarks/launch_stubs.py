"""What bash makes of a launch script: the command lines that it gives to stub programs in a sandbox.

The script runs in namespaces of its own, without network and for at most 20 seconds, on a file system of
which nothing but the stubs' record can be written.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# What a scheduler and the user's shell set.
CALLER = {
    **dict.fromkeys(("RANK", "NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "SLURM_PROCID"), "0"),
    **dict.fromkeys(("NNODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "1"),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "SLURM_JOB_NODELIST": "node-1",
    **dict.fromkeys(("WANDB_API_KEY", "FLEET_API_KEY", "HF_TOKEN"), "key"),
}
NOW = 1_795_000_000  # the clock inside, Unix seconds
_LIMIT_S = 20
_STUBS = (
    "python python3 torchrun ray uv accelerate deepspeed nvidia-smi pkill kill sleep pip pip3 curl wget git "
    "hf huggingface-cli ps srun sbatch hostname npu-smi mkdir trl swift docker apptainer scontrol"
)
_REAL = (
    "bash cat dirname basename seq tr wc cut head tail grep sed awk realpath readlink env sort uniq expr bc"
)
_INSIDE = r"""
set -e
root=$1 repo=$2 out=$3 stubs=$4
mount -t tmpfs tmpfs "$root"
mkdir -p "$root"/{usr,tmp,root,dev,proc,etc,out,stubs,tools} "$root$repo"
for name in bin lib lib64; do ln -s "usr/$name" "$root/$name"; done
mount --rbind /usr "$root/usr"; mount -o remount,bind,ro "$root/usr"
if [ -d /etc/alternatives ]; then cp -a /etc/alternatives "$root/etc"; fi
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
export BASH_ENV=/stubs/.bashrc
case "${0##*/}" in
  sbatch) if [ -n "$COMMAND" ]; then exec /usr/bin/bash -c "$COMMAND"; fi ;;
  srun) ;;
  *) exit 0 ;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    bash|sh|python*|torchrun|ray|uv|accelerate|trl|swift) exec "$@" ;;
    *.sh|*.slurm|*.sbatch|*.sub) if [ -f "$1" ]; then exec /usr/bin/bash "$@"; fi ;;
  esac
  shift
done
exit 0
"""


def starts_of(
    script: Path,
    repository: Path,
    scratch: Path,
    *,
    folder: str = "",
    env: Mapping[str, str] = {},
    arguments: Sequence[str] = (),
) -> Iterator[list[str]]:
    """Yield the command lines that a script of a repository gives to the stubs, in their order.

    `folder` of the repository is where it is called, `env` and `arguments` what its caller gives it.
    """
    out, stubs, root = scratch / "out", scratch / "stubs", scratch / "root"
    for each in (out, stubs, root):
        each.mkdir()
    own = dict.fromkeys(_STUBS.split(), _STUB)
    own["date"] = f'#!/usr/bin/bash\nunset BASH_ENV\nexec /usr/bin/date -d @{NOW} "$@"\n'
    own["tee"] = "#!/usr/bin/bash\nexec /usr/bin/cat > /dev/null\n"
    for name, text in own.items():
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    (stubs / ".bashrc").write_text("command_not_found_handle() { return 0; }\n")
    inside = str(script)
    if not script.is_relative_to(repository):
        (stubs / script.name).write_text(script.read_text())
        inside = f"/stubs/{script.name}"
    called = shlex.join(["bash", inside, *arguments])
    started = f"cd {shlex.quote(str(repository / folder))} && {called}"
    given = [f"{name}={value}" for name, value in {**CALLER, **env}.items()]
    with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for other nodes
        subprocess.run(
            [
                *("unshare", "-r", "-m", "-n", "-p", "-f", "--kill-child", "bash", "-c"),
                *(
                    _INSIDE.replace("TOOLS", _REAL),
                    "sandbox",
                    str(root),
                    str(repository),
                    str(out),
                    str(stubs),
                ),
                *(*given, "bash", "-c", started),
            ],
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
            env={"PATH": os.environ["PATH"]},
        )
    for record in sorted(out.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        yield record.read_bytes().decode(errors="replace").split("\0")[:-1]
