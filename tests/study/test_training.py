"""What a training benchmark measures, and what it says about it."""

from __future__ import annotations

import io
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image
from rich.console import Console

from holdfast.study.results import Spread
from holdfast.study.states import Gpt2
from holdfast.study.training import arms as training_arms
from holdfast.study.training import bars as training_bars
from holdfast.study.training import child as training_child
from holdfast.study.training import measure as training_measure
from holdfast.study.training import model as training_model
from holdfast.study.training import peers as training_peers
from holdfast.study.training import plot as training_plot
from holdfast.study.training import recovery as training_recovery
from holdfast.study.training import report as training_report
from holdfast.study.training import sweep as training_sweep
from holdfast.study.training import training
from holdfast.study.training.model import Load, Trainer
from holdfast.study.training.results import (
    NONE,
    OVERLAP,
    ArmRow,
    Restart,
    disturbance,
    predicted_stall,
    summarise,
)
from holdfast.study.training.training import TrainingOptions
from support.training_results import MIB, TITLES, result, row, rows, sample

TINY = Gpt2(64, 1, 300)
LOAD = Load(1, 8)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A tiny model spends its time waking threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def trainer() -> Trainer:
    made = Trainer(TINY)
    made.seconds_of_step(LOAD)
    return made


def quiet() -> Console:
    return Console(file=io.StringIO())


def options(directory: Path, **changed: Any) -> TrainingOptions:
    small = TrainingOptions(directory=directory, nbytes=2 * MIB, batch=1, sequence=8, rounds=2, steps=1)
    return replace(small, sweep=False, sweep_rounds=1, short_sweep=True, restarts=0, **changed)


class TestMaths:
    def test_a_write_within_forward_and_backward_is_hidden(self) -> None:
        assert predicted_stall(400, 1000.0, 0.4) == 0
        assert predicted_stall(400, 1000.0, 5.0) == 0

    def test_beyond_it_the_rest_is_waited_for(self) -> None:
        assert predicted_stall(400, 1000.0, 0.1) == pytest.approx(0.3)
        assert predicted_stall(800, 1000.0, 0.1) == pytest.approx(0.7)

    def test_a_row_is_compared_with_training_without_checkpoints(self) -> None:
        plain = row(NONE, compute=1.0, peak_mib=100)
        saved = row(OVERLAP, compute=1.06, stall=0.12, peak_mib=164)
        summary = summarise([plain, saved])[1].summary
        assert summary is not None
        assert summary.ratio == pytest.approx(1.38 / 1.2)
        assert summary.stall_share.median == pytest.approx(0.12 / 1.38)
        assert summary.wait_seconds == pytest.approx(0.03)
        assert summary.save_seconds == pytest.approx(0.09)
        assert (summary.lost_typical, summary.lost_worst) == (0, 1)
        assert summary.extra_peak_nbytes == 64 * MIB

    def test_ratios_by_round_are_those_within_a_round(self) -> None:
        plain = ArmRow(NONE, "", "measured", samples=(sample(1, compute=0.8), sample(2, compute=1.8)))
        saved = ArmRow(OVERLAP, "", "measured", samples=(sample(1, compute=1.3), sample(2, compute=1.8)))
        summary = summarise([plain, saved])[1].summary
        assert summary is not None
        assert summary.ratio_by_round == Spread(1.25, 1.0, 1.5)

    def test_without_the_plain_training_nothing_is_compared(self) -> None:
        failed = ArmRow(NONE, "none", "failed", "no torch")
        assert [r.summary for r in summarise([failed, row(OVERLAP)])] == [None, None]


