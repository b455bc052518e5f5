"""Panels, rows and waterfalls: exact widths, and the words that an operator needs."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC

import pytest
from rich.cells import cell_len

from console.actions import ACTIONS
from console.state import NodeState
from console.widgets.glyphs import ASCII, UNICODE, Glyphs
from console.widgets.grid import Grid, panel_grid
from console.widgets.header import count_nodes, header_line
from console.widgets.node_filter import FilterError, parse_filter
from console.widgets.node_view import Status, next_tier, node_status
from console.widgets.paint import ROLES, Line, Moment, plain, width_of
from console.widgets.panel import PANEL_HEIGHT, Highlight, panel_lines
from console.widgets.row import row_line
from console.widgets.run_filter import parse_run_filter
from console.widgets.run_model import Before, before_of_rows, detail_of_rows, detail_of_view
from console.widgets.strip import stage_strip
from console.widgets.waterfall import waterfall_lines
from console.widgets.wrap import wrap, wrap_line
from remote_agent.protocol.messages import Resident, Tier
from tests.console.ui import scenes
from tests.console.ui.fake_fleet import run_row, stage_rows
from tests.console.ui.scenes import MS, NOW_MONO_NS, NOW_WALL_NS, S

KEYS = {action.id: action.keys.split(",")[0] for action in ACTIONS}
WIDTHS = (20, 38, 40, 57, 80, 120, 200)


def moment(glyphs: Glyphs = UNICODE) -> Moment:
    return Moment(NOW_MONO_NS, NOW_WALL_NS, glyphs, UTC, KEYS)


def text_of(state: NodeState, width: int = 60) -> str:
    return "\n".join(plain(line) for line in panel_lines(state, width, moment(), Highlight()))


@pytest.mark.parametrize("state", scenes.fleet(), ids=lambda state: state.name)
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_every_line_of_every_panel_and_row_fills_its_width(state: NodeState, glyphs: Glyphs) -> None:
    """Panels of one size can lie side by side, at any width; roles are those that themes know."""
    for width in WIDTHS:
        for highlight in (Highlight(), Highlight(selected=True, marked=True)):
            lines = panel_lines(state, width, moment(glyphs), highlight)
            lines.append(row_line(state, width, 10, moment(glyphs), highlight))

            assert len(lines) == PANEL_HEIGHT + 1
            assert {cell_len(plain(line)) for line in lines} == {width}
            assert {role for line in lines for _, role in line} <= set(ROLES)


@pytest.mark.parametrize("state", scenes.fleet(), ids=lambda state: state.name)
def test_ascii_mode_draws_ascii_alone(state: NodeState) -> None:
    """For terminals that can't do more."""
    lines = panel_lines(state, 60, moment(ASCII), Highlight(selected=True, marked=True))
    lines.append(row_line(state, 120, 10, moment(ASCII), Highlight(selected=True, marked=True)))

    assert all(plain(line).isascii() for line in lines)


def test_a_loading_node_tells_bytes_rate_ceiling_and_the_median() -> None:
    """Progress in bytes and GB/s against the ceiling, time against history."""
    text = text_of(scenes.loading("eu-02"))

    assert "● warming" in text
    assert "9.1/13.5 GB" in text
    assert "51.2 of 55.3 GB/s" in text
    assert "0.5 s of 1.1 s expected" in text
    assert "median of 20" in text


def test_a_failed_node_says_where_why_and_what_to_do() -> None:
    """The failure in a line or two, then the keys that help."""
    text = text_of(scenes.failed("eu-03"), 70)

    assert "✖ failed" in text
    assert "compile: no kernel image for sm_90: torch 2.1 is built for sm_80" in text
    assert "→ enter shows why, w tries again" in text


def test_a_node_whose_only_process_waits_for_weights_is_not_ready() -> None:
    """Armed is said beside the recipe with what it takes; no model is warm there."""
    entry = Resident("run-1", "chat", "/models/chat", "cpu", Tier.ARMED, 2 * 10**9, 42, "ada@laptop", 0)
    state = replace(scenes.cold("eu-01"), residents=(entry,))

    assert node_status(state) is Status.COLD
    assert "chat  armed 2.00 GB" in text_of(state, 100)
    assert node_status(replace(state, residents=(entry, replace(entry, tier=Tier.STANDBY)))) is Status.READY


