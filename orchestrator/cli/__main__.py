"""`python -m autotune.orchestrator.cli` is `autotune`."""

from autotune.orchestrator.cli import main

main(prog_name="autotune")