class TestBars:
    def verdicts(self, given: list[ArmRow], **changed: Any) -> list[str]:
        return [bar.verdict for bar in result(given, **changed).bars]

    def test_hidden_checkpoints_pass(self) -> None:
        assert self.verdicts(rows()) == ["PASS", "PASS"]
        ratio = result().bars[0]
        assert ratio.measured == pytest.approx(1.21 / 1.2)
        assert "goal 1.03: reached" in ratio.detail

    def test_contention_fails_the_first_and_waiting_both(self) -> None:
        assert self.verdicts(rows(overlap=row(OVERLAP, compute=1.1))) == ["FAIL", "PASS"]
        assert self.verdicts(rows(overlap=row(OVERLAP, stall=0.1))) == ["FAIL", "FAIL"]

    def test_the_goal_is_named_when_only_the_bar_is_reached(self) -> None:
        bar = result(rows(overlap=row(OVERLAP, compute=1.04))).bars[0]
        assert bar.verdict == "PASS"
        assert "goal 1.03: not reached" in bar.detail

    def test_other_sizes_and_paces_are_not_judged(self) -> None:
        assert self.verdicts(rows(), nbytes=8_000_000) == ["not measured"] * 2
        assert "300 to 600 MB" in result(nbytes=8_000_000).bars[0].detail
        slow = rows(none=row(NONE, compute=9.0), overlap=row(OVERLAP, compute=9.0))
        assert self.verdicts(slow) == ["not measured"] * 2
        assert "steps of 0.8 to 2.5 s" in result(slow).bars[0].detail

    def test_a_machine_that_others_use_proves_nothing(self) -> None:
        # 0.3 s of CPU in steps of 1.2 s on two CPUs: an eighth.
        disturbed = rows(none=row(NONE, others=0.3))
        assert disturbance(disturbed[0], 2) == pytest.approx(0.125)
        assert self.verdicts(disturbed) == ["not measured"] * 2
        assert "others used 12 % of the CPUs" in result(disturbed).bars[0].detail
        assert self.verdicts(rows(none=row(NONE, others=0.2))) == ["PASS", "PASS"]
        assert disturbance(None, 2) is None

    def test_an_arm_that_is_absent_or_failed_is_not_judged(self) -> None:
        assert self.verdicts([row(NONE)]) == ["not measured"] * 2
        failed = ArmRow(OVERLAP, TITLES[OVERLAP], "failed", "OSError: gone")
        assert self.verdicts(rows(overlap=failed)) == ["not measured"] * 2
        assert result(rows(overlap=failed)).bars[0].detail == "Holdfast, overlap: failed"
        assert self.verdicts([row(OVERLAP)]) == ["not measured"] * 2


