"""Where users already are: transformers, vLLM and compressed-tensors. This file only arranges for the first.

transformers keeps a table of quantizers in one module. Entries can be made once that module exists, but importing it
costs seconds. So a finder waits in `sys.meta_path` for that one name, lets the import take its usual course, and
registers COMET's quantizer right after it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

QUANTIZERS = "transformers.quantizers.auto"  # the module with the table
OURS = "comet_core.integrations.transformers"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Waits for `QUANTIZERS` to be imported by whoever needs it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != QUANTIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """The module's own loader, followed by the registration."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module(OURS)


def register_with_transformers() -> None:
    """Register COMET's quantizer now if transformers has loaded its own, else when it does. Does nothing twice."""
    if QUANTIZERS in sys.modules:
        importlib.import_module(OURS)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
