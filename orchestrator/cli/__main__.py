"""`python -m orchestrator.cli` is `autotune`."""

from orchestrator.cli import main

main(prog_name="autotune")