class TestModel:
    def test_memory_is_kept_only_inside(self, monkeypatch: pytest.MonkeyPatch) -> None:
        settings: dict[int, int] = {}

        class Library:
            def __init__(self, name: None) -> None: ...

            def mallopt(self, which: int, value: int) -> None:
                settings[which] = value

        monkeypatch.setattr(training_model.ctypes, "CDLL", Library)
        with training_model.kept_memory():
            assert settings == {-4: 0, -1: (1 << 31) - 1}  # no maps of its own per block, nothing trimmed
        assert settings == {-4: 65536, -1: 128 << 10}
        monkeypatch.delattr(Library, "mallopt")
        with training_model.kept_memory():
            pass  # another C library

    def test_the_state_has_the_size_asked_for(self) -> None:
        made = Trainer(training_model.shape_of(4 * MIB))
        made.seconds_of_step(LOAD)
        assert made.nbytes == pytest.approx(4 * MIB, rel=0.01)

    def test_depth_and_width_can_be_chosen(self) -> None:
        shape = training_model.shape_of(8 * MIB, layers=2, width=64)
        assert (shape.layers, shape.width) == (2, 64)
        assert shape.parameters * 12 == pytest.approx(8 * MIB, rel=0.01)
        assert training_model.shape_of(40 * MIB, layers=3).width == 192
        assert training_model.shape_of(40 * MIB, width=192).layers == 3

    @pytest.mark.parametrize(
        ("layers", "width", "said"),
        [(0, 64, "at least one layer"), (1, 100, "multiple"), (12, 768, "more --size")],
    )
    def test_models_that_cannot_be_are_refused(self, layers: int, width: int, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            training_model.shape_of(8 * MIB, layers, width)

    @pytest.mark.parametrize(("batch", "sequence"), [(0, 8), (1, 0), (1, 1025)])
    def test_loads_that_cannot_be_are_refused(self, batch: int, sequence: int) -> None:
        with pytest.raises(ValueError, match="token"):
            Load(batch, sequence)

    def test_training_learns(self, trainer: Trainer) -> None:
        batch = trainer.draw(Load(2, 16))
        for group in trainer.optimizer.param_groups:
            group["lr"] = 1e-2
        with torch.no_grad():
            before = training_model.loss_of(trainer.model, *batch).item()
        for _ in range(10):
            trainer.forward_backward(batch)
            trainer.update()
        with torch.no_grad():
            assert training_model.loss_of(trainer.model, *batch).item() < before / 2

    @pytest.mark.parametrize(("seconds", "batch"), [(1.3, 6), (0.001, 1), (1e9, 256)])
    def test_the_batch_is_the_one_that_takes_as_long_as_wanted(self, seconds: float, batch: int) -> None:
        class Linear:
            def seconds_of_step(self, load: Load) -> float:
                return 0.1 + 0.2 * load.batch

        found = training_model.calibrate(Linear(), seconds, sequence=32)  # type: ignore[arg-type]
        assert found == Load(batch, 32)

    def test_frozen_parameters_grow_the_state_and_stay_as_they_are(self, trainer: Trainer) -> None:
        before = trainer.nbytes
        trainer.grow(4096)
        trainer.grow(8192)
        frozen = [p for name, p in trainer.model.named_parameters() if "frozen" in name]
        copies = [p.detach().clone() for p in frozen]
        trainer.seconds_of_step(LOAD)
        assert trainer.nbytes == before + 4096 + 8192
        assert all(torch.equal(p, c) for p, c in zip(frozen, copies, strict=True))


class Clock:
    """Stands in for the time module: only what is told to take time does."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class Timed(training_arms.Arm):
    """Waits 0.3 before the update and 0.05 in the save; a save is durable when the one after it begins."""

    key = "timed"
    title = "timed"

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.saved: list[int] = []
        self.closed = 0

    def missing(self) -> str | None:
        return None

    def open(self, directory: Path, trainer: Trainer) -> None:
        self._hook = trainer.optimizer.register_step_pre_hook(lambda *_: self.clock.pass_by(0.3))

    def save(self, step: int) -> None:
        if self.saved:
            self.durable = self.saved[-1]
        self.saved.append(step)
        self.clock.pass_by(0.05)

    def close(self) -> None:
        self._hook.remove()
        self.closed += 1


class TestMeasuring:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> Clock:
        clock = Clock()
        monkeypatch.setattr(training_measure, "time", clock)
        monkeypatch.setattr(trainer, "forward_backward", lambda batch: clock.pass_by(1.0))
        trainer.optimizer.register_step_post_hook(lambda *_: clock.pass_by(0.2))
        return clock

    def test_each_part_of_a_step_is_timed(self, trainer: Trainer, clock: Clock, tmp_path: Path) -> None:
        arm = Timed(clock)
        samples, growth = training_measure.Meter(trainer, tmp_path).block(arm, LOAD, 2)
        assert len(samples) == 2
        assert arm.saved == [1, 2, 3]  # the step that opens the block is saved, too, and not counted
        assert arm.closed == 1
        for taken in samples:
            assert taken.compute_seconds == pytest.approx(1.0)
            assert taken.wait_seconds == pytest.approx(0.3)
            assert taken.update_seconds == pytest.approx(0.2)
            assert taken.save_seconds == pytest.approx(0.05)
            assert taken.stall_seconds == pytest.approx(0.35)
            assert taken.seconds == pytest.approx(1.55)
        # After the update of step 2 nothing is durable but the start of the block; after its save, step 1 is.
        assert [(s.lost_after_update, s.lost_at_end) for s in samples] == [(2, 1), (2, 1)]
        assert all(s.others_cpu_seconds is None or s.others_cpu_seconds >= 0 for s in samples)
        assert growth is None or growth >= 0

    def test_all_arms_take_turns_and_one_that_fails_is_out(
        self, trainer: Trainer, clock: Clock, tmp_path: Path
    ) -> None:
        class Failing(Timed):
            key = title = "failing"

            def save(self, step: int) -> None:
                raise OSError("gone")

        class Absent(Timed):
            key = title = "absent"

            def missing(self) -> str | None:
                return "pip install absent"

        class Wrong(Timed):
            key = title = "wrong"

            def differs(self, trainer: Trainer) -> str | None:
                return "model.wte.weight differs"

        arms = [training_arms.Nothing(), Failing(clock), Timed(clock), Absent(clock), Wrong(clock)]
        seen: list[tuple[int, str]] = []
        found = training_measure.run_rounds(
            arms,
            trainer,
            LOAD,
            tmp_path,
            rounds=2,
            steps=2,
            progress=lambda number, title: seen.append((number, title)),
        )
        assert [(r.arm, r.status, r.reason) for r in found] == [
            (NONE, "measured", ""),
            ("failing", "failed", "OSError: gone"),
            ("timed", "measured", ""),
            ("absent", "not installed", "pip install absent"),
            (
                "wrong",
                "failed",
                "RuntimeError: saved something else than the state after the step: model.wte.weight differs",
            ),
        ]
        assert [title for number, title in seen if number == 2] == ["timed", "no checkpoints"]
        plain, _, timed, _, _ = found
        assert plain.summary is not None
        assert timed.summary is not None
        assert plain.summary.lost_typical is None
        assert plain.summary.step_seconds.median == pytest.approx(1.2)
        assert timed.summary.ratio == pytest.approx(1.55 / 1.2)
        assert [s.round for s in timed.samples] == [1, 1, 2, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected an existing checkpoint")
class TestArms:
    @pytest.mark.parametrize("arm", training_peers.every_arm(), ids=lambda arm: arm.key)
    def test_what_is_durable_after_a_block_is_the_state_and_is_noticed_when_it_is_not(
        self, arm: training_arms.Arm, trainer: Trainer, tmp_path: Path
    ) -> None:
        arm.open(tmp_path, trainer)
        try:
            for step in (1, 2, 3):
                trainer.forward_backward(trainer.draw(LOAD))
                trainer.update()
                arm.save(step)
            arm.drain()
            if arm.key != NONE:
                assert arm.newest() == 3
            assert arm.differs(trainer) is None
            if arm.key != NONE:
                with torch.no_grad():
                    trainer.model["wte"].weight[0, 0] += 1  # type: ignore[index]
                assert "wte" in str(arm.differs(trainer))
        finally:
            arm.close()

    def test_checkfreq_lets_no_update_pass_before_its_copy(self, trainer: Trainer, tmp_path: Path) -> None:
        arm = training_peers.CheckFreq()
        arm.open(tmp_path, trainer)
        try:
            order: list[str] = []
            real = training_peers.snapshot

            def slow(*given: Any) -> Any:
                trainer.forward_backward(batch)
                order.append("copied")
                return real(*given)

            batch = trainer.draw(LOAD)
            training_peers.snapshot = slow  # type: ignore[assignment]
            arm.save(1)
            trainer.optimizer.register_step_post_hook(lambda *_: order.append("updated"))
            trainer.update()
            assert order == ["copied", "updated"]
            arm.drain()
        finally:
            training_peers.snapshot = real
            arm.close()

    @pytest.mark.parametrize("arm", [training_peers.CheckFreq, training_peers.DcpAsync])
    def test_an_error_behind_training_is_raised_at_the_next_call(
        self,
        arm: type[training_arms.Arm],
        trainer: Trainer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def broken(path: Path) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(training_peers, "sync_tree", broken)
        made = arm()
        made.open(tmp_path, trainer)
        try:
            made.save(1)
            with pytest.raises(OSError, match="Input/output"):
                made.drain()
            assert made.newest() is None
        finally:
            made.close()

    def test_arms_are_chosen_by_key_and_always_compared_with_none(self) -> None:
        assert [arm.key for arm in training_peers.choose(())] == list(TITLES)
        assert [arm.key for arm in training_peers.choose(("torch",))] == [NONE, "torch"]
        with pytest.raises(ValueError, match=r"unknown system pickle; .* none, overlap, snapshot"):
            training_peers.choose(("pickle",))

    def test_differences_are_named(self) -> None:
        zero, one = torch.zeros(2), torch.ones(2)
        assert training_arms.difference({"a": zero}, {"a": zero.clone()}) is None
        assert training_arms.difference({"a": zero}, {"a": -zero}) == "a differs"  # in the bit of the sign
        assert "b" in str(training_arms.difference({"a": zero}, {"a": zero, "b": one}))
        assert "float64" in str(training_arms.difference({"a": zero}, {"a": zero.double()}))


class TestSweep:
    def test_it_goes_from_half_the_load_to_hardly_any_and_then_up_in_size(self) -> None:
        found = training_sweep.places(Load(4, 128))
        assert [(p.load.tokens, p.copies) for p in found] == [
            (256, 1),
            (128, 1),
            (32, 1),
            (8, 1),
            (8, 2),
            (8, 4),
        ]
        assert [(p.load.tokens, p.copies) for p in training_sweep.places(Load(4, 128), quick=True)] == [
            (512, 1),
            (8, 1),
            (8, 3),
        ]
        assert len(training_sweep.places(Load(1, 8))) == 3  # the same load is not measured twice

    def test_each_place_has_its_prediction_and_its_measurement(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        own = trainer.nbytes
        wanted = [training_sweep.Place(LOAD), training_sweep.Place(LOAD, 3)]
        points = training_sweep.run(trainer, wanted, tmp_path, rounds=2, steps=1)
        assert [p.state_nbytes for p in points] == [pytest.approx(own), pytest.approx(3 * own, rel=0.01)]
        for found in points:
            assert found.predicted_own_seconds == pytest.approx(
                max(0, found.own_seconds - found.compute_seconds)
            )
            assert found.predicted_raw_seconds == pytest.approx(
                max(0, found.raw_seconds - found.compute_seconds)
            )
            assert found.pressure == pytest.approx(found.own_seconds / found.compute_seconds)
            assert found.stall_seconds.low > 0
            assert math.isfinite(found.ratio)


class TestRecovery:
    def life(self, completed: int) -> training_recovery.Life:
        ready = training_child.Ready(completed, imported=12.0, built=12.5, restored=12.75)
        steps = (training_child.Stepped(completed + 1, 14.0), training_child.Stepped(completed + 2, 15.0))
        return training_recovery.Life(10.0, ready, steps)

    def test_a_start_is_split_into_its_parts(self) -> None:
        restart = training_recovery.restart_of(self.life(7), 8)
        assert restart == Restart(2.0, 0.5, 0.25, 1.25, lost=1)
        assert restart.seconds == 4.0

    def test_a_start_that_found_nothing_is_no_recovery(self) -> None:
        with pytest.raises(training_recovery.RecoveryFailed, match="found no checkpoint after 8 steps"):
            training_recovery.restart_of(self.life(0), 8)

    def test_a_killed_training_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training_recovery, "WAYS", training_recovery.WAYS[:1])
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        (found,) = training_recovery.run(TINY, LOAD, tmp_path, repeats=1)
        assert (found.status, found.reason) == ("measured", "")
        (restart,) = found.samples
        assert 0 <= restart.lost <= 1
        parts = msgspec.structs.astuple(restart)[:4]
        assert all(part > 0 for part in parts)

    def test_a_training_that_cannot_start_is_reported_with_its_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> None:
            raise training_recovery.RecoveryFailed("the training ended by itself: no such mode")

        monkeypatch.setattr(training_recovery, "live", broken)
        for found in training_recovery.run(TINY, LOAD, tmp_path, repeats=1):
            assert found.status == "failed"
            assert "no such mode" in found.reason

    def test_torch_goes_on_from_the_newer_file_and_from_the_other_when_that_is_torn(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        completed, save = training_child.open_torch(tmp_path, trainer, "")
        assert completed == 0
        save(1)
        save(2)
        assert training_child.open_torch(tmp_path, trainer, "")[0] == 2
        torn = tmp_path / "0.pt"
        torn.write_bytes(torn.read_bytes()[:1000])
        assert training_child.open_torch(tmp_path, trainer, "")[0] == 1


class TestWholeRun:
    def test_every_arm_is_measured_and_nothing_is_left_behind(self, tmp_path: Path) -> None:
        picture = tmp_path / "out.svg"
        room = tmp_path / "room"
        room.mkdir()
        found = training.run(options(room, plot=picture, layers=1, width=64), quiet())
        assert [r.arm for r in found.rows] == list(TITLES)
        assert [(r.status, r.reason) for r in found.rows] == [("measured", "")] * len(TITLES)
        assert all(len(r.samples) == 2 for r in found.rows)
        assert found.problems == ()
        assert list(room.iterdir()) == []
        assert picture.exists()
        assert training_report.from_json(training_report.to_json(found)) == found

    def test_a_sweep_or_restart_that_fails_does_not_lose_the_rounds(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object, **__: object) -> None:
            raise OSError("gone")

        monkeypatch.setattr(training.training_sweep, "run", broken)
        found = training.run(replace(options(tmp_path, systems=("none",)), sweep=True), quiet())
        assert found.problems == ("the sweep failed: OSError: gone",)
        assert found.sweep == ()
        assert found.row(NONE) is not None

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"rounds": 0}, "at least 1 round"),
            ({"steps": 0}, "at least 1 step"),
            ({"systems": ("x",)}, "unknown system x"),
            ({"sequence": 4096}, "1024 tokens at most"),
            ({"width": 65}, "multiple"),
            ({"nbytes": 10}, "does not fit"),
            ({"plot": Path("x.gif")}, "written as .png or .svg"),
        ],
    )
    def test_options_that_make_no_sense_are_refused_first(
        self, tmp_path: Path, changed: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(ValueError, match=said):
            training.run(replace(options(tmp_path), **changed), quiet())
        assert list(tmp_path.iterdir()) == []

    def test_too_little_room_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="smaller --size"):
            training.run(replace(options(tmp_path), nbytes=1 << 50), quiet())
        with pytest.raises(FileNotFoundError, match="not a directory"):
            training.run(replace(options(tmp_path / "absent")), quiet())


class TestReport:
    def text(self, given: Any) -> str:
        console = Console(file=io.StringIO(), width=100, record=True)
        console.print(training_report.render(given))
        return " ".join(console.export_text().split())

    def test_tables_have_every_row_and_the_verdicts(self) -> None:
        said = self.text(result())
        for title in TITLES.values():
            assert title in said
        assert "PASS" in said
        assert "goal 1.03" in said
        assert "torch.load, cached" in said
        assert "everything" in said  # what a crash costs without checkpoints
        assert "predicted" in said

    def test_a_wide_terminal_is_not_needed(self) -> None:
        console = Console(file=io.StringIO(), width=80, record=True)
        console.print(training_report.render(result()))
        assert "\N{HORIZONTAL ELLIPSIS}" not in console.export_text()

    def test_what_failed_is_said_with_its_reason(self) -> None:
        failed = ArmRow(OVERLAP, TITLES[OVERLAP], "failed", "OSError: gone")
        said = self.text(result(rows(overlap=failed)))
        assert "Holdfast, overlap - failed" in said
        assert "Holdfast, overlap: failed. OSError: gone" in said

    def test_json_comes_back_the_same(self) -> None:
        assert training_report.from_json(training_report.to_json(result())) == result()


class TestPicture:
    def words(self, svg: Path) -> str:
        return " ".join(
            "".join(node.itertext()) for node in ElementTree.parse(svg).iter() if node.tag.endswith("text")
        )

    def test_svg_names_every_arm_the_sweep_and_the_restarts(self, tmp_path: Path) -> None:
        path = tmp_path / "training.svg"
        training_plot.draw(result(), path)
        said = self.words(path)
        for title in (*TITLES.values(), "torch.load, cold", "measured stall", "promised: 1.05"):
            assert title in said

    def test_png_is_a_picture_with_something_on_it(self, tmp_path: Path) -> None:
        path = tmp_path / "training.png"
        training_plot.draw(result(), path)
        with Image.open(path) as image:
            image.load()
            assert image.format == "PNG"
            colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or []}
        assert (0x0B, 0x72, 0x85) in colours  # Holdfast's bar

    def test_without_sweep_restarts_or_anything_it_can_be_drawn(self, tmp_path: Path) -> None:
        failed = ArmRow(OVERLAP, TITLES[OVERLAP], "failed", "OSError: gone")
        bare = msgspec.structs.replace(result([row(NONE), failed]), sweep=(), recovery=())
        training_plot.draw(bare, tmp_path / "a.svg")
        assert "failed" in self.words(tmp_path / "a.svg")
        training_plot.draw(msgspec.structs.replace(bare, rows=()), tmp_path / "b.svg")

    def test_another_suffix_is_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"\.png or \.svg, not as 'x\.jpg'"):
            training_plot.draw(result(), tmp_path / "x.jpg")


def test_limits_are_those_promised() -> None:
    assert (training_bars.STEP_TO_NONE, training_bars.STEP_GOAL, training_bars.STALL_PERCENT) == (
        1.05,
        1.03,
        3.0,
    )
