"""A function that is called with a module as soon as that is loaded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


class AtImport:
    """A finder that calls a function with a module as soon as that is loaded.

    So nothing is imported before the script: what it sets in its head for torch and its kin holds, and what
    wants to be imported first is.
    """

    def __init__(self, name: str, call: Callable[[Any], None]) -> None:
        self.name = name
        self.call = call
        self.asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec that the other finders have, with a loader that calls the function."""
        # Finders of other tools (coverage, tracing) ask the rest of the list as well, this one included.
        if name != self.name or getattr(self.asking, "others", False):
            return None
        self.asking.others = True
        try:
            others = (finder for finder in sys.meta_path if finder is not self)
            result = (finder.find_spec(name, path, target) for finder in others)
            spec = next((spec for spec in result if spec is not None), None)
        finally:
            self.asking.others = False
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            self.call(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
