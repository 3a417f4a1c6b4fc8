"""The study with a framework that is not one: what is measured, what trouble costs, what is reported."""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from everystep_study import campaign, frameworks
from everystep_study.campaign import Options
from everystep_study.frameworks import FrameworkEntry
from everystep_study.harness.results import Row
from everystep_study.harness.results_directory import FILE, Part, ResultsDirectory, StudyError
from everystep_study.harness.suite import Turn
from everystep_study.report import pages, writers
from everystep_study.suites import by_framework, cost
from everystep_study.suites.damage import Flips
from everystep_study.workers import orders
from everystep_study.workers.processes import FrameworkProcess, TimeUp, WorkerEnded
from support.study.bench_results import quiet

TESTS = Path(__file__).resolve().parents[1]
FAKE = FrameworkEntry("Fake", "support.study.fake_framework")


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(frameworks, "FRAMEWORKS", {"fake": FAKE})
    monkeypatch.setattr(by_framework, "QUICK_ORDER_SECONDS", 1.0)


def study(directory: Path, *suites: str, said: list[str] | None = None, **options: Any) -> ResultsDirectory:
    wanted = Options(suites, ("fake",), ("mlp",), quick=True, rounds=2, **options)
    return campaign.run(directory, wanted, quiet(), (said if said is not None else []).append)


