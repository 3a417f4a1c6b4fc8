"""Saves beside the training: nothing changes before it has been read, and what does is found out."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everystep
from everystep import Checkpointer, Keep, Options
from everystep.checkpointer.events import Saved
from everystep.checkpointer.opening import Mode
from everystep.checkpointer.pending_save import PendingSave
from everystep.checkpointer.save_task import SaveTask
from everystep.engine import faults
from everystep.state.boxed import unchanging

LARGE = 700  # a square matrix of so many floats is 2 MB: more than one window below
SMALL_WINDOWS = Options(backend="threads", memory_nbytes=2 << 20)
"""Leaves nothing for copies: buffers have to leave at the disk's pace."""
ONE_WINDOW = Options(backend="threads", memory_nbytes=80 << 20)
PATIENCE = 120.0


@pytest.fixture
def _saves_wait_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """No save ends before training waits for it, however long a busy machine lets training stand still."""
    awaited: weakref.WeakKeyDictionary[PendingSave, threading.Event] = weakref.WeakKeyDictionary()
    start, written = SaveTask.start, SaveTask.written

    def starting(task: SaveTask, timeout: float) -> None:
        awaited[task.pending] = threading.Event()
        start(task, timeout)

    def ending(task: SaveTask) -> None:
        assert awaited[task.pending].wait(PATIENCE), "no thread waits for this save"
        written(task)

    def waiting(real: Callable[..., Any]) -> Callable[..., Any]:
        def wait(waited_for: SaveTask | PendingSave, *arguments: Any) -> Any:
            pending = waited_for.pending if isinstance(waited_for, SaveTask) else waited_for
            awaited[pending].set()
            return real(waited_for, *arguments)

        return wait

    monkeypatch.setattr(SaveTask, "start", starting)
    monkeypatch.setattr(SaveTask, "written", ending)
    monkeypatch.setattr(PendingSave, "exception", waiting(PendingSave.exception))
    for name in ("release", "join"):
        monkeypatch.setattr(SaveTask, name, waiting(getattr(SaveTask, name)))


@pytest.fixture
def slow_device(_saves_wait_for_training: None) -> Iterator[None]:
    """Every write takes long enough for training to overtake it."""
    with faults.injected("write:1:slow60+"):
        yield


@pytest.fixture
def crawling_device(_saves_wait_for_training: None) -> Iterator[None]:
    """Every write takes long enough for a change to come while it is under way."""
    with faults.injected("write:1:slow500+"):
        yield


def layer_stack(width: int = LARGE) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 8))


def train_step(model: nn.Module, step: int, width: int = LARGE) -> torch.Tensor:
    torch.manual_seed(step)
    return model(torch.randn(4, width)).square().mean()


def copy_of(state: dict[str, Any]) -> dict[str, Any]:
    """What the state dicts say now, in memory of its own."""
    return {
        name: copy.deepcopy(part.state_dict() if hasattr(part, "state_dict") else part)
        for name, part in state.items()
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(map(str, a)) == list(map(str, b)) and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def stored(run: Path, step: int, like: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    fresh = like()
    for part in fresh.values():
        if isinstance(part, torch.optim.Optimizer):  # so that there is state to be read into
            for group in part.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            part.step()
            part.zero_grad()
    everystep.load(run / f"step-{step:012d}", into=fresh)
    return copy_of(fresh)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_step_is_stored_as_it_was_while_training_runs_on(
    tmp_path: Path, slow_device: None, kind: str
) -> None:
    def make() -> dict[str, Any]:
        model = layer_stack()
        return {"model": model, "optimizer": OPTIMIZERS[kind](model.parameters())}

    state = make()
    model, optimizer = state["model"], state["optimizer"]
    wanted = {}
    with Checkpointer(tmp_path, state, keep=Keep(last=9), options=SMALL_WINDOWS) as ckpt:
        assert ckpt.mode == "overlap"
        for step in range(1, 5):
            optimizer.zero_grad()
            train_step(model, step).backward()
            optimizer.step()
            wanted[step] = copy_of(state)
            saving = ckpt.save(step)
            assert saving is not None
            assert not saving.done()
        ckpt.wait()
        assert ckpt.last_durable == 4
        saved = [event for event in ckpt.events if event.__class__.__name__ == "Saved"]
        assert all(event.in_place_nbytes > event.nbytes - event.in_place_nbytes > 0 for event in saved)
    for step in wanted:
        assert same(stored(tmp_path, step, make), wanted[step])


def test_gradient_accumulation_waits_only_at_the_step(tmp_path: Path, crawling_device: None) -> None:
    model = layer_stack()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}, options=ONE_WINDOW) as ckpt:
        train_step(model, 0).backward()
        optimizer.step()
        saving = ckpt.save(1)
        for micro in range(3):
            train_step(model, micro).backward()
            assert not saving.done()  # type: ignore[union-attr]
        optimizer.step()
        assert saving.done()  # type: ignore[union-attr]


