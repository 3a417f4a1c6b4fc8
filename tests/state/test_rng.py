"""Promise: random numbers go on after a restore exactly where they were when the state was saved."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import everystep
from everystep.errors import StateMismatch, UnsupportedState
from support.states.memory_store import restore, save

ALGORITHMS = ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]


@pytest.fixture(autouse=True)
def _own_numbers() -> Iterator[None]:
    """These tests move the global generators about; others must not notice."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def bits(algorithm: str, seed: int) -> Any:
    return getattr(np.random, algorithm)(seed)


def odd_draws_python(source: Any) -> list[object]:
    """An odd number of gaussians: the second of a pair waits in the generator."""
    return [
        source.random(),
        source.gauss(0, 1),
        source.getrandbits(70),
        source.gauss(0, 1),
        source.gauss(0, 1),
    ]


def odd_draws_legacy(source: Any) -> list[object]:
    return [*source.standard_normal(3), source.randint(0, 100), source.random_sample()]


def odd_draws_numpy(source: Any) -> list[object]:
    # Half of a 64-bit word stays in the generator after a 32-bit draw.
    return [source.random(), int(source.integers(0, 2**32, dtype=np.uint32)), *source.standard_normal(3)]


def odd_draws_torch(source: Any) -> list[object]:
    return [*torch.randn(3, generator=source).tolist(), *torch.rand(5, generator=source).tolist()]


