"""Words and arithmetic: each is what bash makes of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from autotune.orchestrator.init.bash.reader import read_script
from autotune.orchestrator.init.bash.state import Invocation, is_unknown

_SETUP = """
X=abc.def.ghi; EMPTY=; LIST=(one "two three" four); declare -A MAP=([k]=v [l]=w); N=7; P=/a/b/c.tar.gz
unset UNSET; set -- p1 "p 2" p3
pick() { if [ "$1" = x ]; then echo A; else echo B; fi; }
early() { if [ -n "$1" ]; then echo in; return; fi; echo out; }
sort_of() { case $1 in y*) echo yes;; *) echo no;; esac; }
leaves() { echo before; [ -n "$1" ] || exit 3; echo after; }
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
    r"$(echo run-tq_fast | sed -E 's/-tq_(fast|slow)$//') $(echo a.b.c | sed 's/\./_/g')",
    r"$(echo a/b | sed 's|/|-|') $(echo /x/tests/y | sed 's#/tests/#/&configs/#')",
    r"$(echo run-7b | sed -E 's/([a-z]+)-(.*)/\2:\1/') $(echo x | sed 's/x/[&]/')",
    r"$(pick x) $(pick y) $(early 1)-$(early) $(sort_of yes)$(sort_of n) $(leaves) $(leaves 1)",
    r"$(for i in 1 2 3; do echo -n $i; done) $(i=0; while [ $i -lt 2 ]; do echo -n w; i=$((i + 1)); done)",
    r"$(if [ 1 = 1 ]; then if [ 2 = 2 ]; then echo deep; fi; fi) $({ echo b; echo c; })",
    r"$(f() { echo own; }; f) $(f() { for a in 1 2; do echo $a; [ $a = 1 ] && break; done; }; f)",
    r"$(for ((i = 0; i < 2; i++)); do echo $i; done) $(if [ 1 = 2 ]; then echo never; fi)x",
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
        ("test -n '' -o x = x", True),
        ("[ -d /usr ]", True),
        ("some-program --probe", None),
        ('[ -n "$UNSET" ] && true', False),
    ],
)
def test_conditions(condition: str, holds: bool | None, tmp_path: Path) -> None:
    script = tmp_path / "condition.sh"
    script.write_text(f"{_SETUP}\nif {condition}; then record yes; else record no; fi\n")
    items = [i.argv[1] for i in _read(script) if i.argv[0] == "record"]
    assert items == {True: ["yes"], False: ["no"], None: ["no", "yes"]}[holds]
    if holds is not None:
        bash = f"record() {{ printf '%s' \"$@\"; }}\n{script.read_text()}"
        printed = subprocess.run([str(shutil.which("bash")), "-c", bash], capture_output=True, timeout=60)
        assert printed.stdout.decode() == items[0]


def test_a_sourced_file_belongs_to_its_script_and_a_called_one_does_not(tmp_path: Path) -> None:
    show = 'record "${0##*/}" "${BASH_SOURCE[0]##*/}" "${BASH_SOURCE[1]##*/}" "$KEPT" "$GIVEN" "$OWN"\n'
    (tmp_path / "shared.env").write_text(show)
    (tmp_path / "base.sh").write_text(f"source shared.env\n{show}exit 3\n")
    script = tmp_path / "outer.sh"
    script.write_text(f"KEPT=k\nexport GIVEN=g\nsource shared.env\nOWN=o bash base.sh\n{show}")
    ours = [list(i.argv[1:]) for i in _read(script) if i.argv[0] == "record"]
    bash = "record() { printf '%s|' \"$@\"; echo; }; export -f record; cd " + str(tmp_path)
    whole = f"{bash}; {shutil.which('bash')} outer.sh"
    printed = subprocess.run([str(shutil.which("bash")), "-c", whole], capture_output=True, timeout=60)
    assert ["|".join(words) + "|" for words in ours] == printed.stdout.decode().splitlines()
    assert len(ours) == 4