def test_several_optimizers_schedulers_a_scaler_and_an_average(tmp_path: Path, slow_device: None) -> None:
    def make() -> dict[str, Any]:
        first, second = layer_stack(), layer_stack()
        adam = torch.optim.AdamW(first.parameters(), lr=0.1)
        sgd = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
        return {
            "first": first,
            "second": second,
            "adam": adam,
            "sgd": sgd,
            "lr": torch.optim.lr_scheduler.StepLR(adam, 1, gamma=0.5),
            "scaler": torch.amp.GradScaler("cpu"),
            "ema": torch.optim.swa_utils.AveragedModel(first),
        }

    state = make()
    wanted = {}
    with Checkpointer(tmp_path, state, keep=Keep(last=9), options=SMALL_WINDOWS) as ckpt:
        for step in range(1, 4):
            state["adam"].zero_grad()
            state["sgd"].zero_grad()
            loss = train_step(state["first"], step) + train_step(state["second"], step)
            state["scaler"].scale(loss).backward()
            state["scaler"].unscale_(state["adam"])
            nn.utils.clip_grad_norm_(state["first"].parameters(), 1.0)
            state["scaler"].step(state["adam"])
            state["scaler"].step(state["sgd"])
            state["scaler"].update()
            state["lr"].step()
            state["ema"].update_parameters(state["first"])
            wanted[step] = copy_of(state)
            ckpt.save(step)
    for step in wanted:
        assert same(stored(tmp_path, step, make), wanted[step])