def test_a_run_whose_process_waits_for_weights_was_not_released() -> None:
    """The panel says what it waits for while it is held, and that it was released once it is gone."""
    state = scenes.ready("eu-01")
    assert state.run is not None
    view = replace(state.run, tier_to=Tier.ARMED, output=None, first_output_ns=None)
    armed = replace(scenes.resident(view.run_uid), tier=Tier.ARMED)
    state = replace(state, runs={view.run_uid: view}, residents=(armed,))

    assert "last 1.08 s, armed: waits for weights" in text_of(state)
    assert "released" not in text_of(state)
    assert "last 1.08 s, since released" in text_of(replace(state, residents=()))
    assert "released" not in text_of(replace(state, residents=None))


def test_the_next_start_is_from_armed_only_where_weights_are_resident() -> None:
    """Whichever recipe left them; a standby is warmer, and without weights it is a cold start."""
    armed = Resident("run-1", "chat", "/models/chat", "cpu", Tier.ARMED, 2 * 10**9, 42, "ada@laptop", 0)
    kept = replace(armed, run_uid="run-2", recipe="kept", tier=Tier.RESIDENT, pid=None, name="chat-0011@cpu")
    state = replace(scenes.cold("eu-01"), residents=(armed,))

    assert next_tier(state, "chat", "/models/chat") is Tier.COLD
    assert next_tier(replace(state, residents=(armed, kept)), "chat", "/models/chat") is Tier.ARMED
    assert next_tier(replace(state, residents=(armed, kept)), "kept", "/models/chat") is Tier.RESIDENT
    assert (
        next_tier(replace(state, residents=(armed, replace(armed, tier=Tier.STANDBY))), "chat", "/models/chat")
        is Tier.STANDBY
    )


def test_a_lost_link_is_not_a_failed_run() -> None:
    """The run is unknown, with the link's reason and age."""
    state = scenes.silent("eu-06")
    text = text_of(state)

    assert node_status(state) is Status.SILENT
    assert "? unknown  run 7f3a12cd was in weights" in text
    assert "silent 34 s" in text
    assert "no heartbeat for 34 s" in text
    assert "failed" not in text


def test_a_node_out_of_reach_says_why_and_when_it_is_tried_again() -> None:
    """Never a bare 'loading'; what was warm there is told as a memory."""
    text = text_of(scenes.disconnected("eu-07"))

    assert "connection refused by 10.2.0.7 port 22" in text
    assert "retry in 12 s, r retries now" in text
    assert "? standby" in text


def test_a_link_that_no_retry_can_mend_says_so() -> None:
    """The key that tries again is named."""
    assert "no retry until r is pressed" in text_of(scenes.refused("eu-08"))


def test_eight_gpus_are_folded_into_one_line() -> None:
    """Count, sum of memory, how many are busy."""
    assert "H200 ×8" in text_of(scenes.eightfold("eu-10"))
    assert "3 busy" in text_of(scenes.eightfold("eu-10"))


def test_figures_that_a_driver_does_not_tell_are_left_out() -> None:
    """None is never shown as 0."""
    blind = replace(scenes.gpu(), memory_used_bytes=None, utilisation=None, temperature_c=None)
    text = text_of(scenes.node("eu", probe=scenes.probe(blind), host=None))

    assert "H200 ×1" in text
    assert "%" not in text.splitlines()[1]
    assert "°C" not in text.splitlines()[1]


def test_the_newest_sample_wins_over_the_probe() -> None:
    """By UUID, whatever the order."""
    state = scenes.node("eu", probe=scenes.probe(scenes.gpu(busy=1)), host=scenes.host(scenes.gpu(busy=77)))

    assert "77 %" in text_of(state)


def test_a_run_compared_with_itself_alone_is_not_compared() -> None:
    """The first run of a recipe has nothing before it."""
    state = scenes.ready("eu-01")
    view = state.run
    assert view is not None
    assert view.baseline is not None
    alone = replace(view, baseline=replace(view.baseline, count=1, wall_ns=view.wall_ns))

    text = text_of(replace(state, runs={view.run_uid: alone}))

    assert "no earlier run to compare with" in text
    assert "±0 %" not in text


def test_a_resident_s_tier_shows_how_many_are_attached() -> None:
    """An operator sees before a release that somebody uses it."""
    warm = replace(scenes.resident("run-1"), tier=Tier.RESIDENT, pid=None, attached=2)
    text = text_of(replace(scenes.ready("eu-01"), residents=(warm,)), 80)

    assert "llama-7b  resident 13.5 GB 2 attached" in text