@pytest.mark.parametrize(
    ("otherwise", "started"),
    [
        ("exit 1", ["cuda", "npu"]),
        ("echo none; exit 2", ["cuda", "npu"]),
        ("record other", ["other", "cuda", "npu"]),
        ("exit 0", ["cuda", "npu"]),
    ],
)
def test_what_every_branch_of_an_unknown_condition_starts_counts_the_ordinary_one_s_first(
    otherwise: str, started: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "device.sh"
    script.write_text(
        "DEVICE=$(python3 -c 'import device')\n"
        'if [ "$DEVICE" == cuda ]; then record cuda\n'
        f'elif [ "$DEVICE" == npu ]; then record npu\nelse {otherwise}; fi\n'
    )
    reading = read_script(script, script.read_text(), cwd=str(tmp_path), environment={}, now=0.0)
    assert [i.argv[1] for i in reading.invocations if i.argv[0] == "record"] == started
    ends = [
        note.line for note in reading.notes if note.message.startswith("assumed true, else the script ends")
    ]
    assert ends == [2] * ("exit" in otherwise)


def test_loops_end(tmp_path: Path) -> None:
    script = tmp_path / "loop.sh"
    script.write_text("while true; do N=x; done\nf() { f; }\nf\nrecord end\n")
    assert [i.argv for i in _read(script) if i.argv[0] == "record"] == [("record", "end")]


def _read(script: Path) -> tuple[Invocation, ...]:
    return read_script(
        script, script.read_text(), cwd=str(script.parent), environment={"HOME": "/h"}, now=0.0
    ).invocations


@pytest.mark.parametrize(
    "text",
    [
        "if some-program --probe; then echo gpu; else echo cpu; fi",
        "if some-program --probe; then echo gpu; fi",
        "if [ 1 = 1 ]; then some-program; fi",
        "while some-program; do echo x; done",
        'case "$(some-program)" in a) echo a;; esac',
    ],
)
def test_what_a_statement_prints_is_unknown_where_only_running_it_would_show(
    text: str, tmp_path: Path
) -> None:
    script = tmp_path / "unknown.sh"
    script.write_text(f"f() {{ {text}; }}\nrecord $({text})\nrecord $(f)\n")
    words = [i.argv[1:] for i in _read(script) if i.argv[0] == "record"]
    assert len(words) == 2
    assert all(len(each) == 1 and is_unknown(each[0]) for each in words)


@pytest.mark.parametrize(
    "text",
    [
        # A function's own variables end with it.
        "M=a\nf() { local M=b; g; }\ng() { M=c; }\nf\nrecord $M",
        "f() { local a=$1 b=${2:-$a}; echo $a/$b; }\nrecord $(f 1) $(f 1 2)",
        "f() { local -n out=$1; out=(x y); }\nf ARGS\nrecord ${ARGS[@]}",
        "f() ( x=5 )\nx=1\nf\nrecord $x",
        'f() { local IFS=,; echo "$*"; }\nrecord $(f 1 2 3)',
        # What a function returns.
        "f() { return 1; }\nif f; then record yes; else record no; fi",
        "false\nif [ $? -ne 0 ]; then record failed; fi",
        # Numbers.
        "declare -i n=4*2\nn+=3\nrecord $n",
        "let x=3*4 'y = x + 1'\nrecord $x $y",
        "i=3\nrecord $((i++)) $i $((--i)) $((1 << 4)) $((010))",
        "x=3\nwhile ((x--)); do y+=$x; done\nrecord $y",
        "for ((i = 0, j = 5; i < j; i++, j--)); do k+=$i$j; done\nrecord $k",
        "x=10\nrecord $((x *= 2)) $x",
        "declare -A m=([a]=1 [b]=2)\nfor k in ${!m[@]}; do s=$((s + m[$k])); done\nrecord $s",
        # Arrays with gaps.
        "a=(1 2 3)\nunset 'a[1]'\nrecord ${a[@]} ${#a[@]} ${a[2]}",
        "a=(1 2)\na[5]=3\nrecord ${a[@]} ${#a[@]} ${a[5]}",
        # Tests.
        "[ a = a -a b != c ] && record both",
        '[ ! -z "" -o -n b ] && record one',
        '[[ ! -z "" || x =~ ^[a-z]$ ]] && record pattern',
        "[[ v1.23 =~ v([0-9]+)\\.([0-9]+) ]] && record ${BASH_REMATCH[1]} ${BASH_REMATCH[2]}",
        # Patterns with quoted parts, which stand for themselves.
        'M=/m/Qwen-7B\n[[ "$M" == *"72B"* ]] && record no\n[[ $M == *"7B"* ]] && record yes',
        'M=/m/Qwen-7B\nK=7B\n[[ $M == *$K* ]] && record a\n[[ $M != *"$K"* ]] && record b',
        'M=/m/Qwen-7B\n[[ $M = *"7B" ]] && record c',
        'M="a*b"\n[[ $M == a"*"b ]] && record star\n[[ axb == a"*"b ]] && record any',
        "[[ axb == a\\*b ]] && record escaped\nrecord end",
        'M=x72B\ncase $M in *"7B"*) record 7 ;; *"72B"* | y) record 72 ;; *) record other ;; esac',
        "P='*'\ncase abc in \"$P\") record quoted ;; $P) record plain ;; esac",
        'M=GLM-4\n[ "$M" = *"GLM"* ] && record no\n[[ $M == "GLM"* && -n $M ]] && record yes',
        # A number with a default for what a scheduler may set.
        "record $((${GPUS:-4} * 2)) $((2 * ${N_NODES-3})) $(( $(printf A | wc -c) + 1 ))",
        # Here-documents.
        "set -- 1 'a b'\ncat > f <<EOF\n$@ $* $# \\$@ $1\nEOF\nrecord $(cat f)",
        "M=1\nread -r -d '' text <<EOF\na $M\n b\nEOF\nrecord $text",
        "M=1\ncat > f.sh <<EOF\nM=\\${M:-5} N=$M\nrecord \\$N \\$((N + 1))\nEOF\nsource ./f.sh",
        # Words.
        "record {1..10..3} {01..03} {00..03} {0..2} {8..010} {-01..1}",
        "declare -A a=([x]= [y]=1)\nrecord ${a[x]-default} ${a[x]:-empty} ${a[y]-default}${a[z]-none}",
        "x=ab12\nrecord ${x//[^0-9]/}",
        "shopt -s extglob\nx=aab\nrecord ${x##+(a)}",
        'record ${y:-"c d"}',
        "record $(printf '%.2f' 0.5) $(echo a-b | tr '-' '_')",
        "case a in a) x=1 ;& b) y=2 ;; c) z=3 ;; esac\nrecord $x$y$z",
        "case b in a | b) x=1 ;;& b) y=2 ;; esac\nrecord $x$y",
        "record {a..c} a=~/x --b=~/x",
        # Where words are split.
        "IFS=,\nL=a,b\nfor x in $L; do y+=$x-; done\nrecord $y",
        "L=a,b\nOLD=$IFS\nIFS=,\nA=($L)\nIFS=$OLD\nrecord ${#A[@]} $(echo 1 2)",
        "x=$'1\\n2'\nwhile IFS= read -r l; do n=$((n + l)); done <<< $x\nrecord $n",
        # Every item of an array.
        "a=(x/1 y/2)\nrecord ${a[@]##*/} ${a[@]/#/p} ${a[@]/%/s}",
        'f() { local d=$1; if shift; then printf %s "$1" "${@/#/$d}"; fi; }\nrecord $(f , a b c)',
        # Options.
        'set -- -m a -vn3 b\nwhile getopts "m:n:v" o; do record $o $OPTARG; done\nrecord $OPTIND',
        'set -- -x -m\nwhile getopts ":m:" o; do record $o $OPTARG; done',
        # Names that are made up.
        'v=foo\ndeclare $v=1\nexport ${v}2=2\nreadonly "${v}3=3"\nrecord $foo $foo2 $foo3',
        "x=08\nrecord $((10#$x + 1)) $((16#ff)) $((~5))",
        "record $(echo 0,1,2 | tr -cd ',' | wc -c)",
        # Folders.
        "cd /tmp\ncd /usr\ncd - > /dev/null\nrecord $PWD $OLDPWD",
        "cd /usr\npushd /tmp > /dev/null\npopd > /dev/null\nrecord $PWD",
    ],
)
def test_what_a_script_records_is_what_bash_records(text: str, tmp_path: Path) -> None:
    bash = ["bash", "-c", f"record() {{ printf '%s\\n' \"$@\"; }}\nshopt -s extglob\n{text}"]
    env = {"PATH": os.environ["PATH"], "HOME": "/home/me"}
    given = subprocess.run(bash, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    script = tmp_path / "run.sh"
    script.write_text(f"{text}\n")
    reading = read_script(script, f"{text}\n", cwd=str(tmp_path), environment=env, now=0)
    ours = [word for each in reading.invocations if each.argv[0] == "record" for word in each.argv[1:]]
    assert ours == given.stdout.splitlines()
