"""The table of docs/performance.md is what the kept results say, each figure beside its ceiling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_report import MARKED, main, put_into_page, read_runs, render

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
MACHINE = {
    "taken": "2026-11-30T12:00:00Z",
    "cpu": "A processor",
    "cpus_usable": 16,
    "kernel": "6.18",
    "python": "3.12.3",
    "torch_cuda": "13.0",
    "packages": {"torch": "2.11.0", "instanttensor": None},
    "nvidia_smi": "NVIDIA H200, 580.1, 5, 16",
    "nvidia_smi_columns": "name,driver_version,pcie.link.gen.max,pcie.link.width.current",
    "cuda": "CUDA Version        : 13.0",
    "commit": "0123456789abcdef",
}


def run(**parts: Any) -> tuple[str, dict[str, Any]]:
    """Return a run named ``r`` of 10 GB that found these."""
    return "r", {
        "machine": MACHINE,
        "command": ["python", "-m", "bench", "gpu"],
        "model": {"size_bytes": 10_000_000_000, "shards": {"a": 1, "b": 2}},
        "parts": {
            name.replace("_", "-"): {"status": "done", "reason": None, "data": data} for name, data in parts.items()
        },
    }


def loads(part: str, loader: str, request: dict[str, str], *times: float, **more: object) -> list[dict[str, Any]]:
    """Return a checked load, which is far slower and counts for nothing, and counted ones, one a round."""
    common = {"loader": loader, "request": request, "label": loader, **more}
    check = {"part": "check", "round": 0, "seconds": 99.0, "differing": 0, **common}
    return [check, *({"part": part, "round": n, "seconds": time, **common} for n, time in enumerate(times))]


def row(text: str, what: str) -> list[str]:
    """Return the cells of the one line that begins with ``what``."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {what} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


SIZE = {"part": "machine", "size_bytes": 10_000_000_000}
PINNED = {"part": "warm", "label": "pinned H2D ceiling", "ceiling_bytes_s": 50e9}


def test_the_page_holds_what_its_kept_results_say() -> None:
    """The page names its runs, and its table is theirs to the letter: `gpu-report --page` writes it."""
    found = MARKED.search(PAGE.read_text(encoding="utf-8"))

    assert found is not None
    assert found["text"] == render(read_runs([ROOT / name for name in found["runs"].split()]))


def test_a_load_from_memory_is_judged_by_its_share_of_the_ceiling() -> None:
    """0.22 s for 10 GB is 0.91 of 50 GB/s, and 0.30 s is not enough; the first, checked load does not count."""
    warm = [
        SIZE,
        PINNED,
        *loads("warm", "glowplug", {"path": "auto"}, 0.21, 0.22, 0.23, 0.22, 0.25, threads=6),
        *loads("warm", "glowplug", {"path": "staged"}, 0.3, 0.3, 0.3, 0.3, 0.3),
    ]

    text = render([run(warm=warm)])

    reached = ["0.220 s (0.210–0.250, n = 5)", "50.0 GB/s pinned", "0.91 6 threads", "yes"]
    assert row(text, "page cache → GPU, ≤ 6 threads")[1:] == reached
    assert row(text, "page cache → GPU, `staged` alone")[-2:] == ["0.67", "no"]


def test_more_threads_than_allowed_do_not_reach_it() -> None:
    """The figure is one of six threads: with seven the time alone is not enough."""
    warm = [SIZE, PINNED, *loads("warm", "glowplug", {"path": "auto"}, *[0.21] * 5, threads=7)]

    assert row(render([run(warm=warm)]), "page cache → GPU, ≤ 6 threads")[-2:] == ["0.95 7 threads", "no"]


def test_bytes_that_differ_reach_nothing() -> None:
    """However quick they came: the number of tensors that are wrong stands in the row."""
    warm = [SIZE, PINNED, *loads("warm", "glowplug", {"path": "auto"}, *[0.21] * 5, differing=3)]

    cells = row(render([run(warm=warm)]), "page cache → GPU, ≤ 6 threads")

    assert cells[-2:] == ["0.95 **3 tensors differ**", "no"]


