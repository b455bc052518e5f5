"""One compiled function for all layers that are alike, kept between starts where torch can compile ahead of time.

Dynamo guards on all that it sees, and a layer that is handed the whole cache shows it the layer's number and the
state of every other layer: one graph a layer and a pass. Here the function sees the layer's own keys and values,
as tensors, and gives the new ones back; which of the cache's parts they belong to is settled outside of it.

What is saved has no guards on identities, closures and globals. It may be loaded only for an equal key, and used only
after its output was compared with eager.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from remote_agent.pipeline.failures import brief

BACKEND = "inductor"

MAX_FUNCTIONS = 256
"""More than that is a model that can't share: every layer and pass would bring its own function."""

_LAYER_PATH = re.compile(
    r"""(L\[')?layer('\])?(\._modules\[['"]\w+['"]\])*"""
    r"""((?P<value>\.[A-Za-z]\w*)|(?P<tensor>\._(parameters|buffers)\[['"]\w+['"]\]))?"""
)
"""How a guard names the layer or a module inside it, and a plain attribute, parameter or buffer of one."""

_UNSAVED_GUARDS = frozenset(
    {"ID_MATCH", "CLASS_MATCH", "FUNCTION_MATCH", "CLOSURE_MATCH", "MODULE_MATCH", "BUILTIN_MATCH", "WEAKREF_ALIVE"}
)
"""Guards on identities, which differ between processes."""


class Past:
    """What a layer's code sees in place of the whole cache: its own past, each [batch, heads, length, dimension].

    ``dropped``: how many tokens before ``keys`` a sliding window has let go of.
    """

    def __init__(self, keys: torch.Tensor | None, values: torch.Tensor | None, dropped: int) -> None:
        self.keys, self.values = keys, values
        self._dropped = dropped
        self._updated = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new states and return all."""
        if self._updated:
            raise NotImplementedError("a layer that updates the cache twice can't share its compiled function")
        self._updated = True
        if self.keys is None or self.values is None:
            self.keys, self.values = key_states.contiguous(), value_states.contiguous()
        else:
            self.keys = torch.cat([self.keys, key_states], dim=-2)
            self.values = torch.cat([self.values, value_states], dim=-2)
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> int:
        """Return how many tokens were seen."""
        return self._dropped + (0 if self.keys is None else self.keys.shape[-2])


def run_layer(
    layer: nn.Module,
    cache_name: str | None,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    dropped: int,
    inputs: dict[str, Any],
) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
    """Return the layer's output and its keys and values after it: what is compiled, and nothing around it."""
    if cache_name is None:
        return layer.forward(**inputs), None, None
    past = Past(keys, values, dropped)
    output = layer.forward(**{**inputs, cache_name: past})
    return output, past.keys, past.values