def rows_of(found: ResultsDirectory, suite: str) -> dict[tuple[str, str], Row]:
    entry = next(entry for entry in found.entries if entry.part.suite == suite)
    return {(row.section, row.case): row for row in entry.result.rows}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All suites of the fake framework, measured once."""
    directory = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setattr(frameworks, "FRAMEWORKS", {"fake": FAKE})
        patch.setattr(os, "sync", lambda: None)
        study(directory, *FAKE.suites)
    return directory


def test_cost_has_every_mechanism_durable_and_not_with_raw_rounds(whole: Path) -> None:
    rows = rows_of(ResultsDirectory.read(whole), "cost")
    for mechanism in ("pickled", "checked"):
        for kind in ("durable", "not durable"):
            for every in (1, 4):
                row = rows[f"{kind} every {every}", f"{mechanism}, {kind}"]
                assert row.status == "measured", row.reason
                assert [sample.round for sample in row.samples] == [0, 1, 2]
                for sample in row.samples:
                    spent = sample.readings["seconds"] - sample.readings["base_seconds"]
                    assert sample.readings["stall_seconds"] * sample.readings["saves"] == pytest.approx(spent)
        split = rows["durable split", f"{mechanism}, durable"].samples[0].readings
        assert {"serialise_seconds", "write_seconds", "sync_seconds"} <= split.keys()
        assert ("not durable split", f"{mechanism}, not durable") not in rows


def test_a_slow_save_is_made_once_and_costs_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(cost, "LONG_SECONDS", 0.0)
    kept = orders.Context()
    orders.hello(kept, FAKE.module)
    orders.build(kept, "mlp", True, 0)
    found = cost.train(kept, "pickled", True, [1, 4], 4, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1, "one name of two was written"
    for readings in found.values():
        assert readings["saves"] == 1
        assert readings["stall_seconds"] == pytest.approx(readings["call_seconds"])
    assert found["1"]["lost_percent"] == pytest.approx(4 * found["4"]["lost_percent"])


def test_formats_are_judged_by_what_they_did(whole: Path) -> None:
    rows = rows_of(ResultsDirectory.read(whole), "formats")

    def readings(section: str, case: str) -> dict[str, float]:
        row = rows[section, case]
        assert row.status == "measured", row.reason
        return row.samples[-1].readings

    assert readings("planted code", "pickled")["ran"] == 1
    assert readings("planted code", "checked")["ran"] == 0
    flips = readings("flipped bits", "checked")
    assert (flips["refused"], flips["silent"]) == (flips["flips"], 0)
    assert readings("flipped bits", "pickled")["silent"] > 0
    saved = readings("save weights and optimizer", "checked, weights and optimizer")
    assert (saved["arrays_nbytes"], saved["stored_nbytes"]) == (2 * 64 * 64 * 4, 2 * 64 * 64 * 4 + 4)
    assert readings("part of weights", "checked, weights")["possible"] == 1
    assert readings("part of weights", "pickled, weights")["possible"] == 0
    killed = readings("killed while overwriting", "checked")
    assert killed["kills"] == killed["old kept"] + killed["new complete"] > 0
    assert killed["lost"] == 0


def test_a_framework_in_trouble_costs_its_rows_and_not_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TROUBLES", "1")
    monkeypatch.setattr("everystep_study.suites.formats.QUICK_FLIPS", 1)
    said: list[str] = []
    rows = rows_of(study(tmp_path, "cost", said=said), "cost")
    found = {case.partition(",")[0]: row for (_, case), row in rows.items()}
    assert found["crashing"].status == "failed"
    assert "ended with exit code 7" in found["crashing"].reason
    assert found["hanging"].status == "failed"
    assert "did not answer within 1 s" in found["hanging"].reason
    assert found["raising"].reason == "WorkerFailed: OSError: the disk is on fire"
    assert (found["absent"].status, found["absent"].reason) == ("not installed", "pip install absent")
    assert found["checked"].status == found["wrong"].status == "measured"
    assert any("ends the process" in line and "exit code 7" in line for line in said)


def test_a_model_that_cannot_be_built_costs_its_rows_and_not_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TROUBLES", "build")
    found = study(tmp_path, "cost", "formats")
    assert [entry.part.suite for entry in found.entries] == ["cost", "formats"]
    for entry in found.entries:
        (row,) = entry.result.rows
        assert (row.status, row.reason) == ("failed", "WorkerFailed: NotImplementedError: no such layer")


def test_a_mechanism_that_restores_something_else_is_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_TROUBLES", "1")
    with FrameworkProcess("fake", FAKE, tmp_path, 5.0) as process:
        process.ask(orders.build, model="mlp", quick=True, seed=0)
        for mechanism, equal in (("wrong", 0), ("checked", 1)):
            place = {"mechanism": mechanism, "directory": str(tmp_path / mechanism)}
            process.ask(orders.save, None, **place)
            assert process.ask(orders.load, None, **place)["readings"]["equal"] == equal


def test_a_process_that_babbles_is_ended(tmp_path: Path) -> None:
    with (
        FrameworkProcess(
            "b", FrameworkEntry("B", "support.study.babbling_framework"), tmp_path, 5.0
        ) as process,
        pytest.raises(WorkerEnded, match="no answer"),
    ):
        process.start()


class TestTimeUp:
    """A hanging mechanism whose order may take ten minutes, in a study of three seconds."""

    @pytest.fixture(autouse=True)
    def _hanging(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_TROUBLES", "hanging")
        monkeypatch.setattr(by_framework, "QUICK_ORDER_SECONDS", 600.0)
        monkeypatch.setattr(campaign, "QUICK_SECONDS", 2.5)
        monkeypatch.setattr(campaign, "LAST_PART_SECONDS", 0.5)

    def test_a_part_in_progress_is_cut_off_and_left_for_the_next_call(self, tmp_path: Path) -> None:
        said: list[str] = []
        found = study(tmp_path, "determinism", "cost", said=said)
        assert [entry.part.suite for entry in found.entries] == ["determinism"]
        assert said[-1] == "the time is up: 1 parts are left for another call"

    def test_the_first_part_of_a_call_is_kept_as_far_as_it_got(self, tmp_path: Path) -> None:
        said: list[str] = []
        rows = rows_of(study(tmp_path, "cost", "determinism", said=said), "cost")
        assert {row.status for row in rows.values()} == {"failed"}
        assert all(row.reason.endswith("the time of the study was up") for row in rows.values())
        assert said[-1] == "the time is up: 1 parts are left for another call"

    def test_it_is_not_taken_for_a_loader_that_refuses(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class EndsBeforeLoad(FrameworkProcess):
            def ask(self, order: Any, seconds: float | None = None, **arguments: Any) -> dict[str, Any]:
                if order is orders.load:
                    self.end = time.monotonic()
                return super().ask(order, seconds, **arguments)

        monkeypatch.delenv("FAKE_TROUBLES")
        mechanism = {"key": "checked", "title": "", "missing": None}
        with EndsBeforeLoad("fake", FAKE, tmp_path, 600.0) as process:
            process.ask(orders.build, model="mlp", quick=True, seed=0)
            with pytest.raises(TimeUp):
                Flips(process, mechanism, 1, 0).measure(Turn(tmp_path / "saved", 1))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (FrameworkEntry("Gone", "everystep.no_such_worker"), "No module named 'everystep.no_such_worker'"),
        (
            FrameworkEntry("Gone", "support.study.fake_framework", "none-built"),
            "everystep study setup none-built",
        ),
    ],
)
def test_a_missing_framework_is_reported_as_missing_and_tried_again(
    entry: FrameworkEntry, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frameworks, "FRAMEWORKS", {"fake": entry})
    found = study(tmp_path, "cost")
    (row,) = found.entries[0].result.rows
    assert row.status == "not installed"
    assert reason in row.reason
    assert "Not installed, so not measured" in writers.markdown(pages.study(found))
    assert not found.has(Part("cost", "fake", "mlp"))


class TestDirectory:
    def test_a_study_goes_on_where_it_was_interrupted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measured: list[str] = []

        def run(suite: Any, directory: Path, console: Any, say: Any) -> Any:
            measured.append(suite.name)
            if len(measured) == 2:
                raise KeyboardInterrupt
            return original(suite, directory, console, say=say)

        original = campaign.runner.run
        monkeypatch.setattr(campaign.runner, "run", run)
        monkeypatch.setattr(frameworks, "FRAMEWORKS", {"fake": FrameworkEntry("Gone", "no_such_worker")})
        monkeypatch.setattr("everystep_study.harness.results_directory.Entry.missing", False)
        with pytest.raises(KeyboardInterrupt):
            study(tmp_path, "cost", "formats")
        said: list[str] = []
        found = study(tmp_path, "cost", "formats", said=said)
        assert measured == ["cost", "formats", "formats"]
        assert [entry.part.suite for entry in found.entries] == ["cost", "formats"]
        assert "1 of 2 parts have been measured before" in said

    def test_a_line_that_was_cut_off_is_dropped_and_the_rest_kept(self, whole: Path, tmp_path: Path) -> None:
        data = (whole / FILE).read_bytes()
        (tmp_path / FILE).write_bytes(data[:-100])
        with pytest.warns(UserWarning, match="cut off"):
            found = ResultsDirectory.read(tmp_path)
        assert len(found.entries) == data.count(b"\n") - 2
        with pytest.warns(UserWarning, match="cut off"):
            again = ResultsDirectory.open(tmp_path, found.header)
        again.append(ResultsDirectory.read(whole).entries[-1])
        again.close()
        assert ResultsDirectory.read(tmp_path).entries == ResultsDirectory.read(whole).entries

    def test_another_version_and_another_kind_of_study_are_refused(self, whole: Path, tmp_path: Path) -> None:
        data = (whole / FILE).read_bytes()
        (tmp_path / FILE).write_bytes(data.replace(b"everystep-study/1", b"everystep-study/9"))
        with pytest.raises(StudyError, match=r"written as 'everystep-study/9'.*reads 'everystep-study/1'"):
            ResultsDirectory.read(tmp_path)
        (tmp_path / FILE).write_bytes(b"something else\n")
        with pytest.raises(StudyError, match="not a file of a study"):
            ResultsDirectory.read(tmp_path)
        (tmp_path / FILE).write_bytes(data)
        with pytest.raises(StudyError, match="quick study with seed 0"):
            study(tmp_path, "cost", seed=1)
        with pytest.raises(StudyError, match="has no results"):
            ResultsDirectory.read(tmp_path / "nowhere")

    def test_two_studies_cannot_write_to_one_directory(self, whole: Path) -> None:
        header = ResultsDirectory.read(whole).header
        held = ResultsDirectory.open(whole, header)
        try:
            with pytest.raises(StudyError, match="another study writes"):
                ResultsDirectory.open(whole, header)
        finally:
            held.close()


class Page(HTMLParser):
    """Numbers with their sources, and all other text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[float, str, str]] = []
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.sources = 0
        self._number: tuple[float, str] | None = None
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        self._style = tag == "style"
        if source := found.get("data-source"):
            self.sources += 1
            if tag == "rect":  # a square: its colour says enough
                self.numbers.append((float(found["data-value"] or "nan"), source, ""))
                return
            self._number = (float(found.get("value") or found.get("data-value") or "nan"), source)

    def handle_endtag(self, tag: str) -> None:
        self._number, self._style = None, False

    def handle_data(self, data: str) -> None:
        if self._number is not None:
            self.numbers.append((*self._number, data))
        elif not self._style:
            self.words.append(data)