KINDS: dict[str, tuple[Callable[[int], Any], Callable[[Any], list[object]]]] = {
    "python": (random.Random, odd_draws_python),
    "torch": (lambda seed: torch.Generator().manual_seed(seed), odd_draws_torch),
    **{
        f"generator-{name}": (lambda seed, name=name: np.random.Generator(bits(name, seed)), odd_draws_numpy)
        for name in ALGORITHMS
    },
    **{
        f"legacy-{name}": (lambda seed, name=name: np.random.RandomState(bits(name, seed)), odd_draws_legacy)
        for name in ALGORITHMS
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_generator_continues_in_another_process_s_generator(kind: str, tmp_path: Path) -> None:
    make, draw = KINDS[kind]
    source = make(1)
    draw(source)
    everystep.save(tmp_path / "c", {"rng": everystep.rng(source)})
    wanted = draw(source)
    fresh = make(2)
    assert draw(fresh) != wanted
    everystep.load(tmp_path / "c", into={"rng": everystep.rng(fresh)})
    assert draw(fresh) == wanted


GLOBALS: dict[str, Callable[[], list[object]]] = {
    "python": lambda: odd_draws_python(random),
    "numpy": lambda: odd_draws_legacy(np.random),
    "torch": lambda: odd_draws_torch(None),
}


@pytest.mark.parametrize("name", GLOBALS)
@pytest.mark.parametrize("warm", [0, 1, 2])
def test_the_global_generators_continue_with_their_cached_gaussians(name: str, warm: int) -> None:
    draw = GLOBALS[name]
    for _ in range(warm):
        draw()
    state = {"rng": everystep.rng()}
    saved = save(state)
    wanted = draw()
    assert draw() != wanted
    restore(state, saved)
    assert draw() == wanted


def test_everything_at_once_through_a_checkpointer(tmp_path: Path) -> None:
    def draw(source: Any) -> list[object]:
        return [random.random(), np.random.randn(), torch.rand(()).item(), source.random()]

    source = np.random.default_rng(5)
    with everystep.Checkpointer(tmp_path, {"rng": everystep.rng(aug=source)}, mode="sync") as ckpt:
        for step in range(3):
            draw(source)
            ckpt.save(step + 1)
    wanted = [draw(source) for _ in range(3)]
    other = np.random.default_rng(6)
    with everystep.Checkpointer(tmp_path, {"rng": everystep.rng(aug=other)}, mode="sync") as ckpt:
        assert ckpt.restore() == 3
        assert [draw(other) for _ in range(3)] == wanted


def test_children_spawned_after_a_restore_are_those_that_would_have_come(tmp_path: Path) -> None:
    source = np.random.default_rng(5)
    source.spawn(2)
    state = {"rng": everystep.rng(source)}
    everystep.save(tmp_path / "c", state)
    wanted = [child.random() for child in source.spawn(2)]
    fresh = np.random.default_rng()
    everystep.load(tmp_path / "c", into={"rng": everystep.rng(fresh)})
    assert [child.random() for child in fresh.spawn(2)] == wanted


def test_the_state_is_small_and_plain() -> None:
    saved = save({"rng": everystep.rng(random.Random(1))})
    assert saved.leaves["rng.python.words"].shape == (625,)
    assert sum(map(len, saved.data.values())) < 4 * (625 + 624 + 625) + 5100
    assert len(repr(saved.tree)) < 1000, "numbers by the hundred belong into arrays"


class Drawing:
    """An object whose loading draws random numbers, as one that initialises weights does."""

    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        random.random(), np.random.rand(), torch.rand(3)


class DrawingModule(torch.nn.Linear):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        torch.rand(3)
        return super().load_state_dict(*args, **kwargs)


@pytest.mark.parametrize(
    "tree",
    [
        lambda: {"rng": everystep.rng(), "z": Drawing()},
        lambda: [everystep.rng(), {"deep": (Drawing(), Drawing())}],
        lambda: {"a": {"rng": everystep.rng()}, "m": DrawingModule(2, 2)},
    ],
    ids=["dict", "nested", "module"],
)
def test_numbers_drawn_by_other_objects_while_restoring_leave_no_trace(tree: Callable[[], Any]) -> None:
    state = tree()
    saved = save(state)
    wanted = [random.random(), np.random.rand(), torch.rand(3).tolist()]
    restore(state, saved)
    assert [random.random(), np.random.rand(), torch.rand(3).tolist()] == wanted


def test_objects_that_ask_to_be_last_are_restored_after_all_others_in_their_order() -> None:
    seen: list[str] = []

    class Item:
        def __init__(self, name: str, *, last: bool) -> None:
            self.name, self.restore_last = name, last

        def state_dict(self) -> dict[str, str]:
            return {"name": self.name}

        def load_state_dict(self, state: dict[str, str]) -> None:
            assert state["name"] == self.name
            seen.append(self.name)

    state = [Item("a", last=True), Item("b", last=False), (Item("c", last=True), Item("d", last=False))]
    back = restore(state, save(state))
    assert seen == ["b", "d", "a", "c"]
    assert back is state
    assert back[2][0].name == "c"


# --- what does not fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "named", "match"),
    [
        ([], {}, "'0', 'aug'"),
        ([random.Random(1)], {}, "was given 1 further generator"),
        ([random.Random(1), random.Random(1)], {"aug": np.random.default_rng(1)}, "'0', '1', 'aug'"),
        ([np.random.default_rng(1)], {"aug": np.random.default_rng(1)}, "was a random.Random when"),
        ([random.Random(1)], {"aug": np.random.Generator(np.random.Philox(1))}, "on PCG64 .* on Philox now"),
        ([random.Random(1)], {"aug": np.random.RandomState(1)}, "RandomState on MT19937 now"),
    ],
    ids=["none", "fewer", "more", "type", "algorithm", "legacy"],
)
def test_other_generators_are_refused_and_nothing_changes(given: Any, named: Any, match: str) -> None:
    saved = save({"rng": everystep.rng(random.Random(1), aug=np.random.default_rng(1))})
    target = everystep.rng(*given, **named)
    random.seed(99)
    before = random.getstate()
    with pytest.raises(StateMismatch, match=match) as caught:
        restore({"rng": target}, saved)
    assert caught.value.wrong == ("rng",)
    assert random.getstate() == before


def test_a_state_that_is_none_changes_no_generator() -> None:
    source = random.Random(1)
    target = everystep.rng(source)
    state = target.state_dict()
    state["generators"]["0"]["state"] = {"words": np.zeros(3, np.uint32), "gauss": None}
    random.seed(99)
    before = random.getstate(), source.getstate()
    with pytest.raises(StateMismatch, match="No generator has been changed"):
        target.load_state_dict(state)
    assert (random.getstate(), source.getstate()) == before
    with pytest.raises(StateMismatch, match=r"not the state of an everystep\.rng"):
        target.load_state_dict({"step": 1})


@pytest.mark.parametrize(
    "wrong", [random.SystemRandom(), np.random.PCG64(1), 5, random], ids=lambda wrong: type(wrong).__name__
)
def test_unknown_generators_are_refused_at_once(wrong: object) -> None:
    with pytest.raises(UnsupportedState, match=r"generator 'aug' is a .* It takes"):
        everystep.rng(aug=wrong)


def test_a_machine_without_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save({"rng": everystep.rng()})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StateMismatch, match="torch is not installed"):
        restore({"rng": everystep.rng()}, saved)


