"""`everystep view` in a real browser: what is drawn, what clicks and filters do, and that it stays quick."""

from __future__ import annotations

import itertools
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everystep
from browser.conftest import Pages
from browser.looking import await_count, await_text, contrast, milliseconds, overflow, overlaps, texts
from everystep.checkpointer.events import Failed, Opened, Phases, Restored, Saved
from everystep.view import serve_page, write_page
from everystep.view.timeline import MAX_SAVES
from support.processes.command import damage_manifest, step_path
from support.states.shown_runs import (
    BEGAN,
    HOSTILE,
    layered_state,
    long_story,
    save_by_ranks,
    train,
    write_log,
)

pytestmark = pytest.mark.browser

SECTIONS = [
    "overview",
    "saves",
    "durability",
    "metrics",
    "troubles",
    "leaves",
    "changes",
    "writers",
    "disk",
    "events",
]
NEWEST = "[data-tile='Newest durable step'] .value"
MANY = 10_000
REMOVED = "410 (Gone)"
"""What a browser notes when a checkpoint was asked for that retention had just removed."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, and pages of them."""
    path = tmp_path_factory.mktemp("shown")
    train(path / "small", layered_state(6, 32), range(1, 61), keep=5)
    train(path / "other", layered_state(6, 32, seed=3), range(1, 41), keep=4)
    write_log(path / "long", long_story(10_000))
    train(path / "wide", layered_state(1334, 8), range(1, 3))
    hostile = path / "hostile <b>run"
    for step in (1, 2):
        state = {HOSTILE: {HOSTILE: np.ones(3) * step}, "v" + HOSTILE: HOSTILE * step}
        everystep.save(step_path(hostile, step), state, step=step, metrics={HOSTILE: float(step)})
    everystep.save(step_path(hostile, 3), {"w": np.ones(3)}, step=3)
    damage_manifest(step_path(hostile, 3))
    write_log(hostile, long_story(1600))
    write_log(path / "empty", [])
    (path / "empty" / "events.jsonl").touch()
    for step in (1, 2):
        volume = path / f"fast-{step}"
        volume.mkdir()
        save_by_ranks(step_path(path / "ranks", step), step, world=8, volumes=(volume,))
    for name in ("small", "long", "wide", "ranks", "empty"):
        write_page([path / name], path / f"{name}.html", seconds=60)
    write_page([hostile], path / "hostile.html")
    write_page([path / "small", path / "other"], path / "two.html", verify=True)
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["small", "two", "long", "hostile", "ranks", "empty"])
def test_every_part_is_drawn_and_nothing_is_loaded(
    pages: Pages, folder: Path, name: str, scheme: str
) -> None:
    page = pages.open(folder / f"{name}.html", scheme=scheme)
    assert page.evaluate("[...document.querySelectorAll('main > section')].map((it) => it.id)") == SECTIONS
    assert overflow(page) == []
    assert overlaps(page) == []
    assert pages.requests == [(folder / f"{name}.html").as_uri()]
    assert page.locator("img, iframe, object, link").count() == 0
    pages.picture(page, f"{name}-{scheme}")


@pytest.mark.parametrize("name", ["small", "two", "long", "hostile", "ranks", "empty"])
def test_it_fits_a_phone(pages: Pages, folder: Path, name: str) -> None:
    page = pages.open(folder / f"{name}.html", width=390, height=844)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert overflow(page) == []
    for axis in ("by step", "by time") if page.locator("#saves .chart:visible").count() else ():
        page.get_by_role("button", name=axis).click()
        assert overlaps(page) == []
    pages.picture(page, f"{name}-phone")


@pytest.mark.parametrize("name", ["small", "long"])
def test_tables_and_events_are_not_cut_on_a_phone(pages: Pages, folder: Path, name: str) -> None:
    page = pages.open(folder / f"{name}.html", width=390, height=844)
    too_wide = "(found) => found.filter((it) => it.scrollWidth > it.clientWidth).map((it) => it.textContent)"
    assert page.locator("#disk .scroll").evaluate_all(too_wide) == []
    choices = "(found) => found.map((it) => it.clientWidth)"
    widths = page.locator("select[aria-label^='Order']:visible").evaluate_all(choices)
    assert all(width >= 190 for width in widths)  # "in order of the state" needs as much
    for column in (1, 2):  # when, and the step
        assert page.locator(f"#events .row > :nth-child({column})").evaluate_all(too_wide) == []