def test_optimizers_that_step_inside_of_backward(tmp_path: Path, slow_device: None) -> None:
    def make() -> dict[str, Any]:
        model = layer_stack()
        return {
            "model": model,
            "optimizers": [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()],
        }

    state = make()
    owner = dict(zip(state["model"].parameters(), state["optimizers"], strict=True))

    def step_now(parameter: torch.Tensor) -> None:
        owner[parameter].step()
        owner[parameter].zero_grad()

    for parameter in state["model"].parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    wanted = {}
    with Checkpointer(tmp_path, state, keep=Keep(last=9), options=SMALL_WINDOWS) as ckpt:
        for step in range(1, 4):
            train_step(state["model"], step).backward()
            wanted[step] = copy.deepcopy(state["model"].state_dict())
            ckpt.save(step)
    for step, weights in wanted.items():
        found = everystep.load(tmp_path / f"step-{step:012d}", select="model.*")["model"]
        assert same(dict(found), dict(weights))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_module_is_stored_under_its_own_names(tmp_path: Path, compiled: bool) -> None:
    model = nn.Linear(4, 4)
    used = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.AdamW(used.parameters())
    with Checkpointer(tmp_path, {"model": used, "optimizer": optimizer}) as ckpt:
        used(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        ckpt.save(1)
    assert "model.weight" in everystep.open(tmp_path).leaves
    assert "optimizer.weight.exp_avg" in everystep.open(tmp_path).leaves


# --- changes that were not announced -----------------------------------------------------------------------


def scale(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)  # type: ignore[index]


def scale_behind_autograd(model: nn.Module) -> None:
    model[0].weight.data.mul_(0.5)  # type: ignore[index]


def scale_behind_torch(model: nn.Module) -> None:
    model[0].weight.detach().numpy()[...] *= 0.5  # type: ignore[index]


def load_others(model: nn.Module) -> None:
    model.load_state_dict({name: torch.ones_like(t) for name, t in model.state_dict().items()})


@pytest.mark.parametrize("change", [scale, scale_behind_autograd, scale_behind_torch, load_others])
def test_a_change_outside_of_the_optimizer_fails_that_save_and_no_other(
    tmp_path: Path, crawling_device: None, change: Callable[[nn.Module], None]
) -> None:
    model = layer_stack()
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = Checkpointer(
        tmp_path, {"model": model, "optimizer": optimizer}, keep=Keep(last=9), options=ONE_WINDOW
    )
    ckpt.save(1)
    ckpt.wait()
    ckpt.save(2)
    change(model)
    with pytest.raises(everystep.errors.MutatedDuringSave, match="with checkpointer") as caught:
        ckpt.save(3)
    assert "model.0.weight" in caught.value.leaves
    ckpt.close()  # told once
    assert ckpt.steps == [1, 3]
    assert ckpt.last_durable == 3


def test_a_fused_step_past_the_hook_is_noticed(tmp_path: Path, crawling_device: None) -> None:
    """Fused kernels do not count in torch's version counters."""
    model = layer_stack()
    hidden = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    known = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(tmp_path, {"model": model, "known": known}, options=ONE_WINDOW)
    train_step(model, 0).backward()
    ckpt.save(1)
    hidden.step()
    with pytest.raises(everystep.errors.MutatedDuringSave, match="optimizers="):
        ckpt.close()


def test_what_changed_while_it_was_read_is_copied_from_then_on(tmp_path: Path, crawling_device: None) -> None:
    """A change that is not announced costs one save, not every save."""
    model = layer_stack()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    wanted = {}
    with Checkpointer(tmp_path, state, keep=Keep(last=9), options=ONE_WINDOW) as ckpt:
        for step in range(1, 5):
            wanted[step] = model[0].weight.detach().clone()  # type: ignore[index]
            if step == 2:
                with pytest.raises(
                    everystep.errors.MutatedDuringSave, match=r"model\.0\.weight .*next saves copy"
                ):
                    ckpt.save(step)
            else:
                ckpt.save(step)
            scale_behind_autograd(model)
        ckpt.wait()
        assert ckpt.steps == [2, 3, 4]
        copied = [event.copied_nbytes for event in ckpt.events if event.__class__.__name__ == "Saved"]
        assert min(copied) > model[0].weight.nbytes  # type: ignore[index]
    for step in (2, 3, 4):
        found = everystep.load(tmp_path / f"step-{step:012d}")["model"]["0.weight"]
        assert torch.equal(found, wanted[step])


class WithMomentum(nn.Module):
    """A frozen encoder that follows the trained one in forward, as in contrastive learning."""

    def __init__(self, layout: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Conv2d(64, 64, 9)
        self.key = copy.deepcopy(self.query).requires_grad_(False).to(memory_format=layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data.mul_(0.9).add_(query.data, alpha=0.1)
        return self.query(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_momentum_encoder_never_fails_a_save(
    tmp_path: Path, crawling_device: None, layout: torch.memory_format
) -> None:
    model = WithMomentum(layout)
    state = {"model": model, "optimizer": torch.optim.SGD(model.query.parameters(), lr=0.1)}
    wanted = {}
    with Checkpointer(tmp_path, state, keep=Keep(last=9), options=ONE_WINDOW) as ckpt:
        for step in range(1, 5):
            state["optimizer"].zero_grad()
            model(torch.randn(1, 64, 9, 9)).sum().backward()
            state["optimizer"].step()
            wanted[step] = model.key.weight.detach().clone()
            ckpt.save(step)
    for step, weight in wanted.items():
        assert torch.equal(everystep.load(tmp_path / f"step-{step:012d}")["model"]["key.weight"], weight)


@pytest.mark.timeout(120)
def test_a_compiled_step_does_not_compile_the_wait(tmp_path: Path, slow_device: None) -> None:
    from torch._dynamo.utils import counters

    model = layer_stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = iter(range(100))

    @torch.compile(backend="eager")
    def update() -> None:
        optimizer.step()

    wanted, seen = {}, []
    state = {"model": model, "optimizer": optimizer}
    try:
        with Checkpointer(tmp_path, state, keep=Keep(last=9), options=SMALL_WINDOWS) as ckpt:
            for step in range(1, 6):
                optimizer.zero_grad()
                train_step(model, next(steps)).backward()
                update()
                seen.append(counters["frames"]["total"])
                wanted[step] = copy.deepcopy(model.state_dict())
                saving = ckpt.save(step)
                assert saving is not None
                assert not saving.done()  # so the next step has to wait
    finally:
        torch._dynamo.reset()
    assert len(set(seen[1:])) == 1, "the compiler looks at what is not the training's"
    for step, weights in wanted.items():
        assert same(dict(everystep.load(tmp_path / f"step-{step:012d}")["model"]), dict(weights))


def test_what_has_left_memory_may_change(tmp_path: Path) -> None:
    model = layer_stack()
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        before = model[0].weight.detach().clone()  # type: ignore[index]
        saving = ckpt.save(1)
        saving.result()  # type: ignore[union-attr]
        scale(model)
    assert torch.equal(everystep.load(tmp_path)["model"]["0.weight"], before)


def test_update_brackets_a_hand_written_step(tmp_path: Path, slow_device: None) -> None:
    model = layer_stack()
    wanted = {}
    with Checkpointer(tmp_path, {"model": model}, keep=Keep(last=9), options=SMALL_WINDOWS) as ckpt:
        for step in range(1, 4):
            model.zero_grad()
            train_step(model, step).backward()
            with torch.no_grad(), ckpt.update():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            wanted[step] = copy.deepcopy(model.state_dict())
            ckpt.save(step)
            assert ckpt.mode == "overlap"
    for step, weights in wanted.items():
        assert same(dict(everystep.load(tmp_path / f"step-{step:012d}")["model"]), dict(weights))


def test_a_save_inside_of_update_copies_and_after_it_leaves_are_read_in_place_again(tmp_path: Path) -> None:
    """Inside of the block weights change at any moment; from its end on they do not until the next one."""
    model = layer_stack()
    wanted = {}
    with Checkpointer(tmp_path, {"model": model}, keep=Keep(last=9)) as ckpt:
        for step in (1, 2):
            with torch.no_grad(), ckpt.update():
                scale(model)
                assert ckpt.mode == "snapshot"
                wanted[2 * step] = copy.deepcopy(model.state_dict())
                ckpt.save(2 * step)
                scale(model)  # the save has copied what it reads
            assert ckpt.mode == "overlap"
            wanted[2 * step + 1] = copy.deepcopy(model.state_dict())
            ckpt.save(2 * step + 1)
        ckpt.wait()
        in_place = {event.step: event.in_place_nbytes for event in ckpt.events if isinstance(event, Saved)}
    assert (in_place[2], in_place[4]) == (0, 0)
    assert min(in_place[3], in_place[5]) >= sum(parameter.nbytes for parameter in model.parameters())
    for step, weights in wanted.items():
        assert same(dict(everystep.load(tmp_path / f"step-{step:012d}")["model"]), dict(weights))


def test_an_update_ends_with_its_outermost_block_also_after_an_error(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, {"model": layer_stack()}) as ckpt:
        with contextlib.suppress(ZeroDivisionError), ckpt.update():
            with ckpt.update():
                pass
            assert ckpt.mode == "snapshot"
            raise ZeroDivisionError
        assert ckpt.mode == "overlap"


# --- snapshot -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_nbytes", [2 << 20, 66 << 20, 256 << 20])
@pytest.mark.parametrize("mode", ["overlap", "snapshot"])
def test_without_an_optimizer_every_byte_has_left_when_save_returns(
    tmp_path: Path, slow_device: None, memory_nbytes: int, mode: Any
) -> None:
    """Nothing fits the smallest budget, some fits the second, all the third."""
    state = {name: np.full(1 << 20, 0, np.uint8) for name in "abcd"}
    options = Options(backend="threads", memory_nbytes=memory_nbytes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Checkpointer(tmp_path, state, mode=mode, keep=Keep(last=9), options=options) as ckpt:
            for step in range(1, 4):
                for array in state.values():
                    array[:] = step
                ckpt.save(step)
            assert ckpt.mode == "snapshot"
    assert [str(w.message) for w in caught if "no optimizer" in str(w.message)] == (
        [str(w.message) for w in caught] if mode == "overlap" else []
    )
    assert len(caught) == (mode == "overlap")
    for step in range(1, 4):
        found = everystep.load(tmp_path / f"step-{step:012d}")
        assert all((array == step).all() for array in found.values())


def test_stable_arrays_are_read_in_place(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    average = everystep.stable(torch.zeros(1 << 20))
    table = everystep.stable({"t": np.zeros(1 << 20)})
    state = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "average": average,
        "table": table,
    }
    with Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1)
        ckpt.wait()
        assert ckpt.events[-1].copied_nbytes == 0
    with pytest.raises(TypeError, match="stable"):
        everystep.stable(3)


@pytest.mark.filterwarnings("ignore:the state holds no optimizer")
@pytest.mark.parametrize("mode", ["overlap", "snapshot"])
def test_arrays_that_cannot_change_are_read_in_place_in_any_mode(tmp_path: Path, mode: Mode) -> None:
    state = {"kept": unchanging(np.arange(1 << 18)), "own": np.zeros(1000)}
    with Checkpointer(tmp_path, state, mode=mode) as ckpt:
        ckpt.save(1)
        ckpt.wait()
        saved = ckpt.events[-1]
        assert (saved.in_place_nbytes, saved.copied_nbytes) == (8 << 18, 8000)
    assert (everystep.load(tmp_path)["kept"] == np.arange(1 << 18)).all()


def test_frozen_parameters_are_read_in_place_and_an_average_is_copied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 3))
    model[0].requires_grad_(False)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    nbytes = sum(p.nbytes for p in model.parameters())
    frozen = sum(p.nbytes for p in model[0].parameters())
    with Checkpointer(tmp_path, {"m": model, "o": optimizer, "ema": average}) as ckpt:
        for step in range(1, 4):
            ckpt.save(step)
            ckpt.wait()
            event = ckpt.events[-1]
            copied = nbytes + (frozen if step == 1 else 0)  # until it was seen not to change
            assert (event.in_place_nbytes, event.copied_nbytes) == (2 * nbytes - copied, copied)


def test_restoring_waits_for_the_save_under_way(tmp_path: Path, slow_device: None) -> None:
    model = layer_stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}, options=SMALL_WINDOWS) as ckpt:
        before = model[0].weight.detach().clone()  # type: ignore[index]
        ckpt.save(1)
        assert ckpt.restore() == 1
        assert torch.equal(model[0].weight, before)  # type: ignore[index]


