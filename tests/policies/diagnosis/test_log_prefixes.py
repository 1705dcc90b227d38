"""What stands before a message, and where the message begins."""

from __future__ import annotations

import pytest

from autotune.policies.diagnosis.log_prefixes import parsed, segments

STRUCTURED = '{"level": "ERROR", "ts": "2026-03-24T23:54:53Z", "msg": "%s"}'


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        (STRUCTURED % "CUDA out of memory", "CUDA out of memory"),
        (STRUCTURED % r"a \"quoted\" word", 'a "quoted" word'),
        # No escape of JSON: the record is shown as it is.
        (STRUCTURED % r"C:\drive", STRUCTURED % r"C:\drive"),
        ('{"step": 3, "msg": "data of the job"}', '{"step": 3, "msg": "data of the job"}'),
    ],
)
def test_the_message_of_a_structured_log_is_read(text: str, bare: str):
    assert parsed(text).bare == bare


@pytest.mark.parametrize(
    ("text", "bare", "tag", "rank"),
    [
        ("ValueError: x", "ValueError: x", "", None),
        ("(Actor pid=7) [rank3]: ValueError: x", "ValueError: x", "(Actor pid=7[3]", 3),
        ("2026-03-24 23:54:53,101 - trainer - ERROR - boom", "boom", "", None),
        ("worker-1 | 2026-03-24 23:54:53 | ERROR | boom", "boom", "worker-1", None),
        ("   1 | (Actor pid=7) boom", "boom", "(Actor pid=7", None),
    ],
)
def test_every_prefix_before_a_message_is_taken_off(text, bare, tag, rank):
    line = parsed(text)
    assert (line.bare, line.tag, line.rank) == (bare, tag, rank)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one line", ["one line"]),
        (" 10%|#\r 20%|##", [" 10%|#", " 20%|##"]),
        (r"C:\new", [r"C:\new"]),  # no quotes: no escape
        (
            r'{"time": "now", "error": "Traceback:\n  File \"a.py\"\r\n\tboom", "pid": 7}',
            ["Traceback:", '  File "a.py"', "\tboom"],
        ),
        (r"{'status': 'failed', 'message': 'first\nit\'s last'}", ["first", "it's last"]),
        (r"RuntimeError('first\nlast')", ["RuntimeError('first", "last')"]),
    ],
)
def test_a_line_is_shown_as_the_lines_that_it_holds(text, parts):
    assert segments(text) == parts