def test_an_axis_has_more_than_one_tick_on_a_phone(pages: Pages, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with everystep.Checkpointer(run, {"w": np.zeros(3)}, mode="sync") as ckpt:
        for step in range(2, 92, 4):
            ckpt.save(step, metrics={"loss": 4e-7 / step, "rate": 1 - step / 200})
    write_page([run], tmp_path / "page.html")
    page = pages.open(tmp_path / "page.html", width=390, height=844)
    for chart in range(2):
        found = page.locator("#metrics .chart > svg").nth(chart).locator("text").all_text_contents()
        assert {"20", "40", "60", "80"} <= set(found)
        assert len([text for text in found if text.startswith("0.") or "e" in text[1:3]]) >= 3, found
        assert not [text for text in found if "0e" in text], found
    assert overlaps(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_can_be_read(pages: Pages, folder: Path, scheme: str) -> None:
    page = pages.open(folder / "hostile.html", scheme=scheme)
    backgrounds = {"light": "rgb(246, 247, 248)", "dark": "rgb(17, 22, 26)"}
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == backgrounds[scheme]
    said = (".note", ".path", ".tile .value", ".tile .what", ".tag.bad", ".tag.good", "#sections a", "th")
    for selector in said:
        assert contrast(page, selector) >= 4.5, selector


def test_text_of_a_checkpoint_stays_text(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "hostile.html")
    title = "hostile <b>run \N{MIDDLE DOT} Everystep"
    page.get_by_role("button", name="Expand all").click()
    assert page.locator("body").inner_text().count("<img src=x onerror=") > 3
    page.locator("#leaves .row.leaf").first.click()
    assert "</script><img src=x" in page.locator("#leaves .detail h3").inner_text()
    page.locator("#events .chips button[data-kind=failed]").click()
    page.locator("#events .row").first.click()
    assert "<img" in page.locator("#events .detail").inner_text()
    box = page.locator("#saves .chart > svg").bounding_box()
    for across in range(0, int(box["width"]), 9):
        page.mouse.move(box["x"] + across, box["y"] + 60)
    assert page.locator("img").count() == 0
    assert page.title() == title


def test_a_script_that_got_into_the_page_would_not_run(pages: Pages, folder: Path) -> None:
    with (
        serve_page([folder / "hostile <b>run"]) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        other.settimeout(0.5)
        elsewhere = f"http://127.0.0.1:{other.getsockname()[1]}/"
        for address in (folder / "hostile.html", server.url):
            page = pages.open(address)
            await_text(page, "#leaves .note", "1 leaf")
            assert page.locator("img").count() == 0
            assert page.title() == "hostile <b>run \N{MIDDLE DOT} Everystep"
            assert pages.complaints == []
            page.evaluate(
                """(elsewhere) => {
                  const script = document.createElement("script");
                  script.textContent = "document.title = 'owned'";
                  const image = document.createElement("img");
                  image.setAttribute("onerror", "document.title = 'owned'");
                  image.src = elsewhere;
                  document.body.append(script, image);
                }""",
                elsewhere,
            )
            reached = page.evaluate("(to) => fetch(to).then(() => true, () => false)", elsewhere)
            assert (page.title().startswith("hostile"), reached) == (True, False)
            assert sum("Content Security Policy" in text for text in pages.complaints) >= 3
            pages.complaints.clear()
            with pytest.raises(TimeoutError):
                other.accept()
            page.close()


def test_clicks_change_the_chart_of_saves(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "small.html")
    chart = page.locator("#saves .chart > svg")

    def drawn() -> Any:
        script = "(node) => [...node.querySelectorAll('.plot path')].map((path) => path.getAttribute('d'))"
        return chart.evaluate(script)

    before = drawn()
    assert len(before) == 5  # four phases, and the stall
    page.locator("#saves .legend button", has_text="write").click()
    assert len(drawn()) == 4
    page.locator("#saves .legend button", has_text="write").click()
    assert drawn() == before
    page.get_by_role("button", name="by step").click()
    assert drawn() != before
    page.get_by_role("button", name="Speed").click()
    await_text(page, "#saves .chart > svg text", "GB/s")
    page.get_by_role("button", name="Bytes").click()
    await_text(page, "#saves .chart > svg text", "KiB")


def opened(time: float = BEGAN) -> Opened:
    return Opened(time=time, pid=1, host="node-7", mode="sync", every=1)


def saved(step: int, time: float, *, seconds: float = 0.001, nbytes: int = 6 << 20) -> Saved:
    return Saved(step, time, "sync", nbytes, nbytes, 3, Phases(0.0, seconds, 0.0, 0.0), stall_seconds=seconds)


def failed(step: int, time: float) -> Failed:
    return Failed(step, time, "sync", "StorageFull", "the device is full", 0.1)


def show(pages: Pages, folder: Path, events: list[Any]) -> Any:
    """The page of a run with these events, and no checkpoints."""
    write_page([write_log(folder / "run", events)], folder / "page.html")
    return pages.open(folder / "page.html")


def test_the_tooltip_of_a_save_is_not_that_of_a_slower_neighbour(pages: Pages, tmp_path: Path) -> None:
    steps = range(0, 401)
    slow = [saved(step, BEGAN + step, seconds=0.5 if step == 200 else 0.1) for step in steps]
    page = show(pages, tmp_path, [opened(), *slow])
    box = page.locator("#saves .chart > svg").bounding_box()
    left, right = box["x"] + 58, box["x"] + box["width"] - 12
    pixels = (right - left) / 400
    assert 2 < pixels < 3
    tip = page.locator("#saves .tip")
    for step in (199, 200, 201):
        page.mouse.move(left + pixels * step - (step - 200), box["y"] + 100)
        assert f"Step {step}" in tip.inner_text()


def test_failures_after_the_last_durable_save_are_drawn_and_counted(pages: Pages, tmp_path: Path) -> None:
    began = BEGAN + 1000
    events = [
        opened(),
        *(saved(step, BEGAN + 10 * step) for step in range(1, 11)),
        opened(began),
        Restored(10, began + 1, 1000, 1.0),
        *(failed(10 + number, began + 1 + 30 * number) for number in range(1, 5)),
    ]
    page = show(pages, tmp_path, events)
    triangles = "(node) => node.querySelectorAll('path.mark.bad').length"
    for part in ("saves", "durability"):
        assert page.locator(f"#{part} .chart > svg").first.evaluate(triangles) == 4
        assert "failed" in texts(page, f"#{part} .legend .said")
    assert (
        "At worst 2 min and 4 steps, when the save of step 14 failed"
        in page.locator("#durability").inner_text()
    )
    assert "at most 2 min" in page.locator("[data-tile='A crash would have lost']").inner_text()
    pages.picture(page, "failed-last")


def test_a_pause_between_trainings_hides_no_save(pages: Pages, tmp_path: Path) -> None:
    before = [saved(step, BEGAN + step) for step in range(1, 21)]
    after = [saved(step, BEGAN + 60 + step) for step in range(21, 41)]
    page = show(pages, tmp_path, [opened(), *before, opened(BEGAN + 80), *after])
    bars = page.locator("#saves .plot > path").nth(1).get_attribute("d").split("z")[:-1]
    assert len(bars) == 40
    places = [(float(bar[1:].split()[0]), float(bar.split("h")[1].split("V")[0])) for bar in bars]
    for (left, wide), (right, _) in itertools.pairwise(places):
        assert left + wide <= right


def test_a_metric_that_is_nan_is_said(pages: Pages, tmp_path: Path) -> None:
    with everystep.Checkpointer(tmp_path / "run", {"w": np.zeros(3)}, mode="sync") as ckpt:
        for step in range(1, 6):
            ckpt.save(step, metrics={"loss": float("nan") if step > 3 else 1 / step, "rate": 0.1})
    write_page([tmp_path / "run"], tmp_path / "page.html")
    page = pages.open(tmp_path / "page.html")
    heads = texts(page, "#metrics h3")
    assert heads == ["loss NaN or infinite 2 times, last at step 5", "rate"]
    chart = page.locator("#metrics .chart > svg").first
    chart.hover(position={"x": chart.bounding_box()["width"] - 14, "y": 100})
    assert "NaN or infinite" in page.locator("#metrics .tip").first.inner_text()


def test_ranks_tell_which_volume_they_wrote_to(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "ranks.html")
    rows = texts(page, "#writers table >> nth=0 >> tbody tr")
    assert len(rows) == 8
    assert all("fast-2" in row and "iB" in row.split("fast-2")[1] for row in rows)


def test_a_tied_leaf_is_not_counted_twice(pages: Pages, tmp_path: Path) -> None:
    for step in (1, 2):
        shared = np.full(4, float(step))
        other = np.full(4, 1.5 + step / 2)
        state = {"m": {"embed": shared, "head": shared, "other": other}}
        everystep.save(step_path(tmp_path / "run", step), state, step=step)
    write_page([tmp_path / "run"], tmp_path / "page.html")
    page = pages.open(tmp_path / "page.html")
    # Four elements went from 1 to 2 and four from 2 to 2.5: the square root of (4 + 1) / (4 + 16).
    assert texts(page, "#changes .row") == [
        "\u203a m 3 leaves 50 % 1 3 leaves",
        "embed 100 % 1 100 %",
        "head 100 % 1 tied",
        "other 25 % 0.5 100 %",
    ]


def test_names_of_values_are_not_squeezed_by_their_text(pages: Pages, tmp_path: Path) -> None:
    for step in (1, 2):
        state = {"optimizer": {"param_groups": [step + number for number in range(80)]}, "w": np.ones(2)}
        everystep.save(step_path(tmp_path / "run", step), state, step=step)
    write_page([tmp_path / "run"], tmp_path / "page.html")
    page = pages.open(tmp_path / "page.html")
    page.locator("#changes summary").click()
    name = page.locator("#changes table .foreign", has_text="optimizer.param_groups").first
    assert name.bounding_box()["height"] < 30  # one line


def test_an_axis_of_bytes_has_round_ticks(pages: Pages, tmp_path: Path) -> None:
    page = show(pages, tmp_path, [opened(), *(saved(step, BEGAN + step) for step in range(1, 9))])
    page.get_by_role("button", name="Bytes").click()
    ticks = [text for text in texts_of_chart(page) if text.endswith("B")]
    assert ticks == ["0 B", "2.0 MiB", "4.0 MiB", "6.0 MiB"]


def test_ticks_of_milliseconds_are_where_they_say(pages: Pages, tmp_path: Path) -> None:
    page = show(pages, tmp_path, [opened(), *(saved(step, BEGAN + step / 1000) for step in range(1, 20))])
    ticks = [text for text in texts_of_chart(page) if text.count(":") == 2]
    assert len(ticks) > 5
    assert len(set(ticks)) == len(ticks)
    assert {len(text) for text in ticks} == {len("12:34:56.789")}


def test_the_name_of_an_axis_meets_no_other_text(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "hostile.html")
    page.get_by_role("button", name="by step").click()
    assert any("higher than the axis" in text for text in texts_of_chart(page))
    assert "step" in texts_of_chart(page)
    assert overlaps(page) == []


def test_tags_of_all_kinds_sit_in_the_middle_of_their_row(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "long.html")
    for kind in ("opened", "restored", "failed"):
        page.locator(f"#events .chips button[data-kind={kind}]").click()
        row, tag = (page.locator(f"#events .row{inner}").first.bounding_box() for inner in ("", " .tag"))
        assert abs((row["y"] + row["height"] / 2) - (tag["y"] + tag["height"] / 2)) < 2, kind


def test_bytes_written_count_saves_that_are_not_drawn(pages: Pages, tmp_path: Path) -> None:
    count = 2 * MAX_SAVES
    page = show(
        pages, tmp_path, [opened(), *(saved(step, BEGAN + step, nbytes=1 << 20) for step in range(count))]
    )
    assert "40,000 durable saves in 1 training, 39.1 GiB written" in page.locator("#saves .note").inner_text()


def texts_of_chart(page: Any, part: str = "saves") -> list[str]:
    found: list[str] = page.locator(f"#{part} .chart > svg").first.locator("text").all_text_contents()
    return found


def test_a_tooltip_tells_of_the_save_below_the_pointer(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "small.html")
    page.get_by_role("button", name="by step").click()  # by time, busy machines put saves into one pixel
    box = page.locator("#saves .chart > svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 100)
    tip = page.locator("#saves .tip")
    assert "Step 60" in tip.inner_text()
    assert "until durable" in tip.inner_text()
    place = tip.bounding_box()
    assert place["x"] + place["width"] <= 1280
    pages.picture(page, "tooltip", full=False)


def test_leaves_open_filter_and_tell_of_themselves(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "small.html")
    leaves = page.locator("#leaves")
    leaves.get_by_role("button", name="Collapse").click()
    assert texts(page, "#leaves .row .name") == ["\u203a model 31 leaves", "\u203a optimizer.h 60 leaves"]
    leaves.locator(".row.group", has_text="model").click()
    assert "embed" in leaves.locator(".row .name").nth(1).inner_text()
    leaves.get_by_role("searchbox").fill("h.3 UP f32")
    await_count(page, "#leaves .row.leaf", 3)
    assert "3 of 91 leaves" in leaves.locator(".note").first.inner_text()
    leaves.locator(".row.leaf").first.click()
    detail = leaves.locator(".detail").inner_text()
    for told in ("model.h.3.mlp.up.weight", "128 \u00d7 32", "mean \u00b1 deviation", "all elements"):
        assert told in detail
    assert leaves.locator(".row.leaf[aria-selected=true]").count() == 1
    pages.picture(page, "leaf-detail")
    leaves.get_by_role("searchbox").fill("nothing like this")
    page.wait_for_selector("#leaves .empty:not(.hidden)")
    assert "No leaf matches" in leaves.inner_text()


def test_changes_show_which_layers_moved(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "small.html")
    changes = page.locator("#changes")
    assert "86 identical, 5 changed" in changes.locator(".note").first.inner_text()
    changes.get_by_label("Order of changes").select_option("change")
    changes.get_by_role("searchbox").fill("changed mlp.up")
    await_count(page, "#changes .row.leaf", 5)
    # The training of this run changes later layers more, and the first one not at all.
    names = [name.split()[1] for name in texts(page, "#changes .row.group .name")]
    assert [name for name in names if name.isdigit()] == ["5", "4", "3", "2", "1"]
    changes.get_by_label("Checkpoint A").select_option(label="step 56")
    await_text(page, "#changes .row", "%")
    assert changes.get_by_label("Checkpoint A").input_value() == "step-000000000056"
    pages.picture(page, "changes")


def test_events_are_filtered_by_kind_and_text(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "long.html")
    events = page.locator("#events")
    events.locator(".chips button[data-kind=failed]").click()
    await_count(page, "#events .row", 6)
    assert set(texts(page, "#events .row .tag")) == {"failed"}
    events.get_by_role("searchbox").fill("StorageFull")
    events.locator(".chips button[data-kind=all]").click()
    await_count(page, "#events .row", 6)
    events.get_by_role("searchbox").fill("no such thing")
    await_count(page, "#events .row", 0)
    assert "No event matches" in events.inner_text()


def test_ten_thousand_events_are_quick(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "long.html")
    assert page.locator("*").count() < 1500
    click = "document.querySelector('#saves [data-value={}]').click()"
    redrawn = milliseconds(page, f"{click.format('step')}; {click.format('time')}")
    assert redrawn < 2 * 250, f"{redrawn:.0f} ms"
    box = page.locator("#saves .chart > svg").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 420, box["y"] + 100, steps=4)
    page.mouse.up()
    page.wait_for_selector("#saves button:has-text('Show all'):visible")
    pages.picture(page, "zoomed", full=False)
    page.locator("#saves button:has-text('Show all')").click()
    page.locator("#events .virtual").evaluate("(node) => { node.scrollTop = node.scrollHeight; }")
    await_text(page, "#events .row", "opened")
    assert page.locator("#events .row").count() < 60


def test_twenty_thousand_leaves_are_quick(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "wide.html")
    assert "20,011 leaves" in page.locator("#leaves .note").first.inner_text()
    find = "[...document.querySelectorAll('#leaves button')].find((it) => it.textContent === 'Expand all')"
    expanded = milliseconds(page, f"{find}.click()")
    assert expanded < 1000, f"{expanded:.0f} ms"
    assert page.locator("#leaves .row").count() < 60
    page.locator("#leaves .virtual").evaluate("(node) => { node.scrollTop = node.scrollHeight; }")
    page.wait_for_selector("#leaves .row .name[title^='optimizer.h.1333.']")
    page.locator("#leaves").get_by_role("searchbox").fill("h.777.")
    await_text(page, "#leaves .note", "15 of 20,011 leaves")
    page.wait_for_selector("#leaves .row .name[title^='model.h.777.']")
    pages.picture(page, "wide")


def test_a_leaf_with_nan_is_found(pages: Pages, tmp_path: Path) -> None:
    state = layered_state(4)
    state["model"]["h"]["2"]["mlp"]["up"]["weight"][3, 4] = np.nan
    everystep.save(tmp_path / "checkpoint", state)
    write_page([tmp_path / "checkpoint"], tmp_path / "page.html")
    page = pages.open(tmp_path / "page.html")
    assert "1 leaf holds NaN or infinite" in page.locator("#leaves .note").first.inner_text()
    page.locator("#leaves").get_by_role("searchbox").fill("nan")
    await_text(page, "#leaves .note", "1 of 61 leaves")
    assert "up.weight NaN or infinite" in texts(page, "#leaves .row.leaf .name")[0]
    # A checkpoint alone has no events, and no sections for them.
    assert page.locator("main > section:visible").evaluate_all("(found) => found.map((it) => it.id)") == [
        "overview",
        "metrics",
        "leaves",
        "changes",
        "writers",
        "disk",
    ]
    pages.picture(page, "nan")


def test_rows_are_reached_by_keys(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "wide.html")
    page.locator("#leaves").get_by_role("button", name="Expand all").click()
    page.locator("#leaves .virtual").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    title = "document.activeElement.querySelector('.name').title"
    assert page.evaluate(title).startswith("optimizer.h.1333.")
    page.keyboard.press("Home")
    assert page.evaluate(title) == "model"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"


def test_several_runs_share_a_page(pages: Pages, folder: Path) -> None:
    page = pages.open(folder / "two.html")
    assert page.locator("h1").inner_text() == "small"
    page.locator("#runs button", has_text="other").click()
    assert page.locator("h1").inner_text() == "other"
    assert page.locator("#leaves select").first.input_value() == "step-000000000040"
    assert "every byte verified" in page.locator("#disk").inner_text()
    lines = "(node) => node.querySelectorAll('.plot > path').length"
    assert page.locator("#metrics .chart > svg").first.evaluate(lines) == 2
    page.locator("#metrics .legend button", has_text="small").click()
    assert page.locator("#metrics .chart > svg").first.evaluate(lines) == 1


def test_a_served_page_follows_the_training(pages: Pages, tmp_path: Path) -> None:
    state = layered_state(3, 16)
    more, end = threading.Event(), threading.Event()

    def training() -> None:
        with everystep.Checkpointer(tmp_path / "run", state, mode="sync") as ckpt:
            ckpt.restore()
            for step in range(4, 7):
                ckpt.save(step, metrics={"loss": 1 / step})
            more.wait(60)
            ckpt.save(7, metrics={"loss": 1 / 7})
            end.wait(60)

    train(tmp_path / "run", state, range(1, 4))
    thread = threading.Thread(target=training)
    with serve_page([tmp_path / "run"]) as server:
        page = pages.open(server.url)
        await_text(page, "#status", "no training now")
        thread.start()
        await_text(page, NEWEST, "6")
        await_text(page, "#status", "live: training")
        assert "A crash now would lose" in page.locator("#overview").inner_text()
        await_text(page, "#leaves .note", "46 leaves")
        page.locator("#leaves").get_by_role("button", name="Expand all").click()
        await_count(page, "#leaves .row .spark path", 5, MANY)
        more.set()
        await_text(page, NEWEST, "7")
        await_text(page, "#events .row .number", "7")
        # What was opened stays open, and the newest checkpoint is followed.
        page.wait_for_function("() => document.querySelector('#leaves select').value === 'step-000000000007'")
        await_count(page, "#leaves .row.leaf", 5, MANY)
        page.locator("#changes").get_by_label("Checkpoint A").select_option(label="step 5")
        await_text(page, "#changes .note", "identical")
        pages.picture(page, "live")
        end.set()
        thread.join(60)
        await_text(page, "#status", "no training now")
        assert all(url.startswith(server.url) for url in pages.requests)
    await_text(page, "#status", "does not answer")
    pages.forgive("ERR_CONNECTION", REMOVED)


def test_a_leaf_that_is_open_stays_open_while_training_saves(pages: Pages, tmp_path: Path) -> None:
    run, state = tmp_path / "run", layered_state(3, 16)
    train(run, state, range(1, 4))
    detail = "#leaves .detail"
    with serve_page([run]) as server:
        page = pages.open(server.url)
        leaf = page.locator("#leaves .row.leaf").first
        leaf.click()
        await_text(page, detail, "mean")
        with everystep.Checkpointer(run, state, mode="sync", keep=everystep.Keep(last=5)) as ckpt:
            ckpt.restore()
            state["model"]["embed"]["weight"][:] = 7.25
            for step in (4, 5, 6):
                ckpt.save(step)
        page.wait_for_function("() => document.querySelector('#leaves select').value === 'step-000000000006'")
        await_text(page, detail, "7.25 … 7.25")
        assert leaf.get_attribute("aria-selected") == "true"
        pages.forgive(REMOVED)


def test_histograms_that_there_was_no_time_for_are_asked_for_again(pages: Pages, tmp_path: Path) -> None:
    train(tmp_path / "run", layered_state(3, 16), range(1, 3))
    asked: list[str] = []

    def half(route: Any) -> None:
        asked.append(route.request.url)
        found = route.fetch().json()
        kept = list(found)[: max(len(found) // 2, 1)]
        route.fulfill(json={place: found[place] for place in kept})

    with serve_page([tmp_path / "run"]) as server:
        page = pages.open("about:blank", wait=False)
        page.route("**/samples?*", half)
        page.goto(server.url)
        page.get_by_role("button", name="Expand all").click()
        page.wait_for_function(
            "() => { const leaves = document.querySelectorAll('#leaves .row.leaf'); "
            "return leaves.length > 5 && [...leaves].every((row) => row.querySelector('.spark path')); }"
        )
        assert len(asked) > 2


def test_a_run_that_vanishes_is_said_and_the_others_go_on(pages: Pages, tmp_path: Path) -> None:
    gone, stays, state = tmp_path / "gone", tmp_path / "stays", layered_state(1)
    for run in (gone, stays):
        train(run, state, range(1, 4))
    with serve_page([gone, stays]) as server:
        page = pages.open(server.url)
        await_text(page, "#status", "no training now")
        gone.rename(tmp_path / "elsewhere")
        await_text(page, "#status", "the run is not there any more")
        await_text(page, "#overview .alert", "cannot be found any more")
        assert page.locator(NEWEST).inner_text() == "3"
        page.locator("#runs button", has_text="stays").click()
        train(stays, state, range(4, 6))
        await_text(page, NEWEST, "5")
        assert "no training now" in page.locator("#status").inner_text()
        page.reload()
        await_text(page, "#overview .alert", "cannot be found any more")
        pages.picture(page, "vanished", full=False)
        pages.forgive(REMOVED)


def with_metrics(run: Path, points: list[dict[str, float]], keep: everystep.Keep | None = None) -> Path:
    with everystep.Checkpointer(run, {"w": np.zeros(3)}, mode="sync", keep=keep) as ckpt:
        for step, metrics in enumerate(points, 1):
            ckpt.save(step, metrics=metrics)
    page = run.with_suffix(".html")
    write_page([run], page)
    return page


def lines_of(page: Any, name: str) -> list[list[tuple[float, float]]]:
    """The lines of a metric's chart, as points in pixels."""
    chart = page.locator("#metrics .charts > div", has=page.get_by_text(name, exact=True))
    drawn = chart.locator(".plot path").evaluate_all("(found) => found.map((it) => it.getAttribute('d'))")
    numbers = [[part.split() for part in d.replace("M", "L").split("L") if part] for d in drawn]
    return [[(float(x), float(y)) for x, y in points] for points in numbers]


def readings(page: Any) -> dict[str, str]:
    names = texts(page, "#metrics h3 .foreign")
    return dict(zip(names, texts(page, "#metrics .reading"), strict=True))


def smooth(page: Any, amount: str) -> None:
    page.locator("#metrics input[type=range]").evaluate(
        "(slider, amount) => { slider.value = amount; slider.dispatchEvent(new Event('input')); }", amount
    )


def test_metrics_stand_in_the_order_of_use_with_their_last_and_best_values(
    pages: Pages, tmp_path: Path
) -> None:
    points = [
        {"train/loss": 4 / step, "lr": 0.1 * step, "accuracy": step / 20, "a": -step}
        | ({"bleu": 30 - abs(step - 4)} if step % 2 == 0 else {})
        for step in range(1, 11)
    ]
    points[6]["train/loss"] = 0.25
    page = pages.open(with_metrics(tmp_path / "run", points, everystep.Keep(last=2, best=("bleu", "min", 1))))
    assert readings(page) == {
        "train/loss": "last 0.4, best 0.25 at step 7",
        "lr": "last 1, lowest 0.1 at step 1, highest 1 at step 10",
        "accuracy": "last 0.5, best 0.5 at step 10",
        "a": "last \N{MINUS SIGN}10, lowest \N{MINUS SIGN}10 at step 10, highest \N{MINUS SIGN}1 at step 1",
        "bleu": "last 24, best 24 at step 10",  # the rules of the run say that less is better
    }
    assert list(readings(page)) == ["train/loss", "lr", "accuracy", "a", "bleu"]
    tile = page.locator("[data-tile=Metric]").inner_text().split("\n")
    assert [line for line in tile if line] == ["bleu", "24", "step 10; best 24 at step 10"]


@pytest.mark.parametrize(
    ("names", "shown"),
    [(["lr", "val_loss", "loss"], "val_loss"), (["lr", "loss_scale", "x"], "lr"), ([], None)],
)
def test_the_overview_has_the_loss(pages: Pages, tmp_path: Path, names: list[str], shown: str | None) -> None:
    points = [dict.fromkeys(names, 1 / step) for step in (1, 2, 3)]
    tile = pages.open(with_metrics(tmp_path / "run", points)).locator("[data-tile=Metric]")
    assert tile.count() == (shown is not None)
    if shown is not None:
        assert tile.inner_text().startswith(shown)
        assert tile.locator(".trend path").count() == 1


def test_a_loss_that_is_nan_is_said_in_the_overview(pages: Pages, tmp_path: Path) -> None:
    page = pages.open(with_metrics(tmp_path / "run", [{"loss": 1.0}, {"loss": float("nan")}]))
    assert "NaN or infinite" in page.locator(".tile.bad[data-tile=Metric]").inner_text()


def test_a_logarithmic_scale_makes_a_line_of_an_exponential(pages: Pages, tmp_path: Path) -> None:
    points = [
        {
            "decay": 1000 * 0.8**step,
            "crossing": step - 5.5,
            "negative": -step,
            "odd": 0.0 if step == 3 else 1.0,
        }
        for step in range(1, 31)
    ]
    points[9]["decay"] = float("inf")
    page = pages.open(with_metrics(tmp_path / "run", points))
    linear = lines_of(page, "decay")
    page.get_by_role("button", name="logarithmic").click()
    (drawn,) = lines_of(page, "decay")
    assert drawn != linear[0]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(drawn)]
    assert max(slopes) - min(slopes) < 0.03
    heads = dict(zip(texts(page, "#metrics h3 .foreign"), texts(page, "#metrics h3 .odd"), strict=True))
    assert heads == {
        "decay": "NaN or infinite at step 10",
        "crossing": "5 values of 0 or less not drawn",
        "negative": "no value above 0: linear",
        "odd": "1 value of 0 or less not drawn",
    }
    ticks = page.locator("#metrics .charts > div").first.locator("text").all_text_contents()
    assert {"10", "100"} <= set(ticks)
    assert len(lines_of(page, "crossing")[0]) == 25
    assert overlaps(page) == []
    page.get_by_role("button", name="linear").click()
    assert lines_of(page, "decay") == linear


def test_smoothing_draws_a_moving_average_over_the_values(pages: Pages, tmp_path: Path) -> None:
    values = [float(step % 2) for step in range(1, 41)]
    page = pages.open(with_metrics(tmp_path / "run", [{"noise": value} for value in values]))
    (plain,) = lines_of(page, "noise")
    smooth(page, "0.9")
    raw, average = lines_of(page, "noise")
    assert raw == plain
    low, high = max(y for _, y in raw), min(y for _, y in raw)  # of 0 and 1, in pixels
    expected, total, known = [], 0.0, 0.0
    for value in values:
        total, known = 0.9 * total + 0.1 * value, 0.9 * known + 0.1
        expected.append(total / known)
    assert [(low - y) / (low - high) for _, y in average] == pytest.approx(expected, abs=0.01)
    assert page.locator("#metrics output").inner_text() == "0.90"
    smooth(page, "0")
    assert lines_of(page, "noise") == [plain]


def test_values_that_differ_by_rounding_alone_do_not_hang_the_page(pages: Pages, tmp_path: Path) -> None:
    points = [{"a": 0.3 if step % 2 else 0.1 + 0.2, "b": 1e300 * (1 + step * 2e-16)} for step in range(5)]
    page = pages.open(with_metrics(tmp_path / "run", points))
    for amount in ("0", "0.7"):
        smooth(page, amount)
        for scale in ("logarithmic", "linear"):
            page.get_by_role("button", name=scale).click()
            assert len(lines_of(page, "a")) == (1 if amount == "0" else 2)