def test_the_hooks_are_gone_after_closing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    threads = set(threading.enumerate())
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        ckpt.save(1)
    assert not optimizer._optimizer_step_pre_hooks
    for thread in set(threading.enumerate()) - threads:
        thread.join(PATIENCE)  # it has said that the save is over, and ends
        assert not thread.is_alive()


def test_progress_says_what_is_under_way(tmp_path: Path, slow_device: None) -> None:
    model = layer_stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}, options=SMALL_WINDOWS) as ckpt:
        assert ckpt.progress() == "idle, nothing durable yet"
        ckpt.save(1)
        assert "saving step 1: " in ckpt.progress()
        ckpt.wait()
        assert ckpt.progress() == "idle, step 1 durable"


def test_a_replaced_optimizer_is_let_go_and_the_new_one_is_read_in_place(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    state: dict[str, Any] = {"model": model}
    made: list[weakref.ref[Any]] = []
    saved: list[Saved] = []
    with Checkpointer(tmp_path, state, keep=Keep(last=9)) as ckpt:
        ckpt.events.subscribe(lambda event: saved.append(event) if isinstance(event, Saved) else None)
        for step in range(1, 7):
            state["optimizer"] = torch.optim.AdamW(model.parameters())
            made.append(weakref.ref(state["optimizer"]))
            gc.collect()
            assert [reference() is None for reference in made] == [True] * (step - 1) + [False]
            model(torch.ones(2, 64)).sum().backward()
            state["optimizer"].step()
            ckpt.save(step)
            ckpt.wait()
    assert len({(event.in_place_nbytes, event.copied_nbytes) for event in saved}) == 1
    assert saved[0].in_place_nbytes >= 3 * 64 * 64 * 4


def test_an_optimizer_that_left_the_state_is_not_waited_for(tmp_path: Path) -> None:
    """Neither does it own what it still refers to: that is another's, or copied."""
    model = nn.Linear(4, 4)
    old, new = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2))
    state = {"model": model, "optimizer": old}
    with Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1)
        ckpt.wait()
        state["optimizer"] = new
        ckpt.save(2)
        assert not old._optimizer_step_pre_hooks
        assert len(new._optimizer_step_pre_hooks) == 1
