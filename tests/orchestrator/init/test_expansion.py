"""Words and arithmetic: each is what bash makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from autotune.orchestrator.init.bash.reader import read_script
from autotune.orchestrator.init.bash.state import Invocation

_SETUP = """
X=abc.def.ghi; EMPTY=; LIST=(one "two three" four); declare -A MAP=([k]=v [l]=w); N=7; P=/a/b/c.tar.gz
unset UNSET; set -- p1 "p 2" p3
"""
_WORDS = (
    r"${X%.*} ${X%%.*} ${X#*.} ${X##*.} ${X/./-} ${X//./-} ${X^^} ${X:0:3} ${X:4} ${#X}",
    r"${UNSET:-d} ${UNSET-d} ${EMPTY:-e} ${EMPTY-f} x${EMPTY:+y} ${X:+set} ${UNSET:-${X}-$N}",
    r'"${LIST[@]}" ${LIST[@]} "${LIST[*]}" "${LIST[1]}" ${LIST[-1]}',
    r' ${#LIST[@]} "${LIST[@]:1}" "a${LIST[@]}b" ${LIST[2]}',
    r'"$@" "$*" $# "${@:2}" $1 "${UNSET[@]}" "" $EMPTY "$EMPTY"',
    r"""'single $X' "double $X \$X \" \\" $'tab\there' un\ quoted "${X}"'tail' """,
    r"${MAP[k]}-${MAP[l]} pre{1..3}post {a,b}c ${N}x$N",
    r"$((N * 2 + 1)) $((N / 2)) $(( (N + 1) % 3 )) $((N > 3 ? 10 : 20)) $((-N / 2))",
    r"$((2 ** 5)) $((N<8 && 1))",
    r'$(basename $P .gz) $(dirname "$P") "$(echo "a  b")" $(echo "a  b") $(printf "%s-%02d" q 5)',
    r"$(seq 3) $(seq -s, 2 2 8) $(echo HeLLo | tr 'A-Z' 'a-z') $(echo a:b:c | cut -d: -f2)",
    r"$(printf 'x\ny\n' | wc -l)",
    r'"$(cat <<<"$X here")" "`echo old`" ${X:-"a b"} "${X:-"a b"}" ${UNSET:-a b}',
)


@pytest.mark.parametrize("words", _WORDS)
def test_words_are_those_of_bash(words: str, tmp_path: Path) -> None:
    script = tmp_path / "words.sh"
    script.write_text(f"{_SETUP}\nrecord {words}\n")
    ours = next(list(i.argv[1:]) for i in _read(script) if i.argv[0] == "record")
    bash = f"record() {{ printf '%s\\0' \"$@\"; }}\n{script.read_text()}"
    printed = subprocess.run(
        [str(shutil.which("bash")), "-c", bash], capture_output=True, check=True, timeout=60
    )
    assert json.dumps(ours) == json.dumps(printed.stdout.decode().split("\0")[:-1])


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('[ "$N" -gt 3 ]', True),
        ('[ "$N" -le 3 ] || [ "$X" = abc.def.ghi ]', True),
        ("[[ $X == abc* && $X != *zzz ]]", True),
        ('[[ "$X" == "abc*" ]]', False),
        (r"[[ $X =~ ^abc\.(d|e)ef ]]", True),
        ("(( N > 3 && N < 7 ))", False),
        ('! [ -z "$EMPTY" ]', False),
        ("test -n '' -o x = x", None),
        ("[ -d /usr ]", True),
        ("some-program --probe", None),
        ('[ -n "$UNSET" ] && true', False),
    ],
)
def test_conditions(condition: str, holds: bool | None, tmp_path: Path) -> None:
    script = tmp_path / "condition.sh"
    script.write_text(f"{_SETUP}\nif {condition}; then record yes; else record no; fi\n")
    found = [i.argv[1] for i in _read(script) if i.argv[0] == "record"]
    assert found == ["yes" if holds else "no"]
    if holds is not None:
        bash = f"record() {{ printf '%s' \"$@\"; }}\n{script.read_text()}"
        printed = subprocess.run([str(shutil.which("bash")), "-c", bash], capture_output=True, timeout=60)
        assert printed.stdout.decode() == found[0]


def test_loops_end(tmp_path: Path) -> None:
    script = tmp_path / "loop.sh"
    script.write_text("while true; do N=x; done\nf() { f; }\nf\nrecord end\n")
    assert [i.argv for i in _read(script) if i.argv[0] == "record"] == [("record", "end")]


def _read(script: Path) -> tuple[Invocation, ...]:
    return read_script(
        script, script.read_text(), cwd=str(script.parent), environment={"HOME": "/h"}, now=0.0
    ).invocations
