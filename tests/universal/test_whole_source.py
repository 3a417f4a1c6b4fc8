"""A spec for parameters that are whole already: names, padding, ties; layouts change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from everystep import universal
from everystep.errors import SpecError
from everystep.universal import (
    Source,
    SourceLeaf,
    Spec,
    fused,
    pad,
    rename,
    rule,
    shard,
    tied,
)
from everystep.universal.whole_source import apply_spec
from support.foreign.source_leaves import source_of_leaves
from support.worlds.rank_tensors import Array, read_leaf, store


def leaf_of(folder: Path, name: str, array: Array) -> SourceLeaf:
    return replace(store(folder / name, array), name=name)


@pytest.fixture
def words() -> Array:
    return np.arange(24, dtype=np.float32).reshape(6, 4)


def make(folder: Path, words: Array) -> Source:
    leaves = [
        leaf_of(folder, name, array)
        for name, array in {
            "model.wte.weight": words,
            "model.head.weight": words[:5],
            "model.h.0.qkv.weight": words + 50,
            "optimizer.wte.weight.exp_avg": words + 100,
            "optimizer.wte.weight.step": np.array(3, dtype=np.float32),
        }.items()
    ]
    groups = [{"lr": 0.1, "params": ["wte.weight", "h.0.qkv.weight"]}]
    return source_of_leaves(str(folder), leaves, step=1, groups=groups, epoch=3)


SPEC = Spec(
    [
        rule("wte.weight", shard(0), pad(0, 5), rename("embed.weight")),
        rule("head.weight", tied("embed.weight")),
        rule("h.*.qkv.weight", fused(0, 3), pad(1, 3), rename("layers.*.qkv.weight")),
    ]
)


def test_names_padding_and_ties(tmp_path: Path, words: Array) -> None:
    found = apply_spec(make(tmp_path, words), SPEC)
    leaves = {leaf.name: leaf for leaf in found.leaves}
    assert list(leaves) == [
        "model.embed.weight",
        "model.layers.0.qkv.weight",
        "optimizer.embed.weight.exp_avg",
        "optimizer.embed.weight.step",
    ]
    np.testing.assert_array_equal(read_leaf(leaves["model.embed.weight"]), words[:5])
    np.testing.assert_array_equal(read_leaf(leaves["model.layers.0.qkv.weight"]), words[:, :3] + 50)
    np.testing.assert_array_equal(read_leaf(leaves["optimizer.embed.weight.exp_avg"]), words[:5] + 100)
    assert leaves["optimizer.embed.weight.step"].shape == ()
    assert len(leaves["model.embed.weight"].copies) == 1
    assert found.aliases == {"model.head.weight": "model.embed.weight"}
    groups: object = found.values["optimizer.param_groups"]
    assert groups == [{"lr": 0.1, "params": ["embed.weight", "layers.0.qkv.weight"]}]
    assert found.values["epoch"] == 3


def test_a_tied_parameter_that_differs_is_found(tmp_path: Path, words: Array) -> None:
    made = make(tmp_path, words)
    (tmp_path / "model.head.weight").write_bytes((words[:5] + 1).tobytes())
    embed = apply_spec(made, SPEC).leaves[0]
    with pytest.raises(AssertionError):
        read_leaf(embed)


def test_what_does_not_fit_or_has_no_rule_is_an_error(tmp_path: Path, words: Array) -> None:
    made = make(tmp_path, words)
    with pytest.raises(SpecError, match=r"'wte\.weight'.*length 6, less than 7"):
        apply_spec(made, Spec([rule("wte.weight", pad(0, 7)), rule("*")]))
    with pytest.raises(SpecError, match=r"no rule matches 'head\.weight'"):
        apply_spec(made, Spec([rule("wte*"), rule("h.*")]))


def test_describe_applies_a_spec_to_any_such_source(tmp_path: Path, words: Array) -> None:
    np.savez(tmp_path / "a.npz", **{"module.w": words})
    found = universal.describe(tmp_path / "a.npz", spec=Spec.preset("huggingface"))
    assert [leaf.name.removeprefix("model.") for leaf in found.leaves] == ["w"]