def test_a_cold_load_is_judged_by_the_quicker_raw_read_of_its_own_round() -> None:
    """A disk that is twice as slow in one round is so for both: each pair has its ratio, the median counts."""
    raw = [{"part": "cold-peers", "loader": "raw", "round": n, "seconds": s} for n in range(3) for s in (8.0 + n, 20.0)]
    ours = loads("cold-peers", "glowplug", {"page_cache": "keep"}, 8.0, 10.0, 20.0)

    cells = row(render([run(cold_peers=[SIZE, *raw, *ours])]), "disk, cache dropped, `page_cache=keep`")

    assert cells[1:4] == ["10.000 s (8.000–20.000, n = 3)", "9.00 s raw read", "0.90 (0.50–1.00, n = 3)"]
    assert cells[4] == "no, but n = 3"


@pytest.mark.parametrize(("theirs", "verdict"), [((7.0,) * 4 + (9.0,), "no"), ((7.0,) * 3 + (8.1,) * 2, "yes")])
def test_behind_a_peer_is_who_is_slower_in_most_rounds(theirs: tuple[float, ...], verdict: str) -> None:
    """Four of five are no chance, whatever the fifth says; three of five are within the spread."""
    records = [
        SIZE,
        *loads("cold-peers", "glowplug", {"page_cache": "bypass"}, *[8.0] * 5),
        *loads("cold-peers", "instanttensor", {}, *theirs),
    ]

    cells = row(render([run(cold_peers=records)]), "the same, `page_cache=bypass`, beside every peer")

    assert cells[2] == "instanttensor"
    assert cells[-1] == verdict


def test_what_was_not_run_is_not_measured() -> None:
    """Every figure has its line whatever was run."""
    text = render([])

    assert text.count("| not measured |") == 12
    assert "`host` tier → GPU" in text


def test_figures_of_a_pipeline_a_compile_and_a_standby_are_medians_below_a_limit() -> None:
    """A zero is a figure; a run from another tier and a value that is missing are none."""
    pipeline = {
        "runs": [
            *({"label": "cached", "record": {"first_output_ns": ns}} for ns in [800_000_000] * 5),
            {"label": "cached", "record": {"first_output_ns": None}},
            {"label": "standby", "record": {"first_output_ns": 5}},
        ],
        "attach": {"rounds": [{"seconds": 0.004}] * 5},
        "daemon": [{"agentd_mib": 0}, {"agentd_mib": None}],
    }
    compiled = {"starts": {"kept": [{"compile_ns": 1_500_000_000}, {"error": "died"}]}}
    standby = {"processes": {"off": answers(7.5)}, "verified": {"off": True}}

    text = render([run(pipeline=pipeline, compile=compiled, standby=standby)])

    first = "request → first token, agent up, page cache warm, eager"
    assert row(text, first) == ["≤ 0.9 s", "0.800 s (0.800–0.800, n = 5)", "", "", "yes"]
    assert row(text, "attach alone")[1] == "4.00 ms (4.00–4.00, n = 5)"
    answer = row(text, "attach to a standby → first token, 128 tokens in")
    assert (answer[1], answer[-1]) == ("7.50 ms (7.50–7.50, n = 5)", "yes")
    assert row(text, "compile, caches kept, zygote up")[-1] == "no, but n = 1"
    assert row(text, "GPU memory of agentd's own process") == ["0", "0 MiB (0–0, n = 1)", "", "", "yes, but n = 1"]


def answers(first_token_ms: float) -> dict[str, Any]:
    """Return what a process armed once found; its first answer counts for nothing."""
    return {"first": {"first_token_ms": 90.0}, "rounds": [{"first_token_ms": first_token_ms}] * 5}


@pytest.mark.parametrize(
    ("compiled_is_right", "figure", "note", "verdict"),
    [
        (True, "6.50", "compiled layers; eager layers 9.00 ms (9.00–9.00, n = 5); in runs of the agent 7.00 ms", "yes"),
        (False, "9.00", "eager layers; compiled layers 6.50 ms (6.50–6.50, n = 5), **tokens differ**", "no"),
    ],
)
def test_a_standby_s_figure_is_that_of_the_quickest_graph_that_is_right(
    compiled_is_right: bool, figure: str, note: str, verdict: str
) -> None:
    """The note says which one that is, what the other took, and whole runs of the agent with the same."""
    runs = [{"mode": "layer", "attach_to_first_output_ms": 7.0}, {"mode": "off"}]
    verified = {"off": True, "layer": compiled_is_right}
    standby = {"processes": {"off": answers(9.0), "layer": answers(6.5)}, "verified": verified, "runs": runs}
    cells = row(render([run(standby=standby)]), "attach to a standby → first token, 128 tokens in")

    assert cells[1].startswith(f"{figure} ms")
    assert cells[3].startswith(note)
    assert cells[-1] == verdict