def test_the_next_start_is_told_where_history_knows_it() -> None:
    """From the tier in which the model is held now."""
    state = scenes.ready("eu-01")
    tier = state.residents[0].tier if state.residents else None
    assert tier is not None
    baselines = {(scenes.HASH, tier, False): replace(scenes.BASELINE, wall_ns=37 * MS)}

    assert "next 37 ms" in text_of(replace(state, baselines=baselines))


@pytest.mark.parametrize("tier", [Tier.CACHED, Tier.HOST])
def test_the_next_start_counts_from_files_that_any_recipe_can_use(tier: Tier) -> None:
    """Another recipe's run holds the model's pages; a start of this one begins there. Another model's say nothing."""
    held = replace(scenes.resident("run-2", recipe="llama-files"), tier=tier)
    baselines = {
        (scenes.HASH, tier, False): replace(scenes.BASELINE, wall_ns=37 * MS),
        (scenes.HASH, Tier.COLD, False): replace(scenes.BASELINE, wall_ns=7 * S),
    }
    state = replace(scenes.ready("eu-01"), residents=(held,), baselines=baselines)

    assert "next 37 ms" in text_of(state, 80)
    assert f"llama-files  {tier.value} 13.5 GB" in text_of(state, 80)
    assert "next 7.00 s" in text_of(replace(state, residents=(replace(held, model="/models/other"),)), 80)


def test_what_a_run_left_in_the_page_cache_is_shown_as_that() -> None:
    """Nobody holds it, so nothing is ready and nothing was released; the next start counts from there."""
    state = scenes.ready("eu-01")
    view = replace(state.run, tier_to=Tier.CACHED, output=None, first_output_ns=None)  # type: ignore[type-var]
    baselines = {(scenes.HASH, Tier.CACHED, False): replace(scenes.BASELINE, wall_ns=900 * MS)}
    state = replace(state, residents=(), runs={view.run_uid: view}, baselines=baselines)
    text = text_of(state, 80)

    assert node_status(state) is Status.COLD
    assert "llama-7b  cached  next 0.90 s" in text
    assert "left in the page cache" in text
    assert "released" not in text


def test_the_header_counts_in_words_and_keeps_its_figures_when_narrow() -> None:
    """Words fall away before figures do."""
    counts = count_nodes(scenes.fleet())

    wide = plain(header_line("eu-prod", counts, (), 160, moment(), paused=False))
    narrow = plain(header_line("eu-prod", counts, (), 40, moment(), paused=True))

    for words in ("12 nodes", "✔ 2 ready", "● 3 warming", "○ 2 cold", "✖ 1 failed", "? 1 silent", "? 2 disconnected"):
        assert words in wide
    assert "✖ 1" in narrow
    assert "PAUSED" in narrow


def test_a_strip_gives_the_earlier_of_two_stages_that_overlap() -> None:
    """As attribution has it; preflight and init run together."""
    preflight, init = (stage for stage in scenes.stages() if stage.name in ("preflight", "init"))
    early = replace(preflight, start_ns=0, duration_ns=60)
    late = replace(init, start_ns=30, duration_ns=70)

    line = stage_strip((early, late), 100, 100, 10)

    assert plain(line) == "▏pre  ▏   "


def test_a_strip_dots_the_time_that_is_still_expected() -> None:
    """Nothing is drawn as done that is not."""
    line = stage_strip(scenes.stages("context"), 334 * MS, 1_000 * MS, 30)

    assert plain(line).count("·") == 20


def waterfall(run_uid: str = "7f3a12cd0001", *, slower: str | None = None, width: int = 120) -> list[Line]:
    detail = detail_of_rows(run_row(run_uid, "eu-01", 1), stage_rows(slower))
    before = before_of_rows(run_row("earlier00001", "eu-01", 900), stage_rows())
    return waterfall_lines(detail, before, None, width, moment(), details=False)


def test_a_waterfall_marks_the_stage_that_got_slower() -> None:
    """Against the same stage of the previous run; the others are left alone."""
    lines = {plain(line).split()[0]: plain(line) for line in waterfall(slower="weights")}

    assert "▲ +200 %" in lines["weights"]
    assert "46.4 of 55.3 GB/s" in lines["weights"]
    assert not any("▲" in line for name, line in lines.items() if name != "weights")


def test_a_waterfall_shows_what_no_stage_accounts_for() -> None:
    """The parts are seen to sum to the whole."""
    assert any(plain(line).startswith("unattributed") and "20 ms" in plain(line) for line in waterfall())