def test_torch_is_not_imported_for_a_save() -> None:
    script = """
        import sys, everystep
        state = everystep.rng().state_dict()
        assert "torch" not in sys.modules
        assert "torch" not in state
        everystep.rng().load_state_dict(state)
        assert "torch" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- held back ----------------------------------------------------------------------------------------------


def test_what_is_held_back_continues_when_it_is_released() -> None:
    rng = everystep.rng(hold=True)
    saved = save({"rng": rng})
    wanted = random.random(), np.random.random(), torch.rand(()).item()
    restore({"rng": rng}, saved)
    skipped = random.random()
    assert skipped != wanted[0]
    again = save({"rng": rng})  # a save in between has what is held back
    assert {name: bytes(data) for name, data in again.data.items()} == {
        name: bytes(data) for name, data in saved.data.items()
    }
    rng.release()
    assert (random.random(), np.random.random(), torch.rand(()).item()) == wanted
    rng.release()  # there is nothing to release any more
    assert random.random() != wanted[0]


def test_what_does_not_fit_is_found_before_it_is_held_back() -> None:
    saved = save({"rng": everystep.rng(random.Random(3))})
    with pytest.raises(StateMismatch, match="1 further generator"):
        restore({"rng": everystep.rng(hold=True)}, saved)


# --- accelerators, played by an object with the interface of torch.cuda -------------------------------------


class Devices:
    def __init__(self, count: int, *, used: bool = True) -> None:
        self.generators = [torch.Generator().manual_seed(index) for index in range(count)]
        self.used = used

    def is_initialized(self) -> bool:
        return self.used

    def is_available(self) -> bool:
        return bool(self.generators)

    def device_count(self) -> int:
        return len(self.generators)

    def get_rng_state(self, index: int) -> torch.Tensor:
        assert self.used, "asking for the state would start the driver"
        return self.generators[index].get_state()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.generators[index].set_state(state)

    def draw(self) -> list[float]:
        return [torch.rand((), generator=generator).item() for generator in self.generators]


def use(monkeypatch: pytest.MonkeyPatch, devices: Devices, kind: str = "cuda") -> Devices:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type=kind))
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    return devices


def test_every_device_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = use(monkeypatch, Devices(3))
    saved = save({"rng": everystep.rng()})
    wanted = devices.draw()
    resumed = use(monkeypatch, Devices(3, used=False))  # a new process has not touched its devices yet
    resumed.draw()
    restore({"rng": everystep.rng()}, saved)
    assert resumed.draw() == wanted


def test_devices_not_in_use_are_not_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Devices(2, used=False))
    assert list(everystep.rng().state_dict()["torch"]) == ["cpu"]


@pytest.mark.parametrize(("count", "kind"), [(1, "cuda"), (0, "cuda"), (2, "xpu")])
def test_missing_devices_are_skipped_with_a_warning(
    count: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = use(monkeypatch, Devices(2))
    saved = save({"rng": everystep.rng()})
    wanted = devices.draw()[: count if kind == "cuda" else 0]
    number = random.random()
    resumed = use(monkeypatch, Devices(count), kind)
    resumed.draw()
    with pytest.warns(UserWarning, match=f"2 cuda device.s. were saved and this process has {len(wanted)}"):
        restore({"rng": everystep.rng()}, saved)
    assert resumed.draw()[: len(wanted)] == wanted
    assert random.random() == number


def test_further_devices_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = use(monkeypatch, Devices(1))
    saved = save({"rng": everystep.rng()})
    wanted = devices.draw()
    resumed = use(monkeypatch, Devices(2))
    untouched = Devices(2).draw()[1]
    restore({"rng": everystep.rng()}, saved)
    assert resumed.draw() == [*wanted, untouched]
