"""Kernels are warmed by real passes, and compiled code is used only when it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remote_agent.compile_records import read_records
from remote_agent.pipeline import compilation, shared_layer
from remote_agent.pipeline.assign import Warm
from remote_agent.pipeline.compilation import Compiled, has_like_layers, run_shapes, warm_kernels
from remote_agent.pipeline.compile_attempt import largest_difference, read_counters
from remote_agent.pipeline.shared_layer import Past
from remote_agent.pipeline.timing import Measure
from remote_agent.protocol.messages import CompilePolicy, FirstRequest, Sampling, Shape, StageStatus
from tests.remote_agent import checkpoints
from tests.remote_agent.pipeline.models import assign_warm

ONE_SHAPE = FirstRequest(prompt_tokens=6)
REQUEST = FirstRequest(prompt_tokens=6, shapes=(Shape(2, 5), Shape(1, 6)))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Batch and length of every input that a Llama's embedding sees."""
    seen: list[tuple[int, int]] = []
    original = torch.nn.Embedding.forward

    def forward(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        seen.append((ids.shape[0], ids.shape[1]))
        return original(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", forward)
    return seen


@pytest.fixture
def clean_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled code of one test does not serve another, and none waits for a C++ compiler.

    Inductor's takes half a minute here; the zygote's tests compile with it.
    """
    monkeypatch.setattr(shared_layer, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(warm: Warm, policy: CompilePolicy, root: Path, request: FirstRequest = ONE_SHAPE) -> tuple[Compiled, Measure]:
    measure = Measure(0)
    return warm_kernels(warm, request, policy, root, measure, lambda done, total: None), measure


def write_small(folder: Path, **changes: Any) -> Path:
    """Write a model of one layer that needs one function."""
    return checkpoints.write_bert(folder, **{"num_hidden_layers": 1, **changes})


def fake_compile(monkeypatch: pytest.MonkeyPatch, forward: Any) -> None:
    """Let `nn.Module.compile` put ``forward`` in place, which is what it does with what it compiled."""

    def compile_in_place(self: torch.nn.Module, **options: Any) -> None:
        self._compiled_call_impl = lambda *args, **kwargs: forward(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_in_place)


def is_eager(warm: Warm) -> bool:
    return all(module._compiled_call_impl is None for module in warm.model.modules())


def test_every_shape_is_run_with_its_decode_steps(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    """Each shape once, the request's own too, each followed by single tokens through the cache."""
    warm = assign_warm(checkpoints.write_llama(tmp_path))

    compiled, measure = run(warm, CompilePolicy(), tmp_path / "cache", REQUEST)

    assert compiled == Compiled(False)
    assert calls == [(2, 5), (2, 1), (2, 1), (1, 6), (1, 1), (1, 1)]
    assert measure.extra["shapes"] == "2x5, 1x6"
    assert not (tmp_path / "cache").exists()


def warm_rehearsed(warm: Warm, mode: str = "off") -> Measure:
    measure = Measure(0)
    policy = CompilePolicy(mode)  # type: ignore[arg-type]
    warm_kernels(warm, ONE_SHAPE, policy, Path(), measure, lambda done, total: None, is_rehearsed=True)
    return measure


def test_what_was_rehearsed_is_not_run_again(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    """Every layer is like the one that was; a run says so."""
    warm = assign_warm(checkpoints.write_llama(tmp_path))

    measure = warm_rehearsed(warm)

    assert not calls
    assert (measure.status, measure.reason) == (StageStatus.REUSED, compilation.REHEARSED)


@pytest.mark.parametrize("write", [checkpoints.write_gpt2, checkpoints.write_bert, checkpoints.write_mistral])
def test_layers_that_differ_in_their_number_alone_are_alike(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """Which a layer has for its place in a cache."""
    assert has_like_layers(assign_warm(write(tmp_path)))


@pytest.mark.parametrize("as_list", [False, True])
def test_layers_with_experts_are_warmed(as_list: bool, tmp_path: Path) -> None:
    """How many tokens come to each is what weights decide, and a rehearsal has none of those."""
    if as_list:
        warm = assign_warm(checkpoints.write_llama(tmp_path))
        for layer in warm.model.model.layers:
            layer.mlp = torch.nn.ModuleList([layer.mlp])
    else:
        warm = assign_warm(checkpoints.write_mixtral(tmp_path))

    assert not has_like_layers(warm)


@pytest.mark.parametrize("difference", ["kind", "shape", "module", "setting", "unset"])
def test_layers_unlike_the_first_are_warmed(difference: str, tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    """A window of its own, other sizes or other modules mean kernels that no rehearsal has seen."""
    warm = assign_warm(checkpoints.write_llama(tmp_path))
    last = warm.model.model.layers[-1]
    if difference == "kind":
        text = SimpleNamespace(layer_types=["full_attention", "sliding_attention"])
        warm = replace(warm, config=SimpleNamespace(get_text_config=lambda: text))
    elif difference == "shape":
        wide = torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(32, 64, bias=False)
        last.mlp.gate_proj, last.mlp.up_proj = wide
        last.mlp.down_proj = torch.nn.Linear(64, 32, bias=False)
    elif difference == "setting":
        last.self_attn.is_causal = not last.self_attn.is_causal
    elif difference == "unset":
        for layer in warm.model.model.layers:
            layer.self_attn.window = None if layer is last else 4096
    else:
        last.mlp = torch.nn.Sequential(last.mlp, torch.nn.Identity())

    measure = warm_rehearsed(warm)

    assert calls == [(1, 6), (1, 1), (1, 1)]
    assert measure.status is StageStatus.DONE


def test_a_model_to_be_compiled_is_run_eagerly_all_the_same(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    """What compiled code gives is compared with that."""
    warm_rehearsed(assign_warm(checkpoints.write_llama(tmp_path)), "layer")

    assert (1, 6) in calls


def test_a_compiled_decoder_is_kept_for_the_next_start(tmp_path: Path, clean_compiler: None) -> None:
    """The first start traces and records; the next, with nothing changed, loads and traces nothing."""
    folder, root = checkpoints.write_llama(tmp_path / "model"), tmp_path / "cache"
    spans = []
    for _ in range(2):
        torch._dynamo.reset()
        warm = assign_warm(folder)
        compiled, measure = run(warm, CompilePolicy("layer"), root)
        assert compiled == Compiled(True), measure.reason
        before = read_counters()["graphs"]
        run_shapes(warm, (Shape(1, 9),), Sampling(), lambda done, total: None)
        assert read_counters()["graphs"] == before
        spans.append(measure)

    cold, kept = (span.extra for span in spans)
    assert (cold["cache"], cold["functions_traced"], cold["functions_loaded"]) == ("miss", 2, 0)
    assert (kept["cache"], kept["functions_traced"], kept["functions_loaded"]) == ("hit", 0, 2)
    assert spans[0].reason == "cache miss: the cache was empty; 2 graphs compiled and 0 found, 0 new objects"
    assert spans[1].reason == "cache hit: 2 layer functions loaded, none traced, none compiled"
    assert cold["graphs"] == 2
    assert kept["graphs"] == 0


def test_what_changed_since_the_last_warm_up_is_named(tmp_path: Path, clean_compiler: None) -> None:
    """The recorded functions do not serve another model, and the miss says which part of it is another."""
    root = tmp_path / "cache"
    reasons = []
    for layers in (1, 2):
        torch._dynamo.reset()
        warm = assign_warm(write_small(tmp_path / str(layers), num_hidden_layers=layers))
        reasons.append(str(run(warm, CompilePolicy("layer"), root)[1].reason))

    assert reasons[1].startswith("cache miss: num_hidden_layers 1 → 2; 1 graphs compiled")
    assert len(read_records(root)) == 2


def test_a_damaged_function_is_not_loaded(tmp_path: Path, clean_compiler: None) -> None:
    """It is compiled again and recorded anew, and the miss says so."""
    folder, root = write_small(tmp_path / "model"), tmp_path / "cache"
    run(assign_warm(folder), CompilePolicy("layer"), root)
    next(root.glob("functions/*/*")).write_bytes(b"no pickle")
    torch._dynamo.reset()

    compiled, measure = run(assign_warm(folder), CompilePolicy("layer"), root)

    assert compiled.used
    assert str(measure.reason).startswith("cache miss: 1 of its 1 layer functions are gone or damaged; 1 graphs")
    torch._dynamo.reset()
    assert run(assign_warm(folder), CompilePolicy("layer"), root)[1].extra["cache"] == "hit"


def test_an_unreadable_function_of_a_known_digest_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_compiler: None
) -> None:
    """What torch refuses to load costs a compile and nothing else."""
    folder, root = write_small(tmp_path / "model"), tmp_path / "cache"
    run(assign_warm(folder), CompilePolicy("layer"), root)

    def refuse(file: Any) -> None:
        raise RuntimeError("made by another torch")

    monkeypatch.setattr(torch.compiler, "load_compiled_function", refuse)
    torch._dynamo.reset()
    compiled, measure = run(assign_warm(folder), CompilePolicy("layer"), root)

    assert compiled.used
    assert "its layer functions can't be loaded: RuntimeError: made by another torch" in str(measure.reason)


def trip_over(root: Path, *names: str) -> Any:
    """Return a backend that fails while a file of one of these names is in Inductor's folder: a broken entry."""

    def backend(graph: Any, inputs: Any, **options: Any) -> Any:
        for name in names:
            if (root / "inductor" / name).exists():
                raise RuntimeError(f"{name}: invalid ELF header")
        return graph.forward

    return backend


def test_an_entry_that_breaks_the_compile_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_compiler: None
) -> None:
    """The second try finds an empty cache and succeeds; the entry can still be looked at."""
    root = tmp_path / "cache"
    (root / "inductor").mkdir(parents=True)
    (root / "inductor" / "bad.so").write_bytes(b"torn")
    monkeypatch.setattr(shared_layer, "BACKEND", trip_over(root, "bad.so"))
    warm = assign_warm(write_small(tmp_path / "model"))

    compiled, measure = run(warm, CompilePolicy("layer"), root)

    assert compiled == Compiled(True), measure.reason
    assert (root / "aside" / "inductor" / "bad.so").read_bytes() == b"torn"
    assert f"its entries are set aside in {root / 'aside'}: compile failed: " in str(measure.reason)
    assert measure.extra["cache"] == "miss"


def test_entries_that_were_not_to_blame_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_compiler: None
) -> None:
    """A host that can't compile at all keeps the cache that another can use, and records nothing."""
    root = tmp_path / "cache"
    (root / "inductor").mkdir(parents=True)
    (root / "inductor" / "good.so").write_bytes(b"whole")
    monkeypatch.setattr(shared_layer, "BACKEND", trip_over(root, "good.so", "."))
    warm = assign_warm(write_small(tmp_path / "model"))
    monkeypatch.setattr(compilation.caches, "set_aside", set_aside_and_make(root / "inductor"))

    compiled, _ = run(warm, CompilePolicy("layer"), root)

    assert "raised: RuntimeError: .: invalid ELF header" in str(compiled.fallback)
    assert is_eager(warm)
    assert (root / "inductor" / "good.so").read_bytes() == b"whole"
    assert read_records(root) == ()


def set_aside_and_make(folder: Path) -> Any:
    """Return the real `set_aside`, after which the compile stack makes its folder anew."""
    real = compilation.caches.set_aside

    def set_aside(root: Path, folders: Any) -> tuple[str, ...]:
        moved = real(root, folders)
        folder.mkdir()
        return moved

    return set_aside


def test_wrong_compiled_output_is_not_used_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_compiler: None
) -> None:
    """The model is eager again, and the reason has the numbers."""
    warm = assign_warm(checkpoints.write_llama(tmp_path / "model", num_hidden_layers=1))
    monkeypatch.setattr(Past, "update", lambda self, keys, values, *rest, **options: (keys * 2, values * 2))

    compiled, measure = run(warm, CompilePolicy("layer"), tmp_path / "cache")

    assert not compiled.used
    assert "differs from eager by" in str(measure.reason)
    assert is_eager(warm)
    assert read_records(tmp_path / "cache") == ()


def test_an_aborted_warm_up_leaves_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_compiler: None
) -> None:
    """A run that is cancelled after some shapes has not warmed them all."""
    warm = assign_warm(write_small(tmp_path / "model"))
    calls: list[int] = []

    def progress(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_kernels(warm, REQUEST, CompilePolicy("layer"), tmp_path / "cache", Measure(0), progress)

    assert read_records(tmp_path / "cache") == ()


def test_a_warm_up_that_can_not_be_recorded_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_compiler: None
) -> None:
    """What is compiled is right; that it is not kept is said."""
    warm = assign_warm(write_small(tmp_path / "model"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "records").touch()

    compiled, measure = run(warm, CompilePolicy("layer"), tmp_path / "cache")

    assert compiled.used
    assert "; not recorded: FileExistsError: " in str(measure.reason)


def test_a_compile_that_fails_leaves_the_model_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, no headers, a broken cache: the run goes on and says why it is eager."""

    def raise_error(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no C++ compiler here\nwith a second line")

    warm = assign_warm(checkpoints.write_llama(tmp_path / "model"))
    fake_compile(monkeypatch, raise_error)

    compiled, measure = run(warm, CompilePolicy("model"), tmp_path / "cache")

    assert compiled.fallback == "eager: compile failed: RuntimeError: no C++ compiler here"
    assert warm.model._compiled_call_impl is None
    assert measure.extra["compiled"] is False


def test_an_unusable_cache_directory_is_named(tmp_path: Path) -> None:
    """Nothing is compiled into a place where it can't be kept."""
    blocked = tmp_path / "file"
    blocked.touch()
    warm = assign_warm(checkpoints.write_llama(tmp_path / "model"))

    compiled, _ = run(warm, CompilePolicy("layer", str(blocked)), tmp_path / "cache")

    assert str(compiled.fallback).startswith(f"eager: cache directory unusable: {blocked}: ")
    assert str(compiled.fallback).endswith("; compile.cache_directory names another")


def test_the_repeated_layer_is_the_largest_list_of_like_modules(tmp_path: Path) -> None:
    """The decoder's layers, not the experts inside one of them."""
    warm = assign_warm(checkpoints.write_mixtral(tmp_path))

    assert compilation.find_repeated_layer(warm.model) == tuple(warm.model.model.layers)
    assert compilation.find_repeated_layer(torch.nn.Linear(2, 2)) == ()


def test_a_difference_is_relative_and_nan_is_never_near() -> None:
    """NaN compares false with everything, so it is caught on its own."""
    one = torch.tensor([1.0, -4.0])

    assert largest_difference(one, torch.tensor([1.0, -4.2])) == pytest.approx(0.05)
    assert largest_difference(one, torch.tensor([1.0, float("nan")])) == float("inf")
    assert largest_difference(torch.tensor([1.0, float("nan")]), one) == float("inf")
    assert largest_difference(one, torch.zeros(3)) == float("inf")
