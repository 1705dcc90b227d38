"""The documentation; `python -m docs.site` builds it."""
