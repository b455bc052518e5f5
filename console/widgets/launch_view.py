"""What the launch screen shows of recipes, nodes and outcomes. Pure."""

from __future__ import annotations

from console.format import duration_text, short_uid
from console.state import NodeState
from console.widgets.node_view import Status, node_status
from console.widgets.paint import Line, Moment, Piece
from remote_agent.protocol.messages import Recipe, Tier
from remote_agent.recipe import recipe_hash


def recipe_lines(recipe: Recipe) -> list[Line]:
    """Return everything about a recipe that changes what a warm-up does."""
    request = recipe.request
    facts = [
        ("model", recipe.model.path + (f" at {recipe.model.revision}" if recipe.model.revision else "")),
        ("adapter", recipe.model.adapter),
        ("dtype", recipe.dtype),
        ("devices", " ".join(recipe.devices)),
        ("target", recipe.target_tier),
        ("weights", f"path {recipe.weights.path}, page cache {recipe.weights.page_cache}"),
        ("compile", recipe.compile.mode),
        (
            "request",
            f"{request.kind}, {request.prompt!r}"
            if request.prompt
            else f"{request.kind}, {request.prompt_tokens} tokens",
        ),
        ("deadlines", ", ".join(f"{stage} {limit_s:g} s" for stage, limit_s in recipe.deadlines.items())),
        (
            "hold",
            (f"{recipe.hold.ttl_s:g} s" if recipe.hold.ttl_s else "until released")
            + (", pages locked" if recipe.hold.lock else ""),
        ),
        ("serve", f"{recipe.serve.entry} on {recipe.serve.address}" if recipe.serve is not None else ""),
        ("code", "the checkpoint's own code is trusted" if recipe.trust_remote_code else ""),
        ("hash", recipe_hash(recipe)),
    ]
    return [((f"{name:<10}", "muted"), (text, "text")) for name, text in facts if text]


def node_choice(state: NodeState, recipe: Recipe | None) -> Line:
    """Return a node as a line to choose: how it is, and what a start of the recipe took there."""
    status = node_status(state)
    pieces: list[Piece] = [(state.name, "title"), ("  ", "text"), status.piece]
    if not state.is_known and state.link.reason:
        pieces.append((f"  {state.link.reason}", "unknown"))
    if recipe is None:
        return tuple(pieces)
    wanted = recipe_hash(recipe)
    warm = [
        one
        for one in state.residents or ()
        if one.recipe == recipe.name or (one.model == recipe.model.path and one.tier in (Tier.CACHED, Tier.HOST))
    ]
    if warm:
        pieces.append((f"  {warm[0].tier.value} already", "ready"))
    if state.recipes and recipe.name not in state.recipes:
        pieces.append(("  not among this node's recipes", "warning"))
    medians = {
        tier: known.wall_ns
        for (digest, tier, armed), known in state.baselines.items()
        if digest == wanted and not armed
    }
    if medians:
        words = ", ".join(f"{tier.value} {duration_text(wall_ns)}" for tier, wall_ns in medians.items())
        pieces.append((f"  median {words}", "muted"))
    return tuple(pieces)


def outcome_line(node: str, run_uid: str, error: str | None, state: NodeState | None, moment: Moment) -> Line:
    """Return what became of one start: asked, waiting, accepted, or why not."""
    name: Piece = (f"{node}  ", "title")
    if error is not None:
        return ("✖ ", "failed"), name, (error, "failed")
    run = state.runs.get(run_uid) if state is not None else None
    if run is None:
        return ("◌ ", "unknown"), name, ("asking", "muted")
    if not run.is_accepted:
        what = f"a place among {run.waits_among}" if run.waits_among else "its node's answer"
        return ("○ ", "waiting"), name, (f"waiting for {what}", "muted")
    status = {"ready": Status.READY, "failed": Status.FAILED}.get(run.state.value, Status.WARMING)
    return (f"{status.glyph} ", status.role), name, (f"run {short_uid(run_uid)} {run.state.value}", "text")
