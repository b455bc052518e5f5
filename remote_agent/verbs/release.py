"""``release``: lets warm models go, or the driver."""

from __future__ import annotations

import argparse

from remote_agent.client import connect_running, open_client
from remote_agent.protocol.messages import RELEASE_WAIT_MOST_S, ReleaseParams, ReleaseResult
from remote_agent.verbs._common import guarded, make_parser, print_json, state_of


def main(argv: list[str]) -> int:
    """Return 0 when what was named is gone, 1 if it is not, 2 when nothing was named."""
    parser = make_parser(
        "release",
        "Let go of warm models, or of the driver's devices. Exit codes: 0 all of it is gone, 1 refused (attached or in "
        "use) or still held, 2 nothing was named.",
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--run", metavar="UID", help="what this run holds")
    chosen.add_argument("--all", action="store_true", help="everything that is held")
    parser.add_argument("--driver", action="store_true", help="the device files that keep the driver loaded")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="for those attached to go")
    parser.add_argument("--force", action="store_true", help="also what other processes have attached")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.wait <= RELEASE_WAIT_MOST_S:
        parser.error(f"--wait: {arguments.wait:g} is not within 0..{RELEASE_WAIT_MOST_S:g} seconds")
    if not arguments.run and not arguments.all and not arguments.driver:
        parser.error("name what to release: --run UID, --all or --driver")
    return guarded(lambda: _release(arguments))


def _release(arguments: argparse.Namespace) -> int:
    params = ReleaseParams(arguments.run, arguments.all, arguments.driver, arguments.force, arguments.wait)
    with open_client(state_of(arguments), "release", connect_running) as client:
        result = client.call("resident.release", params, ReleaseResult)
    if arguments.json:
        print_json(result)
    else:
        for resident in result.released:
            print(f"released {resident.recipe} on {resident.device} ({resident.bytes / 1e9:.2f} GB)")
        if not result.released and not arguments.driver:
            print("nothing was held")
        if arguments.driver:
            print("the driver is released" if result.driver_released else "the driver is still held")
    return 0 if result.driver_released or not arguments.driver else 1
