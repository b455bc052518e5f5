"""Calls into cuda-python modules, with every return code checked."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from typing import Any

from remote_agent.errors import DeviceError

LIBRARY = "libcuda.so.1"


class Calls:
    """A cuda-python module whose calls return their results alone, or raise DeviceError.

    ``module`` may be given for tests; otherwise it is imported at the first call.
    """

    def __init__(self, name: str, module: Any = None) -> None:
        self._name = name
        self._module = module
        self._is_given = module is not None

    @property
    def module(self) -> Any:
        """Return the module itself, for its constants. Raises: DeviceError if it can't be imported."""
        if self._module is None:
            try:
                self._module = importlib.import_module(self._name)
            except ImportError as error:
                text = f"{self._name} can't be imported: {error}; install cuda-python in this Python"
                raise DeviceError(text, "import", "missing_package") from error
        return self._module

    def initialise(self) -> None:
        """Initialise the driver in this process, by its library's own entry point first. Raises: DeviceError

        In a process forked after ``nvmlInit``, as an attacher's may be, the first call that fails ends it (SIGSEGV,
        driver 580) where cuda-python alone initialised the driver. The library's own entry point first prevents that in
        most cases, not in all (decision 12).
        """
        if not self._is_given:
            with contextlib.suppress(OSError, AttributeError):  # no such library: the call says so
                ctypes.CDLL(LIBRARY).cuInit(0)
        self("cuInit", 0)

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Call ``function`` and return its one result, a tuple of several, or None."""
        code, *results = self.attempt(function, *arguments)
        self.check(function, code)
        if not results:
            return None
        return results[0] if len(results) == 1 else tuple(results)

    def check(self, function: str, code: Any) -> None:
        """Raise DeviceError if ``code``, which ``function`` returned, is not success."""
        if int(code) != 0:
            name = getattr(code, "name", str(int(code)))
            raise DeviceError(f"{function} failed: {name} ({int(code)})", function, name)

    def attempt(self, function: str, *arguments: Any) -> tuple[Any, ...]:
        """Call ``function`` and return what it returns, its code first and unchecked.

        Raises: DeviceError if there is no driver library or no such call in it.
        """
        try:
            result: tuple[Any, ...] = getattr(self.module, function)(*arguments)
        except (AttributeError, RuntimeError, OSError) as error:
            text = f"{function} can't be called: {' '.join(str(error).split())[:300]}"
            raise DeviceError(text, function, "unavailable") from error
        return result
