"""``glowplug verify``"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator

import click

from console.clean import clean_record
from console.cli.common import Context, json_option, run_async
from console.cli.nodes import Answer, ask, show
from console.cli.seconds import Seconds
from console.errors import UsageError
from console.fleet import Fleet
from console.format import duration_text
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import VERIFY_COUNT_MOST, VERIFY_MOST_S, VerifyResult, VerifySample

WAYS = {"port": "through its port", "standby": "in its standby", "attached": "in a process attached to it"}


@click.command("verify")
@click.argument("node", nargs=-1, required=True)
@click.option("--recipe", help="What to ask, by the recipe that made it warm.")
@click.option("--model", help="What to ask, by the model's path on the host, or a recipe's name there.")
@click.option(
    "--count", type=click.IntRange(1, VERIFY_COUNT_MOST), default=1, show_default=True, help="Requests to each node."
)
@click.option(
    "--interval",
    "interval_s",
    type=Seconds(VERIFY_MOST_S),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between the starts of two requests.",
)
@json_option
@click.pass_obj
def command(
    context: Context,
    node: tuple[str, ...],
    recipe: str | None,
    model: str | None,
    count: int,
    interval_s: float,
    as_json: bool,
) -> int:
    """Send real requests to what is ready of a model on each NODE, and show what came back and when.

    Through the port where a server serves it, else to the standby that holds it, else in a process that attaches to
    what is resident and ends afterwards. A recipe that serves is ready only while its server is there. Nothing is made
    warm for that.

    Exit codes: 0 every request was answered, 1 one was not or the model is not ready, 3 a node out of reach.
    """
    if (recipe is None) == (model is None):
        raise UsageError("name what to ask: give either --recipe or --model")
    config = context.load_config()
    wanted = config.recipe(recipe) if recipe is not None else None
    names = [one.name for one in config.select(node)]
    context.start_log()

    def question(answering: Fleet, name: str) -> Awaitable[VerifyResult]:
        return answering.verify(name, recipe or model or "", count, interval_s, wanted)

    answers = run_async(ask(context, config, names, question))
    code = show(answers, as_json, _document, _lines)
    failed = any(sample.error is not None for answer in answers if answer.value for sample in answer.value.samples)
    return code or int(failed)


def _document(answer: Answer[VerifyResult]) -> dict[str, object]:
    found = clean_record(answer.value) if answer.value is not None else None
    empty: dict[str, object] = {"samples": [], "tier": None, "run_uid": None, "way": None}
    return encode(found) if found is not None else empty


def _lines(answer: Answer[VerifyResult]) -> Iterator[str]:
    found = answer.value
    if found is None:
        yield f"? {answer.node:<14} {answer.error}"
        return
    for sample in found.samples:
        yield f"{_glyph(sample)} {answer.node:<14} {_words(sample)}"
    answered = sum(sample.error is None for sample in found.samples)
    yield f"  {answer.node:<14} {answered} of {len(found.samples)} answered {WAYS[found.way]}, tier {found.tier.value}"


def _glyph(sample: VerifySample) -> str:
    return "✔" if sample.error is None else "✖"


def _words(sample: VerifySample) -> str:
    if sample.error is not None:
        return sample.error
    first = duration_text(sample.first_output_ns) if sample.first_output_ns is not None else "–"
    total = duration_text(sample.total_ns) if sample.total_ns is not None else "–"
    return f"first output {first:>9}  whole {total:>9}  {sample.output}"
