"""``cache list`` and ``cache clear``: what compile caches keep on this host. Needs no agent."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from remote_agent.cache_store import clear_cache, list_cache
from remote_agent.loader.problems import shown
from remote_agent.protocol.messages import CacheClearParams, CacheEntry
from remote_agent.verbs._common import guarded, make_parser, path_argument, print_json, state_of

AGE_LIMIT_DAYS = 100_000


def main(argv: list[str]) -> int:
    """Return 0, or 1 where it is refused: a run uses the cache, or there is no such key."""
    parser = make_parser("cache", "What compile caches keep, by key; and clear them.")
    parser.add_argument("what", choices=("list", "clear"))
    parser.add_argument("--directory", type=path_argument, help="the cache's directory (default: the agent's own)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--key", metavar="DIGEST", help="clear the key whose digest begins so")
    chosen.add_argument("--all", action="store_true", help="clear everything")
    chosen.add_argument("--older-than", type=float, metavar="DAYS", help="clear what was not used for so long")
    arguments = parser.parse_args(argv)
    is_named = arguments.key is not None or arguments.all or arguments.older_than is not None
    if arguments.what == "list":
        if is_named:
            parser.error("list takes none of --key, --all and --older-than")
        return guarded(lambda: _list(arguments))
    if not is_named:
        parser.error("name what to clear: --key DIGEST, --all or --older-than DAYS")
    if arguments.older_than is not None and not 0 <= arguments.older_than <= AGE_LIMIT_DAYS:
        parser.error(f"--older-than: {arguments.older_than:g} is not within 0..{AGE_LIMIT_DAYS} days")
    older_than_s = None if arguments.older_than is None else arguments.older_than * 86400
    try:
        params = CacheClearParams(arguments.key, arguments.all, older_than_s)
    except ValueError as error:
        parser.error(str(error))
    return guarded(lambda: _clear(arguments, params))


def _root(arguments: argparse.Namespace) -> Path:
    directory: Path | None = arguments.directory
    return state_of(arguments).cache if directory is None else directory.absolute()


def _list(arguments: argparse.Namespace) -> int:
    found = list_cache(_root(arguments))
    if arguments.json:
        print_json(found)
        return 0
    for entry in found.entries:
        print(_line(entry))
    print(f"{found.directory}: {len(found.entries)} keys, {found.size_bytes / 1e6:.1f} MB")
    return 0


def _clear(arguments: argparse.Namespace, params: CacheClearParams) -> int:
    result = clear_cache(_root(arguments), params)
    if arguments.json:
        print_json(result)
        return 0
    for entry in result.cleared:
        print(f"cleared {_line(entry)}")
    print(f"{result.directory}: {len(result.cleared)} keys cleared, {result.freed_bytes / 1e6:.1f} MB freed")
    return 0


def _line(entry: CacheEntry) -> str:
    gone = f"  {entry.missing} files gone" if entry.missing else ""
    parts = "  ".join(f"{name} {entry.key[name]}" for name in ("torch", "gpu", "dtype", "shapes") if name in entry.key)
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_unix_s))
    line = f"{entry.digest[:12]}  {entry.model}  {entry.size_bytes / 1e6:.1f} MB  used {used}  {parts}{gone}"
    return shown(line, 400)
