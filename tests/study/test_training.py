"""The training suite: what a step costs is split into its parts, and every way to save is checked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from everystep_study.frameworks import torch_models, torch_training
from everystep_study.frameworks.torch_training import Trainer
from everystep_study.harness import runner
from everystep_study.harness.results import Bar, Result, Row
from everystep_study.harness.suite import Group, Turn
from everystep_study.mechanisms import states, torch_mechanisms
from everystep_study.mechanisms.competitors import TRAINING
from everystep_study.mechanisms.mechanism import Mechanism
from everystep_study.mechanisms.states import Gpt2, Load
from everystep_study.suites import training
from everystep_study.suites.training import Restart, Steps, TrainingSuite, differs, places, predicted_stall
from everystep_study.workers.processes import WorkerFailed
from support.study.bench_results import quiet, result, row, text_of

MIB = 1 << 20
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


def small(**changed: Any) -> TrainingSuite:
    suite = TrainingSuite(nbytes=2 * MIB, layers=1, width=64, batch=1, sequence=8, rounds=2, steps=1)
    return replace(suite, sweep=False, sweep_rounds=1, short_sweep=True, restarts=0, **changed)


def step(case: str, seconds: float = 1.2, stall: float = 0.01, **more: float) -> Row:
    return row("step", case, seconds=seconds, stall_share=stall, compute_seconds=0.9, lost_at_end=1.0, **more)


def made_up(*rows: Row, nbytes: float = 4e8, others: float = 0.0) -> Result:
    facts = {"state_nbytes": nbytes}
    return result(*rows, facts=facts, others=others)


class TestPromises:
    def bars(self, *rows: Row, **changed: float) -> list[Bar]:
        return TrainingSuite().bars(made_up(*rows, **changed))

    def verdicts(self, *rows: Row, **changed: float) -> list[str]:
        return [bar.verdict for bar in self.bars(*rows, **changed)]

    def test_hidden_checkpoints_pass_and_the_goal_is_named(self) -> None:
        found = self.bars(step("none"), step("overlap", 1.21))
        assert [bar.verdict for bar in found] == ["PASS", "PASS"]
        assert found[0].detail == "goal 1.03: reached"
        assert self.bars(step("none"), step("overlap", 1.25))[0].detail == "goal 1.03: not reached"

    def test_slower_steps_and_waiting_fail(self) -> None:
        assert self.verdicts(step("none"), step("overlap", 1.3)) == ["FAIL", "PASS"]
        assert self.verdicts(step("none"), step("overlap", 1.3, 0.1)) == ["FAIL", "FAIL"]

    def test_other_sizes_paces_and_busy_machines_are_not_judged(self) -> None:
        for changed, rows, words in (
            ({"nbytes": 8e6}, (step("none"), step("overlap")), "300 to 600 MB"),
            ({}, (step("none", 9.0), step("overlap", 9.0)), "steps of 0.8 to 2.5 s"),
            ({"others": 0.12}, (step("none"), step("overlap")), "others used 12 % of the CPUs"),
            ({}, (step("none"),), "left out of this run"),
        ):
            found = self.bars(*rows, **changed)  # type: ignore[arg-type]
            assert {bar.verdict for bar in found} == {"not measured"}
            assert words in found[0].detail


class TestReport:
    def test_every_part_is_shown(self) -> None:
        place = "1 x 8 tokens, 4 MB"
        restart = {"import_seconds": 1.0, "build_seconds": 0.5, "restore_seconds": 0.25, "step_seconds": 0.25}
        rows = [
            step("none", peak_nbytes=float(MIB)),
            step("overlap", 1.26, peak_nbytes=float(9 * MIB), lost_after_update=2.0),
            row("sweep", "none", place, seconds=0.1, compute_seconds=0.05),
            row("sweep", "overlap", place, seconds=0.2, stall_seconds=0.09),
            row("sweep", "sync", place, seconds=0.2, save_seconds=0.15),
            row("sweep", "raw", place, seconds=0.125),
            row("restart", "everystep", seconds=2.0, lost=1.0, **restart),
        ]
        said = text_of(TrainingSuite(), made_up(*rows))
        assert "the overlap 1.26 1.26-1.26 1.050 1.0 % \N{EN DASH} 1, worst 2 8" in said
        assert f"{place} 90 90-90 50 3.00 100 75 2.000" in said
        assert "the everystep 2.00 2.00-2.00 1.00 0.50 0.25 0.25" in said

    def test_a_write_within_forward_and_backward_is_hidden(self) -> None:
        assert predicted_stall(0.4, 0.4) == 0
        assert predicted_stall(0.4, 0.1) == pytest.approx(0.3)


class TestModel:
    def test_memory_is_kept_only_inside(self, monkeypatch: pytest.MonkeyPatch) -> None:
        settings: dict[int, int] = {}

        class Library:
            def __init__(self, name: None) -> None: ...

            def mallopt(self, which: int, value: int) -> None:
                settings[which] = value

        monkeypatch.setattr(torch_training.ctypes, "CDLL", Library)
        with torch_training.kept_memory():
            assert settings == {-4: 0, -1: (1 << 31) - 1}  # no maps of its own per block, nothing trimmed
        assert settings == {-4: 65536, -1: 128 << 10}
        monkeypatch.delattr(Library, "mallopt")
        with torch_training.kept_memory():
            pass  # another C library

    def test_the_state_has_the_size_asked_for(self) -> None:
        made = Trainer(states.shape_of(4 * MIB))
        made.seconds_of_step(LOAD)
        assert made.nbytes == pytest.approx(4 * MIB, rel=0.01)

    def test_depth_and_width_can_be_chosen(self) -> None:
        shape = states.shape_of(8 * MIB, layers=2, width=64)
        assert (shape.layers, shape.width) == (2, 64)
        assert shape.parameters * 12 == pytest.approx(8 * MIB, rel=0.01)
        assert states.shape_of(40 * MIB, layers=3).width == 192
        assert states.shape_of(40 * MIB, width=192).layers == 3

    @pytest.mark.parametrize(
        ("layers", "width", "said"),
        [(0, 64, "at least one layer"), (1, 100, "multiple"), (12, 768, "more --size")],
    )
    def test_models_that_cannot_be_are_refused(self, layers: int, width: int, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            states.shape_of(8 * MIB, layers, width)

    @pytest.mark.parametrize(("batch", "sequence"), [(0, 8), (1, 0), (1, 1025)])
    def test_loads_that_cannot_be_are_refused(self, batch: int, sequence: int) -> None:
        with pytest.raises(ValueError, match="token"):
            Load(batch, sequence)

    def test_training_learns(self, trainer: Trainer) -> None:
        batch = trainer.draw(Load(2, 16))
        for group in trainer.optimizer.param_groups:
            group["lr"] = 1e-2
        with torch.no_grad():
            before = torch_models.loss_of(trainer.model, batch).item()
        for _ in range(10):
            trainer.forward_backward(batch)
            trainer.update()
        with torch.no_grad():
            assert torch_models.loss_of(trainer.model, batch).item() < before / 2

    @pytest.mark.parametrize(("seconds", "batch"), [(1.3, 6), (0.001, 1), (1e9, 256)])
    def test_the_batch_is_the_one_that_takes_as_long_as_wanted(self, seconds: float, batch: int) -> None:
        class Linear:
            def seconds_of_step(self, load: Load) -> float:
                return 0.1 + 0.2 * load.batch

        found = torch_training.calibrate(Linear(), seconds, sequence=32)  # type: ignore[arg-type]
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


class Timed(Mechanism):
    """Waits 0.3 before the update and 0.05 in the save; a save is durable when the one after it begins."""

    key = title = "timed"
    always_durable = True
    clock: ClassVar[Clock]
    saved: ClassVar[list[int]]
    closed = 0
    wrong = False

    def open(self) -> None:
        self._hook = self.subject.optimizer.register_step_pre_hook(lambda *_: self.clock.pass_by(0.3))

    def write(self, target: Path) -> None:
        self.saved.append(self.subject.steps)
        self.clock.pass_by(0.05)
        self._kept = {name: tensor.clone() for name, tensor in self.subject.tensors.items()}

    @property
    def durable_saves(self) -> int:
        return max(0, self.saves - 1)

    def load(self) -> None:
        for name, tensor in self.subject.tensors.items():
            tensor.copy_(self._kept[name] + self.wrong)

    def close(self) -> None:
        self._hook.remove()
        type(self).closed += 1


class Clock:
    """Stands in for the time module: only what is told to take time does."""

    def __init__(self) -> None:
        self.now = 100.0
        self.monotonic = time.monotonic

    def perf_counter(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class OneCase(TrainingSuite):
    def groups(self, folder: Path) -> Iterator[Group]:
        self._nbytes, self._load = 1, LOAD
        yield Group("steps", [self.case], self.rounds, warm_up=0)


class TestSteps:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> Clock:
        clock = Clock()
        monkeypatch.setattr(training, "time", clock)
        monkeypatch.setattr(trainer, "forward_backward", lambda batch: clock.pass_by(1.0))
        trainer.optimizer.register_step_post_hook(lambda *_: clock.pass_by(0.2))
        return clock

    @pytest.fixture
    def timed(self, clock: Clock) -> type[Timed]:
        return type("Timed", (Timed,), {"clock": clock, "saved": []})

    def run(self, kind: type[Mechanism], trainer: Trainer, folder: Path) -> Row:
        suite = OneCase(nbytes=2 * MIB, rounds=2)
        suite.case = Steps("timed", kind, trainer, LOAD, 2, "step")  # type: ignore[attr-defined]
        return runner.run(suite, folder, quiet()).rows[0]

    def test_each_part_of_a_step_is_timed(self, trainer: Trainer, timed: type[Timed], tmp_path: Path) -> None:
        first = trainer.steps + 1
        found = self.run(timed, trainer, tmp_path)
        # Three steps open the first block and one the second; they are saved, and not counted.
        assert timed.saved == list(range(first, first + 3 + 2 + 1 + 2))
        assert timed.closed == 2
        assert [sample.round for sample in found.samples] == [1, 1, 2, 2]
        for name, seconds in {
            "compute_seconds": 1.0,
            "wait_seconds": 0.3,
            "update_seconds": 0.2,
            "save_seconds": 0.05,
            "stall_seconds": 0.35,
            "seconds": 1.55,
        }.items():
            assert found.values(name) == pytest.approx([seconds] * 4)
        # After an update the step before is being saved: two are lost; after the save call, one.
        assert found.values("lost_after_update") == [2, 2, 2, 2]
        assert found.values("lost_at_end") == [1, 1, 1, 1]

    def test_a_mechanism_that_saves_something_else_has_failed(
        self, trainer: Trainer, timed: type[Timed], tmp_path: Path
    ) -> None:
        timed.wrong = True
        before = trainer.tensors["model.wte.weight"].clone()
        found = self.run(timed, trainer, tmp_path)
        assert found.status == "failed"
        assert "saved something else than the state after the step: model.wte" in found.reason
        assert timed.closed == 1
        assert not torch.equal(trainer.tensors["model.wte.weight"], before + 1), "the others train on"


def opened(key: str, trainer: Trainer, directory: Path) -> Mechanism:
    return TRAINING[key](trainer, directory, durable=True, start_over=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected an existing checkpoint")
class TestMechanisms:
    @pytest.mark.parametrize("key", [key for key in TRAINING if key != "none"])
    def test_what_is_durable_after_a_block_is_the_state_and_a_difference_is_noticed(
        self, key: str, trainer: Trainer, tmp_path: Path
    ) -> None:
        mechanism = opened(key, trainer, tmp_path)
        try:
            for _ in range(3):
                trainer.forward_backward(trainer.draw(LOAD))
                trainer.update()
                mechanism.save_and_sync()
            mechanism.wait()
            assert differs(mechanism, trainer) is None
            assert mechanism.durable_saves == 3
            with torch.no_grad():
                trainer.model["wte"].weight[0, 0] += 1  # type: ignore[index]
            assert "wte" in str(differs(mechanism, trainer))
        finally:
            mechanism.close()

    def test_checkfreq_lets_no_update_pass_before_its_copy(
        self, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mechanism = opened("checkfreq", trainer, tmp_path)
        order: list[str] = []
        batch, real = trainer.draw(LOAD), torch_mechanisms.snapshot

        def slow(*given: Any) -> Any:
            if len(given) == 2:  # the outermost of its calls
                trainer.forward_backward(batch)
                order.append("copied")
            return real(*given)

        monkeypatch.setattr(torch_mechanisms, "snapshot", slow)
        try:
            mechanism.save()
            trainer.optimizer.register_step_post_hook(lambda *_: order.append("updated"))
            trainer.update()
            assert order == ["copied", "updated"]
            mechanism.wait()
        finally:
            mechanism.close()

    @pytest.mark.parametrize("key", ["checkfreq", "dcp-async"])
    def test_an_error_behind_training_is_raised_at_the_next_call(
        self, key: str, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(path: Path) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(torch_mechanisms, "sync_tree", broken)
        mechanism = opened(key, trainer, tmp_path)
        try:
            mechanism.save()
            with pytest.raises(OSError, match="Input/output"):
                mechanism.wait()
            assert mechanism.durable_saves == 0
        finally:
            mechanism.close()


class TestSweep:
    def test_it_goes_from_half_the_load_to_hardly_any_and_then_up_in_size(self) -> None:
        found = [(load.tokens, copies) for load, copies in places(Load(4, 128))]
        assert found == [(256, 1), (128, 1), (32, 1), (8, 1), (8, 2), (8, 4)]
        short = [(load.tokens, copies) for load, copies in places(Load(4, 128), short=True)]
        assert short == [(512, 1), (8, 1), (8, 3)]
        assert len(places(Load(1, 8))) == 3  # the same load is not measured twice

    def test_each_place_measures_the_device_and_training_with_and_without(self, tmp_path: Path) -> None:
        suite = small(systems=("none",))
        suite.sweep = True
        found = runner.run(suite, tmp_path, quiet())
        rows = found.section("sweep")
        assert [r.case for r in rows] == ["none", "overlap", "sync", "raw"] * 3
        assert {(r.status, r.reason) for r in rows} == {("measured", "")}
        sizes = [r.median("state_nbytes") for r in rows if r.case == "none"]
        assert sizes[2] == pytest.approx(3 * (sizes[0] or 0), rel=0.01)
        assert "stall in overlap" in text_of(suite, found)


class TestRestart:
    def test_a_killed_training_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        case = Restart("everystep", "Everystep", TINY, LOAD)
        case.setup(tmp_path)
        turn = Turn(tmp_path, 1)
        case.measure(turn)
        assert turn.samples == [], "there was nothing to restart from"
        case.measure(turn)
        ((_, sample),) = turn.samples
        assert 0 <= sample.readings["lost"] <= 1
        parts = ("import_seconds", "build_seconds", "restore_seconds", "step_seconds")
        assert all(sample.readings[part] > 0 for part in parts)
        assert sample.readings["seconds"] == pytest.approx(sum(sample.readings[part] for part in parts))

    def test_a_training_that_cannot_go_on_is_an_error_with_its_last_words(self, tmp_path: Path) -> None:
        case = Restart("everystep", "Everystep", TINY, LOAD)
        case.setup(tmp_path)
        case._order["system"] = "unheard-of"
        with pytest.raises(WorkerFailed, match="KeyError: 'unheard-of'"):
            case.measure(Turn(tmp_path, 1))

    def test_torch_goes_on_from_the_newer_file_and_from_the_other_when_that_is_torn(
        self, trainer: Trainer, tmp_path: Path
    ) -> None:
        def resume() -> int:
            return opened("torch", trainer, tmp_path).resume()

        assert resume() == 0
        mechanism = opened("torch", trainer, tmp_path)
        for step in (1, 2):
            trainer.steps = step
            mechanism.save_and_sync()
        assert resume() == 2
        torn = tmp_path / "1.pt"
        torn.write_bytes(torn.read_bytes()[:1000])
        assert resume() == 1


def test_every_way_to_train_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    suite = small()
    found = runner.run(suite, tmp_path, quiet())
    assert [r.case for r in found.rows] == list(TRAINING)
    assert {(r.status, r.reason, len(r.samples)) for r in found.rows} == {("measured", "", 2)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"steps": 0}, "at least 1 step"),
        ({"systems": ("x",)}, "unknown system x"),
        ({"sequence": 4096}, "1024 tokens at most"),
        ({"width": 65}, "multiple"),
        ({"nbytes": 10}, "more --size"),
    ],
)
def test_options_that_make_no_sense_are_errors(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(small(), **changed).needs()


def test_the_plain_training_is_always_measured(tmp_path: Path) -> None:
    found = runner.run(small(systems=("torch",)), tmp_path, quiet())
    assert [r.case for r in found.rows] == ["none", "torch"]
