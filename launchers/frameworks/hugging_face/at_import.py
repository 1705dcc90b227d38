"""Calls a function with a module as soon as it is loaded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


class AtImport:
    """A finder that calls a function with a module as soon as it is loaded.

    Nothing is imported before the script, so that environment variables which it sets for torch still apply,
    and libraries that must be imported first are.
    """

    def __init__(self, name: str, call: Callable[[Any], None]) -> None:
        self.name = name
        self.call = call
        self.asking = threading.local()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the other finders' spec, with a loader that calls the function."""
        # Finders of other tools (coverage, tracing) also query the rest of the list, including this one.
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
