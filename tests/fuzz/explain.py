"""Coverage-guided search for a log or a snapshot that breaks `autotune explain` (make fuzz)."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["autotune.policies", "autotune.orchestrator.explain"]):
    from autotune.orchestrator.explain.sanitize import plain
    from autotune.orchestrator.explain.unpickle import loaded
    from autotune.policies.diagnosis.diagnose import diagnose
    from autotune.policies.diagnosis.literal_search import Search
    from autotune.policies.diagnosis.scan import SEARCHED, scan
    from autotune.policies.diagnosis.unknown_errors import WRONG
    from autotune.policies.explain.snapshot import summarised

_LOGS = Path(__file__).parent.parent / "policies" / "logs"
_PLAIN = Search(SEARCHED, WRONG).plain


def one_input(data: bytes) -> None:
    """Explain one input as a log, in two chunkings and by both matchers, and as a snapshot."""
    if data[:1] == b"\x80":
        try:
            summarised(loaded(io.BytesIO(data)))
        except ValueError:
            return
    size = data[0] + 1 if data else 1
    evidence = scan(data[at : at + size] for at in range(0, len(data), size))
    if scan([data], match=_PLAIN()) != evidence:
        raise AssertionError("the answer hangs on the chunking or the matcher")
    diagnosis = diagnose(evidence)
    for line in diagnosis.evidence:
        output = plain(line.text)
        if not output.isprintable():
            raise AssertionError("what is shown could command a terminal")


def main() -> None:
    """Run until interrupted, or as long as the options of libFuzzer say."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for log in _LOGS.glob("*/*.log"):
        (folder / log.parent.name).write_bytes(log.read_bytes())
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