class LayerFunctions:
    """The compiled functions of a model's layers, each found by its guards; new ones are made until it is sealed.

    ``dynamic``: a function serves all lengths, else the one that it was made for. ``options`` are Inductor's.
    ``loaded`` and ``traced`` count them, ``missed`` the calls that no function was found for. ``not_ahead`` says why
    some or all calls are left to Dynamo, which compiles in time, guards and recompiles by itself; what it compiled is
    not saved here.
    """

    def __init__(self, dynamic: bool = True, options: Mapping[str, Any] | None = None) -> None:
        self._dynamic, self._options = dynamic, options or {}
        self._functions: list[Any] = []
        self._in_time: Callable[..., Any] | None = None
        self._sealed = False
        self._traces_ahead = True
        self.loaded = 0
        self.traced = 0
        self.missed = 0
        self.not_ahead: str | None = None

    def load(self, paths: Sequence[Path]) -> None:
        """Take functions that `save` wrote. Raises whatever torch does for one that it can't use."""
        for path in paths:
            with path.open("rb") as file:
                function: Any = torch.compiler.load_compiled_function(file)
            function.disable_guard_check()
            self._functions.append(function)
        self.loaded = len(self._functions)

    def save(self, folder: Path) -> tuple[Path, ...]:
        """Write every function below ``folder``; none where one of them could not be compiled ahead of time."""
        if not self._traces_ahead:
            return ()
        paths = tuple(folder / f"{number}.new" for number in range(len(self._functions)))
        for function, path in zip(self._functions, paths, strict=True):
            function.save_compiled_function(str(path))
        return paths

    def seal(self) -> None:
        """Make no more functions ahead of time: what comes now was not compared with eager, and runs eagerly."""
        self._sealed = True

    def find(self, arguments: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return a function for `run_layer`'s ``arguments``; None if there is none and none may be made."""
        for function in self._functions:
            if function.guard_check(*arguments):
                return function  # type: ignore[no-any-return]
        if not self._traces_ahead:
            return self._compile_in_time()
        if self._sealed:
            self.missed += 1
            return None
        return self._trace(arguments)

    def leave_to_dynamo(self, why: str) -> Callable[..., Any]:
        """Return the function that Dynamo compiles as it is called; the first ``why`` is kept."""
        self.not_ahead = self.not_ahead or why
        return self._compile_in_time()

    def _compile_in_time(self) -> Callable[..., Any]:
        if self._in_time is None:
            self._in_time = torch.compile(run_layer, dynamic=self._dynamic, backend=BACKEND)
        return self._in_time

    def _trace(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        if len(self._functions) >= MAX_FUNCTIONS:
            raise RuntimeError(f"the layers need more than {MAX_FUNCTIONS} compiled functions")
        options = {"guard_filter_fn": choose_guards, **self._options}
        compiled = torch.compile(run_layer, fullgraph=True, dynamic=self._dynamic, backend=BACKEND, options=options)
        try:
            if not hasattr(compiled, "aot_compile"):
                raise NotImplementedError(f"torch {torch.__version__} can't compile ahead of time")
            function: Any = compiled.aot_compile((arguments, {}))
        except Exception as error:  # graph breaks and what can't be saved; compiling in time may still do
            self._traces_ahead = False
            return self.leave_to_dynamo(brief(error))
        function.disable_guard_check()  # `find` has checked
        self._functions.append(function)
        self.traced += 1
        return function  # type: ignore[no-any-return]


class SharedLayer:
    """Stands in a layer's place where `nn.Module.compile` would put compiled code, and calls the shared function."""

    def __init__(self, layer: nn.Module, position: int, functions: LayerFunctions) -> None:
        self._layer = layer
        self._number = find_number(layer, position)
        parameters = inspect.signature(layer.forward).parameters.values()
        self._names = tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD)
        self._functions = functions

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(self._names):
            return self._layer.forward(*args, **kwargs)
        inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        name = next((name for name, value in inputs.items() if isinstance(value, Cache)), None)
        if name is None:
            return self._run(inputs, None, None)
        cache = inputs[name]
        part = find_part(cache, self._number)
        if part is None:
            function = self._functions.leave_to_dynamo(f"a layer's part of {type(cache).__name__} is of another kind")
            return function(self._layer, None, None, None, 0, inputs)[0]
        return self._run({**inputs, name: None}, name, part, cache)

    def _run(self, inputs: dict[str, Any], name: str | None, part: Any, cache: Any = None) -> Any:
        keys, values, dropped = (None, None, 0) if part is None else read_part(part)
        arguments = (self._layer, name, keys, values, dropped, inputs)
        function = self._functions.find(arguments)
        if function is None:
            return self._layer.forward(**(inputs if name is None else {**inputs, name: cache}))
        output, keys, values = function(*arguments)
        if part is not None:
            write_part(part, keys, values)
        return output


def share_layers(layers: Sequence[nn.Module], functions: LayerFunctions) -> None:
    """Let all ``layers`` run through ``functions``."""
    for position, layer in enumerate(layers):
        # Where `nn.Module.compile` puts its own: hooks and checkpointing stay outside, and pickling leaves it out.
        layer._compiled_call_impl = SharedLayer(layer, position, functions)


def find_number(layer: nn.Module, position: int) -> int | None:
    """Return which of the cache's parts is the layer's: the one number its modules know, or its position."""
    known = (getattr(module, "layer_idx", None) for module in layer.modules())
    numbers = {number for number in known if isinstance(number, int)}
    return position if not numbers else numbers.pop() if len(numbers) == 1 else None


def find_part(cache: Any, number: int | None) -> Any:
    """Return the part of a cache that holds a layer's past as plain tensors; None where it is of another kind."""
    if number is None or type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        return None
    while len(cache.layers) <= number and getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        cache.layers.append(cache.layer_class_to_replicate())
    part = cache.layers[number] if number < len(cache.layers) else None
    shareable = type(part) in (DynamicLayer, DynamicSlidingWindowLayer) and not getattr(part, "record_past", False)
    return part if shareable else None


def read_part(part: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Return a part's keys and values, None where it is empty, and how many tokens it has let go of."""
    if not part.is_initialized or part.keys is None or part.keys.numel() == 0:
        return None, None, 0
    return part.keys, part.values, int(part.get_seq_length()) - int(part.keys.shape[-2])


def write_part(part: Any, keys: torch.Tensor | None, values: torch.Tensor | None) -> None:
    """Put a layer's keys and values, old and new, into its part of the cache."""
    if keys is None or values is None:
        return
    if read_part(part)[0] is None:
        part.update(keys, values)
        return
    if type(part) is DynamicSlidingWindowLayer:
        part.cumulative_length += keys.shape[-2] - part.keys.shape[-2]
        keys, values = (states[:, :, -part.sliding_window + 1 :, :] for states in (keys, values))
    part.keys, part.values = keys, values


def choose_guards(guards: Sequence[Any]) -> list[bool]:
    """Return which of Dynamo's guards a function keeps: all on its tensors and on what tells layers apart."""
    return [_is_kept(guard) for guard in guards]


def _is_kept(guard: Any) -> bool:
    if guard.is_global or {guard.guard_type, *guard.derived_guard_types} & _UNSAVED_GUARDS:
        return False
    if re.search(r"\blayer\b", guard.name) is None:
        return True
    path = _LAYER_PATH.fullmatch(guard.name)
    if path is None:
        return False
    if path["tensor"]:
        return bool(guard.guard_type == "TENSOR_MATCH")
    return guard.guard_type in (("CONSTANT_MATCH", "EQUALS_MATCH") if path["value"] else ("TYPE_MATCH",))


@contextlib.contextmanager
def compile_settings() -> Iterator[None]:
    """Let functions be compiled ahead of time, and for all lengths: none is fixed because it equals another number."""
    from torch._dynamo import config
    from torch.fx.experimental import _config as symbols

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (config, "enable_aot_compile", True),
            (config, "specialize_float", True),
            (symbols, "use_duck_shape", False),
        ):
            if hasattr(module, name):
                stack.enter_context(module.patch(**{name: value}))
        yield