@pytest.mark.parametrize("width", [24, 40, 58, 80, 120, 200])
def test_a_waterfall_is_never_wider_than_its_view(width: int) -> None:
    """Columns without room are left out."""
    assert max(cell_len(plain(line)) for line in waterfall(width=width)) <= width


def test_a_running_waterfall_names_the_stages_to_come() -> None:
    """With the place and length that they had before."""
    view = scenes.loading("eu-02").run
    assert view is not None
    spans = {name: (start * MS, length * MS) for name, (start, length) in scenes.TIMES_MS.items()}
    before = Before("earlier", 1_100 * MS, spans)

    lines = waterfall_lines(detail_of_view("eu-02", view), before, 534 * MS, 120, moment(), details=False)
    first_request = next(plain(line) for line in lines if plain(line).startswith("first_request"))

    assert "▒" in first_request
    assert "9.1/13.5 GB at 51.2 of 55.3 GB/s" in next(plain(line) for line in lines if "weights" in plain(line))


def test_a_filter_knows_names_tags_states_recipes_and_their_opposites() -> None:
    """All words must hold."""
    states = scenes.fleet()

    def shown(text: str) -> set[str]:
        wanted = parse_filter(text)
        return {state.name for state in states if wanted.matches(state)}

    assert shown("state:failed") == {"gpu-eu-03"}
    assert shown("tag:lab") == {"lab-01"}
    assert shown("recipe:llama state:ready -name:10") == {"gpu-eu-01"}
    assert shown("EU-0 -state:ready -state:warm -state:cold -state:failed -state:dis -state:con") == {"gpu-eu-06"}
    assert len(shown("")) == len(states)
    with pytest.raises(FilterError, match="colour: is not a key"):
        parse_filter("colour:red")


def test_the_history_filter_becomes_a_question_to_the_history() -> None:
    """Ages count back from now; a state may be shortened as long as it is clear."""
    wanted = parse_run_filter("node:eu-01 recipe:llama-7b state:fail since:7d", NOW_WALL_NS, 50)

    assert (wanted.node, wanted.recipe, wanted.state) == ("eu-01", "llama-7b", "failed")
    assert wanted.since_ns == NOW_WALL_NS - 7 * 86_400 * S
    for wrong in ("since:yesterday", "state:r", "tier:cold"):
        with pytest.raises(FilterError):
            parse_run_filter(wrong, NOW_WALL_NS, 50)


def test_the_grid_finds_the_node_under_every_cell() -> None:
    """What is drawn at a place is what a click there means."""
    for count, width in ((1, 200), (3, 120), (12, 120), (7, 90), (2, 30)):
        grid = panel_grid(count, width, PANEL_HEIGHT)
        for index in range(count):
            region = grid.region(index)
            for x, y in (region.offset, (region.right - 1, region.bottom - 1)):
                assert grid.at(x, y) == index
        assert grid.at(0, grid.height) is None


def test_moving_up_and_down_keeps_the_column() -> None:
    """At the edges nothing moves; into a short last row it stops at the last node."""
    grid = Grid(count=8, width=120, columns=3, cell_height=8)

    assert [grid.step("down", index, 40) for index in (0, 4, 5, 6, 7)] == [3, 3, 2, 0, 0]
    assert [grid.step("up", index, 40) for index in (1, 4, 7)] == [0, -3, -3]
    assert grid.step("end", 2, 40) == 5
    assert grid.step("home", 5, 40) == -5


def test_long_lines_are_broken_at_blanks_and_the_rest_is_kept() -> None:
    """Nothing is lost before the caller crops."""
    assert wrap("connection refused by 10.2.0.7 port 22", 20, 3) == ["connection refused", "by 10.2.0.7 port 22"]
    assert wrap("x" * 30, 10, 2) == ["x" * 10, "x" * 20]
    assert wrap("", 10, 2) == []


def test_a_line_of_pieces_is_wrapped_with_its_roles_and_hangs_further_in() -> None:
    """Nothing of it is lost, no part is wider than asked, and where there is no room to hang none does."""
    line = (("  hook shift: ", "muted"), ("glowplug hook haproxy shift", "text"))
    parts = wrap_line(line, 24)

    assert [plain(part) for part in parts] == ["  hook shift:", "      glowplug hook", "      haproxy shift"]
    assert parts[1][1:] == (("glowplug hook", "text"),)
    for width in range(1, 50):
        parts = wrap_line(line, width)
        assert all(width_of(part) <= width for part in parts)
        assert "".join(map(plain, parts)).replace(" ", "") == plain(line).replace(" ", "")
