"""What to warm and how: a recipe, checked whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Literal

from remote_agent.protocol.checks import address, not_url_path, outside
from remote_agent.protocol.codec import Checked
from remote_agent.protocol.records import dataclass
from remote_agent.protocol.states import NATIVE_STAGES, STAGES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEVICE = re.compile(r"auto|all|cpu|cuda:\d{1,4}|(GPU|MIG)-[0-9A-Fa-f-]{8,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HOST = re.compile(r"[A-Za-z0-9.:_-]{1,253}")


@dataclass(frozen=True)
class ModelSource(Checked):
    """A checkpoint on the host: a directory, or one ``.safetensors`` file."""

    path: str
    revision: str | None = None
    adapter: Literal["native", "engine"] = "native"

    def value_problems(self) -> Iterator[str]:
        if not self.path or "\0" in self.path:
            yield "path: must name a file or directory on the host"


@dataclass(frozen=True)
class WeightsPolicy:
    """How bytes reach the device, and what a load leaves in the page cache."""

    path: Literal["auto", "mapped", "staged", "direct"] = "auto"
    page_cache: Literal["keep", "bypass"] = "keep"


@dataclass(frozen=True)
class CompilePolicy:
    """``off`` warms kernels only; ``layer`` compiles the repeated layer."""

    mode: Literal["off", "layer", "model"] = "off"
    cache_directory: str | None = None


@dataclass(frozen=True)
class Shape(Checked):
    """One input shape to warm: ``batch`` sequences of ``tokens`` tokens."""

    batch: int = 1
    tokens: int = 128

    def value_problems(self) -> Iterator[str]:
        yield from outside("batch", self.batch, 4096)
        yield from outside("tokens", self.tokens, 1 << 20)


@dataclass(frozen=True)
class Sampling(Checked):
    """Temperature 0 is greedy."""

    temperature: float = 0.0
    seed: int = 0

    def value_problems(self) -> Iterator[str]:
        if not 0 <= self.temperature <= 100:
            yield f"temperature: {self.temperature} is not within 0..100"


@dataclass(frozen=True)
class FirstRequest(Checked):
    """The one real request that proves readiness.

    With ``prompt`` the checkpoint's tokenizer is used; without it ``prompt_tokens``
    ids are drawn deterministically from the vocabulary. ``shapes`` are warmed before.
    """

    kind: Literal["auto", "generate", "encode"] = "auto"
    prompt: str | None = None
    prompt_tokens: int = 128
    batch: int = 1
    max_new_tokens: int = 1
    shapes: tuple[Shape, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)

    def value_problems(self) -> Iterator[str]:
        yield from outside("batch", self.batch, 4096)
        yield from outside("prompt_tokens", self.prompt_tokens, 1 << 20)
        yield from outside("max_new_tokens", self.max_new_tokens, 1 << 16)


@dataclass(frozen=True)
class Hold(Checked):
    """Who keeps the warm model, and for how long (``None``: until released).

    ``make_room``: where memory or a budget is short, what nobody is attached to or uses goes, the longest unused first.
    ``lock``: a process stays that locks the page cache's pages; for a ``target_tier`` of ``cached``.
    """

    owner: str | None = None
    ttl_s: float | None = None
    make_room: bool = False
    lock: bool = False

    def value_problems(self) -> Iterator[str]:
        if self.ttl_s is not None and self.ttl_s <= 0:
            yield f"ttl_s: {self.ttl_s} must be above 0"


@dataclass(frozen=True)
class ReadyRequest(Checked):
    """What is posted to a server to see that it answers; without a ``body``, an OpenAI-style completion.

    That asks for the recipe's own prompt, or its first token ids where it has none, and for few new tokens.
    """

    path: str = "/v1/completions"
    body: Mapping[str, object] | None = None

    def value_problems(self) -> Iterator[str]:
        yield from not_url_path("path", self.path)
        try:
            json.dumps(self.body, allow_nan=False)
        except (TypeError, ValueError) as error:
            yield f"body: is no JSON: {error}"


@dataclass(frozen=True)
class Serve(Checked):
    """How a warm model is served: a process attaches to it and calls ``entry`` with model, tokenizer and context.

    ``entry``: ``module:function``; ``path``: a folder on the host where Python looks for the module first.
    ``health``: a path that must answer 200 before ``request`` is sent. All of that has ``ready_timeout_s``.
    """

    entry: str
    port: int
    host: str = "127.0.0.1"
    path: str | None = None
    health: str | None = None
    request: ReadyRequest = field(default_factory=ReadyRequest)
    ready_timeout_s: float = 60.0

    @property
    def address(self) -> str:
        return address(self.host, self.port)

    def value_problems(self) -> Iterator[str]:
        if not _HOST.fullmatch(self.host):
            yield f"host: {self.host[:80]!r} is neither a name nor an address"
        if self.path is not None and (not self.path or "\0" in self.path):
            yield "path: must name a folder on the host"
        if self.health is not None:
            yield from not_url_path("health", self.health)
        if not 0 < self.ready_timeout_s <= 86400:
            yield f"ready_timeout_s: {self.ready_timeout_s:g} is not within 0..86400 seconds"
        yield from outside("port", self.port, 65535)
        if not _ENTRY.fullmatch(self.entry):
            yield f"entry: {self.entry[:80]!r} is not module:function"


@dataclass(frozen=True)
class Recipe(Checked):
    """What to warm and how; validated once, then only passed on.

    ``devices``: ``auto`` (the first GPU, or the CPU where there is none),
    ``all``, ``cpu``, ``cuda:N`` or a GPU UUID. ``deadlines``: seconds a stage.
    """

    name: str
    model: ModelSource
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    devices: tuple[str, ...] = ("auto",)
    target_tier: Literal["cached", "host", "resident", "standby"] = "standby"
    weights: WeightsPolicy = field(default_factory=WeightsPolicy)
    compile: CompilePolicy = field(default_factory=CompilePolicy)
    request: FirstRequest = field(default_factory=FirstRequest)
    environment: Mapping[str, str] = field(default_factory=dict)
    deadlines: Mapping[str, float] = field(default_factory=dict)
    hold: Hold = field(default_factory=Hold)
    serve: Serve | None = None
    trust_remote_code: bool = False

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of a run, in canonical order."""
        return NATIVE_STAGES if self.serve is None else STAGES

    @property
    def needs_device(self) -> bool:
        """Whether a run does anything on a device: ``cached`` is the host's page cache."""
        return self.target_tier != "cached"

    @property
    def builds_model(self) -> bool:
        """Whether a run makes a model of the weights: the tiers before ``resident`` are bytes alone."""
        return self.target_tier in ("resident", "standby")

    @property
    def is_for_others(self) -> bool:
        """Whether its weights are to lie with the keeper, on whatever device: so that other processes attach."""
        return self.target_tier == "resident" or self.serve is not None

    def value_problems(self) -> Iterator[str]:
        if not self.devices:
            yield "devices: name at least one device"
        for device in self.devices:
            if not _DEVICE.fullmatch(device):
                yield f"devices: {device[:80]!r} is not auto, all, cpu, cuda:N or a GPU UUID"
        if len(self.devices) > 1 and {"auto", "all"} & set(self.devices):
            yield "devices: 'auto' and 'all' stand alone"
        if len(set(self.devices)) < len(self.devices):
            yield "devices: a device is named twice"
        if self.target_tier == "host" and "cpu" in self.devices:
            yield "target_tier: host registers files with a GPU, and devices names cpu: cached is what a CPU has"
        if self.hold.lock and self.target_tier != "cached":
            yield f"hold.lock: locks the page cache at target_tier cached, and target_tier is {self.target_tier}"
        if self.serve is not None and not self.builds_model:
            yield f"serve: needs a model, and target_tier is {self.target_tier}: resident and standby make one"
        if self.serve is not None and len(self.devices) > 1:
            yield f"serve: one process serves one device, and devices names {len(self.devices)}"
        for stage, limit in self.deadlines.items():
            if stage not in self.stages:
                yield f"deadlines.{stage}: is not a stage; stages are {', '.join(self.stages)}"
            elif limit <= 0:
                yield f"deadlines.{stage}: {limit} must be above 0 seconds"
        for key in self.environment:
            if not _VARIABLE.fullmatch(key):
                yield f"environment: {key[:80]!r} is not a variable name"
        if not _NAME.fullmatch(self.name):
            yield f"name: {self.name[:80]!r} must be 1..64 letters, digits, '.', '_' or '-'"