def test_a_standby_whose_graphs_are_all_wrong_reaches_nothing() -> None:
    """However quick it was."""
    standby = {"processes": {"off": answers(1.0), "layer": None}, "verified": {"off": False}}
    cells = row(render([run(standby=standby)]), "attach to a standby → first token, 128 tokens in")

    assert (cells[3], cells[-1]) == ("**eager layers, tokens differ**", "no")


def test_peers_stand_beside_each_other_with_what_kept_one_away() -> None:
    """Times warm and cold, whether bytes were equal, and for what is not installed that it is not."""
    warm = [
        SIZE,
        {"part": "absent", "label": "instanttensor", "error": "ModuleNotFoundError: No module named 'instanttensor'"},
        {"part": "absent", "label": "transformers", "error": "exited with -9: no word"},
        *loads("peers", "glowplug", {}, 0.25),
        *loads("peers", "safetensors", {}, 2.5, differing=1),
        {"part": "peers", "loader": "fastsafetensors", "round": 0, "seconds": 9.0},
    ]

    text = render([run(peers=warm)])

    assert row(text, "Glowplug") == ["0.250 s (0.250–0.250, n = 1)", "", "equal"]
    assert row(text, "safetensors")[-1] == "**1 tensors differ**"
    assert row(text, "fastsafetensors")[-1] == "not compared"
    assert row(text, "instanttensor")[0] == "not installed"
    assert row(text, "transformers")[0] == "exited with -9: no word"


def test_a_part_of_several_runs_is_the_last_one_whole_and_misfits_are_told() -> None:
    """Figures of two machines are never mixed, and each run says what it was on and what is missing from it."""
    first = run(warm=[SIZE, PINNED, *loads("warm", "glowplug", {"path": "auto"}, *[0.5] * 9)])
    second = run(warm=[SIZE, PINNED, *loads("warm", "glowplug", {"path": "auto"}, *[0.2] * 5)])
    second[1]["parts"]["compile"] = {"status": "skipped", "reason": "it needs 90 s and 3 s are left"}

    text = render([first, second])

    assert row(text, "page cache → GPU, ≤ 6 threads")[1] == "0.200 s (0.200–0.200, n = 5)"
    assert "- compile: skipped: it needs 90 s and 3 s are left" in text
    assert text.count("NVIDIA H200, driver 580.1, CUDA 13.0, PCIe 5 ×16, A processor, 16 processors, kernel 6.18") == 2
    assert "torch's CUDA 13.0, torch 2.11.0, commit 0123456789ab. 10.00 GB in 2 files." in text


@pytest.mark.parametrize(("status", "seconds"), [("done", "0.200"), ("late", "0.500"), ("failed", "0.500")])
def test_a_part_that_was_not_ended_goes_before_no_whole_one(status: str, seconds: str) -> None:
    """What came of it in time is no figure while another run has one; alone it is shown, with what became of it."""
    whole = run(warm=[SIZE, PINNED, *loads("warm", "glowplug", {"path": "auto"}, *[0.5] * 9)])
    later = run(warm=[SIZE, PINNED, *loads("warm", "glowplug", {"path": "auto"}, 0.2)])
    later[1]["parts"]["warm"].update(status=status)

    assert row(render([whole, later]), "page cache → GPU, ≤ 6 threads")[1].startswith(f"{seconds} s")
    assert row(render([later]), "page cache → GPU, ≤ 6 threads")[1].startswith("0.200 s")


def test_a_page_is_written_between_its_markers_alone() -> None:
    """What stands around them stays; a page without them is refused."""
    page = "before\n<!-- gpu-report: old -->\n| old |\n<!-- /gpu-report -->\nafter\n"

    written = put_into_page(page, ["a", "b"], "| new |\n")

    assert written == "before\n<!-- gpu-report: a b -->\n| new |\n<!-- /gpu-report -->\nafter\n"
    with pytest.raises(ValueError, match="0 pairs of markers"):
        put_into_page("nothing", ["a"], "| new |\n")


def test_the_command_prints_what_the_kept_results_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without results is a usage error that names it."""
    (tmp_path / "results.json").write_text(json.dumps(run()[1]), encoding="utf-8")

    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == render(read_runs([tmp_path]))
    assert main([str(tmp_path / "none")]) == 2
    assert f"{tmp_path}/none/results.json" in capsys.readouterr().err
