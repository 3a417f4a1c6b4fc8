"""Promise: a checkpoint whose parameters have other names can be restored, and the error says how."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import everystep
from everystep.universal import Spec, pad, rename, rule, shard, tied


class Wrapped(nn.Module):
    """As DistributedDataParallel before it is taken off: every name begins with ``module.``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(model: nn.Module, inner: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        inner(torch.rand(5, 3)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.fixture
def wrapped(tmp_path: Path) -> tuple[Path, nn.Sequential, torch.optim.Optimizer]:
    inner = network(0)
    model = Wrapped(inner)
    optimizer = trained(model, inner)
    everystep.save(tmp_path / "wrapped", {"model": model, "optimizer": optimizer}, step=300)
    return tmp_path / "wrapped", inner, optimizer


def same(one: Any, other: Any) -> bool:
    """Whether two state dicts are equal, whole."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


FORMS = [
    {"module.": ""},
    {"other.": "no.", "module.": ""},
    Spec([rule("module.*", rename("*"))]),
    [rule("re:module\\.(.*)", rename("\\1")), rule("*")],
    (rule("module.*", rename("*")) for _ in range(1)),
]


@pytest.mark.parametrize("form", FORMS, ids=["prefix", "prefixes", "spec", "rules", "iterator"])
def test_every_form_restores_model_and_optimizer_bit_for_bit(wrapped: Any, form: Any) -> None:
    path, inner, optimizer = wrapped
    model = network(1)
    target = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        everystep.load(path, into={"model": model, "optimizer": target}, rename=form)
    assert same(dict(model.state_dict()), dict(inner.state_dict()))
    assert same(target.state_dict(), optimizer.state_dict())


def test_the_error_offers_the_prefix_ready_to_paste(wrapped: Any) -> None:
    path, inner, optimizer = wrapped
    model = network(1)
    into = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(everystep.StateMismatch) as caught:
        everystep.load(path, into=into)
    pasted = re.search(r"rename=(\{.*?\})", str(caught.value))
    assert pasted is not None, str(caught.value)
    everystep.load(path, into=into, rename=eval(pasted[1]))
    assert same(dict(model.state_dict()), dict(inner.state_dict()))
    assert same(into["optimizer"].state_dict(), optimizer.state_dict())


def test_a_prefix_that_only_the_target_has_is_offered(tmp_path: Path) -> None:
    everystep.save(tmp_path / "plain", {"model": network(0)})
    model = Wrapped(network(1))
    with pytest.raises(everystep.StateMismatch, match=re.escape('rename={"": "module."}')):
        everystep.load(tmp_path / "plain", into={"model": model})
    everystep.load(tmp_path / "plain", into={"model": model}, rename={"": "module."})
    assert same(dict(model.module.state_dict()), dict(network(0).state_dict()))


def test_the_offer_is_not_made_where_it_would_harm_what_fits(tmp_path: Path) -> None:
    saved = {"a": np.ones(1), "b": np.ones(2), "c": np.ones(3)}
    everystep.save(tmp_path / "plain", {"model": saved})
    target = {"a": np.zeros(1), "b": np.zeros(2), "x.c": np.zeros(3)}
    with pytest.raises(everystep.StateMismatch) as caught:
        everystep.load(tmp_path / "plain", into={"model": target})
    assert "rename=" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_a_foreign_file_with_a_prefix(tmp_path: Path, prefix: str) -> None:
    source = network(0)
    named = {f"{prefix}{key}": value for key, value in source.state_dict().items()}
    torch.save({"model": named}, tmp_path / "w.pt")
    model = network(1)
    with pytest.raises(everystep.StateMismatch, match=re.escape(f'rename={{"{prefix}": ""}}')):
        everystep.load(tmp_path / "w.pt", into={"model": model})
    everystep.load(tmp_path / "w.pt", into={"model": model}, rename={prefix: ""})
    assert same(dict(model.state_dict()), dict(source.state_dict()))


def test_names_in_a_dict_of_arrays_are_renamed(tmp_path: Path) -> None:
    everystep.save(
        tmp_path / "one", {"weights": {"module.a": np.arange(3), "module.b": np.ones(2)}, "module.n": 3}
    )
    into = {"weights": {"a": np.zeros(3, int), "b": np.zeros(2)}, "module.n": 0}
    everystep.load(tmp_path / "one", into=into, rename={"module.": ""})
    assert into["weights"]["a"].tolist() == [0, 1, 2]
    assert into["module.n"] == 3


def test_two_names_that_become_one_must_be_the_same_bytes(tmp_path: Path) -> None:
    def saved(name: str, other: np.ndarray) -> Path:
        everystep.save(tmp_path / name, {"m": {"embed": np.arange(4.0), "head": other}})
        return tmp_path / name

    into = {"m": {"embed": np.zeros(4)}}
    everystep.load(saved("same", np.arange(4.0)), into=into, rename=[rule("head", tied("embed"))])
    assert into["m"]["embed"].tolist() == [0, 1, 2, 3]
    with pytest.raises(everystep.StateMismatch, match="another entry of that name"):
        everystep.load(saved("other", np.zeros(4)), into=into, rename={"head": "embed"})


def test_two_optimizer_states_that_become_one_are_refused(tmp_path: Path) -> None:
    state = {0: {"m": torch.ones(2)}, "a": {"m": torch.ones(2)}, "x.a": {"m": torch.zeros(2)}}
    groups = [{"params": ["a", "x.a"], "lr": 0.1}]
    everystep.save(tmp_path / "one", {"optimizer": {"state": state, "param_groups": groups}})
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    with pytest.raises(everystep.StateMismatch, match="another entry of that name"):
        everystep.load(tmp_path / "one", into={"optimizer": optimizer}, rename={"x.": ""})


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("module.", TypeError, "a dict of prefixes"),
        (7, TypeError, "a dict of prefixes"),
        ({"a": 1}, TypeError, "names for names"),
        ([rule("*", shard(0))], everystep.errors.SpecError, "new names only"),
        ([rule("*", pad(0, 3))], everystep.errors.SpecError, "new names only"),
        (["a"], TypeError, "rules"),
    ],
)
def test_what_gives_no_names_is_refused(
    tmp_path: Path, given: Any, error: type[Exception], said: str
) -> None:
    everystep.save(tmp_path / "one", {"w": np.ones(2)})
    with pytest.raises(error, match=said):
        everystep.load(tmp_path / "one", into={"w": np.zeros(2)}, rename=given)


def test_without_a_target_there_is_nothing_to_rename_for(tmp_path: Path) -> None:
    everystep.save(tmp_path / "one", {"w": np.ones(2)})
    with pytest.raises(TypeError, match="goes with into="):
        everystep.load(tmp_path / "one", rename={"w": "v"})


def test_selected_parts_are_named_as_in_the_checkpoint(wrapped: Any) -> None:
    path, inner, _ = wrapped
    model = network(1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    everystep.load(path, into={"model": model}, select="model.module.2.*", rename={"module.": ""})
    now = model.state_dict()
    for key, value in now.items():
        assert torch.equal(value, inner.state_dict()[key] if key.startswith("2.") else before[key]), key


def test_a_checkpointer_restores_and_starts_from_other_names(wrapped: Any, tmp_path: Path) -> None:
    path, inner, optimizer = wrapped
    model = network(1)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with everystep.Checkpointer(tmp_path / "run", state, mode="sync") as ckpt:
        assert ckpt.restore(init_from=path, rename={"module.": ""}) == 0
        ckpt.save(1)
    assert same(dict(model.state_dict()), dict(inner.state_dict()))
    assert same(state["optimizer"].state_dict(), optimizer.state_dict())
    fresh = Wrapped(network(2))
    with everystep.Checkpointer(
        tmp_path / "run", {"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters())}
    ) as ckpt:
        with pytest.raises(everystep.StateMismatch, match=re.escape('rename={"": "module."}')):
            ckpt.restore(init_from=path, rename={"module.": ""})  # it is for the start only
        assert ckpt.restore(rename={"": "module."}) == 1
    assert same(dict(fresh.module.state_dict()), dict(inner.state_dict()))


def test_advice_names_only_arguments_of_the_call_at_hand(wrapped: Any, tmp_path: Path) -> None:
    path, _, _ = wrapped
    model = network(1)

    def message(call: Any) -> str:
        with pytest.raises(everystep.StateMismatch) as caught:
            call()
        return str(caught.value)

    with everystep.Checkpointer(tmp_path / "run", {"net": model}) as ckpt:
        said = message(lambda: ckpt.restore(init_from=path))
        assert "into=" not in said
        assert "select=" not in said
    everystep.save(tmp_path / "two", {"model": network(0), "epoch": 1})
    said = message(lambda: everystep.load(tmp_path / "two", into={"epoch": 0}))
    assert 'select="epoch"' in said
    said = message(lambda: everystep.load(tmp_path / "two", into={"w": np.zeros(3)}))
    assert "strict=False" not in said, "nothing fits: strict=False would be an error, too"


def test_a_warning_offers_the_prefix_too(wrapped: Any) -> None:
    path, _, _ = wrapped
    with pytest.warns(RuntimeWarning, match=re.escape('pass rename={"module.": ""}')):
        everystep.load(path, into={"model": network(1), "extra": 3, "optimizer": None}, strict=False)


@pytest.mark.parametrize("prefix", ["", "module.", "a.b."])
def test_a_checkpoint_that_is_a_state_dict_itself_is_said_to_be_one(tmp_path: Path, prefix: str) -> None:
    source, model = network(0), network(1)
    everystep.save(tmp_path / "bare", {f"{prefix}{key}": value for key, value in source.state_dict().items()})
    with pytest.raises(everystep.StateMismatch) as caught:
        everystep.load(tmp_path / "bare", into={"model": model})
    said = str(caught.value)
    assert "Pass what the target has under 'model' as into=" in said
    pasted = re.search(r"rename=(\{.*?\})", said)
    assert (pasted is None) == (prefix == "")
    everystep.load(tmp_path / "bare", into=model, rename=eval(pasted[1]) if pasted else None)
    assert same(dict(model.state_dict()), dict(source.state_dict()))
    with (
        everystep.Checkpointer(tmp_path / "run", {"model": model}) as ckpt,
        pytest.raises(everystep.StateMismatch, match="it is one state dict itself") as caught,
    ):
        ckpt.restore(init_from=tmp_path / "bare")
    assert "into=" not in str(caught.value)
