"""Renders what GPU runs found as the tables of docs/performance.md: ``python -m bench gpu-report OUT [OUT …]``.

A part that several runs have is taken whole, so that a figure never mixes machines: from the last of them that was done
with it, or from the last one where none was. ``--page FILE`` writes the tables into a page, between
``<!-- gpu-report: OUT … -->``, which names the runs by paths from the repository, and ``<!-- /gpu-report -->``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_rows import ENOUGH, ROWS, Measured, Records, Row, is_of, loaders, seconds, spread

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"<!-- gpu-report: (?P<runs>[^\n]*?) -->\n(?P<text>.*?)<!-- /gpu-report -->", re.DOTALL)
COLUMNS = ("what", "to reach", "measured: median (spread, n)", "ceiling in the same run", "ratio", "reached?")
DIGITS = {"s": 3, "ms": 2, "MiB": 0}

Run = tuple[str, Mapping[str, Any]]
"""A run's name and its ``results.json``."""


def main(argv: list[str]) -> int:
    """Print the tables, or put them into a page; return 2 for a folder without results or a page without markers."""
    parser = argparse.ArgumentParser(prog="python -m bench gpu-report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="OUT", help="folders that bench-gpu wrote")
    parser.add_argument("--page", type=Path, help="a page with the markers")
    arguments = parser.parse_args(argv)
    try:
        text = render(read_runs(arguments.runs))
        if arguments.page is None:
            print(text, end="")
        else:
            names = [folder.resolve().relative_to(ROOT).as_posix() for folder in arguments.runs]
            page = arguments.page.read_text(encoding="utf-8")
            arguments.page.write_text(put_into_page(page, names, text), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"gpu-report: {error}", file=sys.stderr)
        return 2
    return 0


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return each folder's results. Raises: OSError, ValueError"""
    return [(folder.name, json.loads((folder / "results.json").read_text(encoding="utf-8"))) for folder in folders]


def put_into_page(page: str, names: Sequence[str], text: str) -> str:
    """Return the page with the tables of the named runs. Raises: ValueError where it has no markers"""
    marked = f"<!-- gpu-report: {' '.join(names)} -->\n{text}<!-- /gpu-report -->"
    replaced, count = MARKED.subn(lambda _: marked, page)
    if count != 1:
        raise ValueError(f"the page has {count} pairs of markers <!-- gpu-report: … --> instead of one")
    return replaced


def render(runs: Sequence[Run]) -> str:
    """Return the tables and what they depend on, as markdown."""
    found = [(name, one) for _, document in runs for name, one in document["parts"].items() if one.get("data")]
    found.sort(key=lambda pair: pair[1]["status"] == "done")
    parts = {name: one["data"] for name, one in found}
    lines = table(COLUMNS, [row_cells(row, parts) for row in ROWS])
    peers = peer_rows(parts)
    if peers:
        lines += ["", *table(("loader", "page cache warm", "page cache dropped", "bytes"), peers)]
    lines += ceiling_lines(parts.get("ceilings"))
    own = parts.get("pipeline", {}).get("transformers")
    if own:
        times = [f"{own[name]:.1f}" for name in ("import_s", "from_pretrained_to_device_s", "first_forward_s")]
        lines += ["", f"transformers in a fresh process, page cache warm: {times[0]} s of imports, {times[1]} s of"
                  f" `from_pretrained` to the device, {times[2]} s for the first forward."]  # fmt: skip
    lines += ["", *(line for run in runs for line in describe_run(*run))]
    return "\n".join(lines) + "\n"


def ceiling_lines(found: Mapping[str, Any] | None) -> list[str]:
    """Return what the host gave to readers that do nothing else."""
    if found is None:
        return []
    disk, registration = found["disk"], found.get("registration", {})
    rates = {
        "pinned copies": [found["pinned"]["ceiling_bytes_s"]] if "pinned" in found else [],
        "registration": registration.get("register_bytes_s", []),
        "giving back": registration.get("unregister_bytes_s", []),
        "disk, O_DIRECT": [found["bytes"] / taken for taken in disk["direct_s"]],
        "disk, buffered": [found["bytes"] / taken for taken in disk["buffered_s"]],
    }
    words = [f"{what} {spread([rate / 1e9 for rate in all_of], '', 1)}" for what, all_of in rates.items() if all_of]
    return ["", f"Alone, in GB/s: {'; '.join(words)}."]


def peer_rows(parts: Mapping[str, Any]) -> list[list[str]]:
    """Return a line for each loader that was measured or looked for, Glowplug's first."""
    warm, cold = parts.get("peers", ()), parts.get("cold-peers", ())
    rows = []
    for name, asked, cold_asked in (
        ("Glowplug", {}, {"page_cache": "keep"}),
        ("Glowplug, `page_cache=bypass`", {"page_cache": "bypass"}, {"page_cache": "bypass"}),
    ):
        cells = [cell(warm, "glowplug", asked), cell(cold, "glowplug", cold_asked)]
        if any(cells):
            rows.append([name, *cells, equality([*warm, *cold], "glowplug")])
    for loader in dict.fromkeys([*loaders(warm), *loaders(cold)]):
        rows.append([loader, cell(warm, loader), cell(cold, loader), equality([*warm, *cold], loader)])
    absent = {one["label"]: one["error"] for one in (*warm, *cold) if one.get("part") == "absent"}
    rows += [
        [name, why_absent(error), "", ""] for name, error in absent.items() if name not in {row[0] for row in rows}
    ]
    return rows


def cell(records: Records, loader: str, request: Mapping[str, object] | None = None) -> str:
    """Return a loader's times, or what kept it from any."""
    times = seconds(records, loader, request)
    if times:
        return spread(times, "s", DIGITS["s"])
    errors = [one["error"] for one in records if is_of(one, loader, request) and one.get("error")]
    return str(errors[-1])[:120] if errors else ""


def equality(records: Records, loader: str) -> str:
    """Return how the loader's tensors compared with safetensors', byte by byte."""
    checks = [one["differing"] for one in records if one.get("loader") == loader and "differing" in one]
    if not checks:
        return "not compared"
    return f"**{max(checks)} tensors differ**" if any(checks) else "equal"


def why_absent(error: str) -> str:
    """Return why a loader could not start."""
    return "not installed" if error.startswith("ModuleNotFoundError") else error[:120]


def describe_run(name: str, document: Mapping[str, Any]) -> list[str]:
    """Return what the figures of a run depend on, and which parts of it are missing or misfits."""
    machine = document["machine"]
    lines = (machine.get("nvidia_smi") or "").splitlines()
    columns = machine.get("nvidia_smi_columns", "").split(",")
    gpu = dict(zip(columns, lines[0].split(", "), strict=False)) if lines else {}
    cuda = re.search(r"CUDA Version *: *(\S+)", machine.get("cuda") or "")
    words = [
        f"{len(lines)} × {gpu['name']}" if len(lines) > 1 else gpu.get("name", "no GPU"),
        f"driver {gpu['driver_version']}" if "driver_version" in gpu else "",
        f"CUDA {cuda[1]}" if cuda else "",
        f"PCIe {gpu['pcie.link.gen.max']} ×{gpu['pcie.link.width.current']}" if "pcie.link.gen.max" in gpu else "",
        f"{machine['cpu']}, {machine['cpus_usable']} processors",
        f"kernel {machine['kernel']}",
        f"Python {machine['python']}",
        f"torch's CUDA {machine['torch_cuda']}" if machine.get("torch_cuda") else "",
        *(f"{package} {number}" for package, number in machine["packages"].items() if number),
        f"commit {machine['commit'][:12]}" if machine.get("commit") else "",
    ]
    model = document["model"]
    size = f" {model['size_bytes'] / 1e9:.2f} GB in {len(model['shards'])} files." if model else ""
    text = (
        f"Run `{name}`, {machine['taken']}: {', '.join(filter(None, words))}.{size} `{' '.join(document['command'])}`"
    )
    misfits = [
        f"- {part}: {one['status']}: {one['reason']}"
        for part, one in document["parts"].items()
        if one["status"] != "done"
    ]
    return [text, *misfits, ""]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table's lines."""
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def row_cells(row: Row, parts: Mapping[str, Any]) -> list[str]:
    """Return what one figure came to."""
    measured = row.measure(parts)
    if measured is None:
        return [row.what, row.to_reach, "not measured", "", "", ""]
    figure = spread(measured.values, measured.unit, DIGITS[measured.unit])
    ratio = f"{measured.ratio} {measured.note}".strip()
    return [row.what, row.to_reach, figure, measured.ceiling, ratio, verdict(measured)]


def verdict(measured: Measured) -> str:
    """Return ``yes`` or ``no``, and where there are too few values for a median, how few."""
    word = "yes" if measured.is_reached else "no"
    return word if len(measured.values) >= ENOUGH else f"{word}, but n = {len(measured.values)}"
