"""The fleet's filter: ``eu tag:prod state:failed recipe:llama -state:cold``. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from console.state import NodeState
from console.widgets.node_view import node_status

KEYS = ("name", "tag", "state", "recipe")


class FilterError(ValueError):
    """A filter that can't be understood; the text says which word."""


@dataclass(frozen=True)
class Term:
    key: str
    value: str
    negated: bool = False


@dataclass(frozen=True)
class NodeFilter:
    """All terms must hold. The empty filter lets everything through."""

    text: str = ""
    terms: tuple[Term, ...] = ()

    def matches(self, state: NodeState) -> bool:
        return all(_TESTS[term.key](state, term.value) is not term.negated for term in self.terms)


def parse_filter(text: str) -> NodeFilter:
    """Return the filter that ``text`` means. Raises: FilterError if it names a key that there is not."""
    return NodeFilter(text.strip(), tuple(_term(word) for word in text.split()))


def _term(word: str) -> Term:
    negated = word.startswith("-") and len(word) > 1
    key, colon, value = word.removeprefix("-").partition(":") if negated else word.partition(":")
    if not colon:
        return Term("name", key.casefold(), negated)
    if key.casefold() not in KEYS:
        raise FilterError(f"{key}: is not a key; keys are {', '.join(f'{known}:' for known in KEYS)}")
    return Term(key.casefold(), value.casefold(), negated)


def _name(state: NodeState, value: str) -> bool:
    return value in state.name.casefold()


def _tag(state: NodeState, value: str) -> bool:
    return any(tag.casefold().startswith(value) for tag in state.tags)


def _state(state: NodeState, value: str) -> bool:
    return node_status(state).word.startswith(value)


def _recipe(state: NodeState, value: str) -> bool:
    named = {*state.recipes, *(resident.recipe for resident in state.residents or ())}
    if state.run is not None:
        named.add(state.run.recipe)
    return any(value in recipe.casefold() for recipe in named)


_TESTS: dict[str, Callable[[NodeState, str], bool]] = {
    "name": _name,
    "tag": _tag,
    "state": _state,
    "recipe": _recipe,
}
