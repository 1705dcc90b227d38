"""What every test shares."""

from hypothesis import settings

# The same examples in every run, so that a failure is always somebody's; `make fuzz` looks for new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
