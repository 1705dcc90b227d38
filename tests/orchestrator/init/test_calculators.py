"""Texts that other programs calculate: `expr`, `bc`, `awk`; the expected values are those of the programs."""

import pytest

from autotune.orchestrator.init.bash.calculators import UnreadableError, awk, bc, expr


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("16 * 8", "128"),
        ("7 / 2", "3"),
        ("-7 / 2", "-3"),
        ("( 2 + 3 ) * 4", "20"),
        ("3 < 5", "1"),
        ("5 = 6", "0"),
    ],
)
def test_expr_calculates_with_whole_numbers(words: str, printed: str) -> None:
    assert expr(words.split()) == f"{printed}\n"


@pytest.mark.parametrize(
    ("options", "text", "printed"),
    [
        ("-l", "0.5 / 1000", ".00050000000000000000"),
        ("", "0.01 < 0.1", "1"),
        ("-l", "0.0005 < 0.01", "1"),
        ("", "scale=2; 3/4", ".75"),
        ("", "7/2", "3"),
        ("", "1.5*2.25", "3.37"),
        ("-l", "1.5*2.25", "3.375"),
        ("", "scale=3;10/3*2", "6.666"),
        ("", "2^10", "1024"),
        ("", "-3/2", "-1"),
        ("-l", "24000*0.8", "19200.0"),
    ],
)
def test_bc_keeps_its_scale(options: str, text: str, printed: str) -> None:
    assert bc(options.split(), f"{text}\n") == f"{printed}\n"


@pytest.mark.parametrize(
    ("words", "text", "printed"),
    [
        (['{ printf "%.2f", $1 / 100 }'], "55\n", "0.55"),
        (["{ s += $1 } END { print s }"], "512\n1024\n2048\n", "3584\n"),
        (["-F,", "{print NF}"], "a,b,c\n", "3\n"),
        (["-F", "/", "{print $NF}"], "a/b/c\n", "c\n"),
        (["BEGIN{print 3*0.25}"], "", "0.75\n"),
        (["-v", "a=3", "BEGIN{print int(a*1.7)}"], "", "5\n"),
        (["BEGIN{print int(0.29*100)}"], "", "28\n"),
        (["{print $1, $2}"], "x y z\n", "x y\n"),
        (['{printf "%d\\n", $1*2}'], "4.6\n", "9\n"),
        (["BEGIN {print (3 > 2) ? 1 : 0}"], "", "1\n"),
        (["NR==2{print $1}"], "a\nb\n", "b\n"),
        (["BEGIN{print 1/3}"], "", "0.333333\n"),
    ],
)
def test_awk_prints_what_its_rules_say(words: list[str], text: str, printed: str) -> None:
    assert awk(words, text) == printed


@pytest.mark.parametrize(
    "program",
    [
        '{print "x" $2}',
        "{print $1 $2}",
        "{system($1)}",
        '{while (1) print "a"}',
        "BEGIN{print 2^99}",
        "{",
        '{getline < "f"}',
    ],
)
def test_what_is_not_read_is_no_value(program: str) -> None:
    with pytest.raises(UnreadableError):
        awk([program], "a b\n")


@pytest.mark.parametrize("text", ["2^999999999", "e(1)", "x=3; x", "1/0", "read()", "9" * 200 + "*9"])
def test_bc_that_is_not_read_is_no_value(text: str) -> None:
    with pytest.raises(UnreadableError):
        bc(["-l"], text)
