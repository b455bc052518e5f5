"""``glowplug cache``"""

from __future__ import annotations

import time

import click

from console.clean import clean
from console.cli.common import Context, confirm, emit, json_option, run_async, yes_option
from console.config import Config
from console.errors import UsageError
from console.format import counted, size_text
from remote_agent.protocol.codec import encode
from remote_agent.protocol.messages import CacheClearParams, CacheClearResult, CacheEntry, CacheListResult

SHOWN = ("torch", "gpu", "dtype", "shapes")
"""Parts of a key that a line has room for; --json has all."""

AGE_LIMIT_DAYS = 100_000

directory_option = click.option("--directory", help="The cache's directory on the host; by default the agent's own.")


@click.group("cache")
def command() -> None:
    """See what compile caches keep on a node, and clear them."""


@command.command("list")
@click.argument("node")
@directory_option
@json_option
@click.pass_obj
def list_keys(context: Context, node: str, directory: str | None, as_json: bool) -> int:
    """List the warm-ups whose compiled code NODE keeps, the last used first.

    Exit codes: 0 listed, 1 the node refuses, 3 it is out of reach.
    """
    config = context.load_config()
    name = config.node(node).name
    context.start_log()
    found = run_async(_list(context, config, name, directory))
    if as_json:
        emit({"node": name, **encode(found)})
        return 0
    for entry in found.entries:
        click.echo(clean(_line(entry), 1000))
    total = f"{counted(len(found.entries), 'key')}, {size_text(found.size_bytes)}"
    click.echo(clean(f"{name}: {found.directory}: {total}", 1000))
    return 0


@command.command("clear")
@click.argument("node")
@click.option("--key", "digest", help="The key whose digest begins so.")
@click.option("--all", "everything", is_flag=True, help="Everything that was compiled.")
@click.option("--older-than", "older_than_days", type=float, metavar="DAYS", help="What was not used for so long.")
@directory_option
@yes_option
@json_option
@click.pass_obj
def clear(
    context: Context,
    node: str,
    digest: str | None,
    everything: bool,
    older_than_days: float | None,
    directory: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Clear compiled code on NODE; the next run compiles it again. Refused while a run uses the cache.

    Exit codes: 0 cleared, 1 the node refuses, 3 it is out of reach, 4 not confirmed.
    """
    if older_than_days is not None and not 0 <= older_than_days <= AGE_LIMIT_DAYS:
        raise UsageError(f"--older-than: {older_than_days:g} is not within 0..{AGE_LIMIT_DAYS} days")
    older_than_s = None if older_than_days is None else older_than_days * 86400
    if [digest is not None, everything, older_than_s is not None].count(True) != 1:
        raise UsageError("name what to clear: one of --key DIGEST, --all and --older-than DAYS")
    try:
        params = CacheClearParams(digest, everything, older_than_s, directory)
    except ValueError as error:
        raise UsageError(str(error)) from error
    config = context.load_config()
    name = config.node(node).name
    context.start_log()
    confirm(f"Clear compiled code on {name}?", yes)
    result = run_async(_clear(context, config, name, params))
    if as_json:
        emit({"node": name, **encode(result)})
        return 0
    for entry in result.cleared:
        click.echo(clean(f"– {_line(entry)}", 1000))
    click.echo(f"{name}: {counted(len(result.cleared), 'key')} cleared, {size_text(result.freed_bytes)} freed")
    return 0


async def _list(context: Context, config: Config, node: str, directory: str | None) -> CacheListResult:
    async with context.fleet(config, [node]) as fleet:
        return await fleet.list_cache(node, directory)


async def _clear(context: Context, config: Config, node: str, params: CacheClearParams) -> CacheClearResult:
    async with context.fleet(config, [node]) as fleet:
        return await fleet.clear_cache(node, params)


def _line(entry: CacheEntry) -> str:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_unix_s))
    parts = "  ".join(f"{name} {entry.key[name]}" for name in SHOWN if name in entry.key)
    gone = f"  {counted(entry.missing, 'file')} gone" if entry.missing else ""
    return f"{entry.digest[:12]}  {entry.model:<20} {size_text(entry.size_bytes):>9}  used {used}  {parts}{gone}"