def test_every_number_of_the_report_is_in_the_raw_results(whole: Path) -> None:
    check_numbers(writers.html(pages.study(ResultsDirectory.read(whole))), whole / FILE)


def test_every_number_of_the_report_in_the_documents_is_in_its_raw_results() -> None:
    folder = TESTS.parent / "docs" / "study"
    check_numbers((folder / "report.html").read_text(), folder / FILE)


def check_numbers(text_of_page: str, results: Path) -> None:
    """Reads the file of results as plain JSON, so that nothing is shared with what made the report."""
    header, *lines = [json.loads(line) for line in results.read_text().splitlines()]
    raw: dict[str, list[float]] = {}
    for line in lines:
        part = line["part"]
        for row in line["result"]["rows"]:
            for sample in row["samples"]:
                for reading, value in sample["readings"].items():
                    where = (part["suite"], part["framework"], part.get("model", ""))
                    key = "|".join((*where, row["section"], row["case"], reading))
                    if sample["round"] > 0:
                        raw.setdefault(key, []).append(value)
    statistic = {"median": statistics.median, "low": min, "high": max}
    page = Page(text_of_page)
    assert len(page.numbers) == page.sources > 200

    def computed(source: str) -> float:
        if " / " in source:
            above, below = source.split(" / ")
            return computed(above) / computed(below)
        key, _, name = source.rpartition("|")
        return float(statistic[name](raw[key]))

    for value, source, text in page.numbers:
        assert value == computed(source), source
        if not text:
            continue
        shown = float(text.replace(",", ""))
        units = (1, 1000, 1 / (1 << 20))
        assert any(abs(shown - value * unit) <= max(0.5, abs(value * unit) / 200) for unit in units), source
    # What else has digits: names and versions from the results, the date, and the prose of the report.
    study = Path(pages.__file__).parents[1]
    known = json.dumps([header, *lines]) + time.strftime("%Y-%m-%d", time.gmtime(header["created"]))
    prose = [study / "report/pages.py", *(study / f"suites/{name}.py" for name in campaign.SUITES)]
    known += "".join(file.read_text() for file in prose)
    for words in page.words:
        for word in re.findall(r"[\w.+-]*\d[\w.+-]*", words):
            assert word.strip(".,") in known, words


def test_the_page_needs_nothing_from_elsewhere(whole: Path) -> None:
    text = writers.html(pages.study(ResultsDirectory.read(whole)))
    assert all(address.startswith("#") for address in Page(text).addresses)
    assert "http" not in text
    assert "<script" not in text


def test_a_new_process_builds_again_what_was_built_and_a_build_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    class Recording(FrameworkProcess):
        def _tell(self, order: Any, *rest: Any) -> list[dict[str, Any]]:
            told.append(order)
            return super()._tell(order, *rest)

    with Recording("fake", FAKE, tmp_path, 5.0) as process:
        process.ask(orders.build, model="mlp", quick=True, seed=0)
        process.kill()
        process.ask(orders.prepare, mechanism="checked")
        process.kill()
        process.ask(orders.build, model="mlp", quick=True, seed=1)
    first = [orders.hello, orders.build]
    assert told == [*first, *first, orders.prepare, *first]
