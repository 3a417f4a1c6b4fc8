"""The examples of docs/universal-spec.md: each is parsed, and does what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from everystep.universal import Spec
from everystep.universal.rules import Rule
from everystep.universal.split import TargetLayout, split
from everystep.universal.union import union
from support.worlds.rank_tensors import carry_out, read_leaf, store

PAGE = (Path(__file__).parents[2] / "docs/universal-spec.md").read_text("utf-8")
TOML = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")


@pytest.mark.parametrize("number", range(5))
def test_every_file_is_a_spec(number: int) -> None:
    assert len(TOML) == 5
    assert Spec.from_toml(TOML[number]).rules


def rule_of(number: int, name: str) -> Rule:
    (found,) = Spec.from_toml(TOML[number]).assign([name])
    return found.rule


@pytest.mark.parametrize(("number", "tp"), [(0, 1), (0, 4), (0, 8), (1, 16)])
def test_grouped_queries_are_cut_and_joined(tmp_path: Path, number: int, tp: int) -> None:
    found = rule_of(number, "model.layers.0.self_attn.qkv_proj.weight")
    whole = np.arange(6144, dtype=np.float32)
    plans = split("qkv", whole.shape, found, TargetLayout(tp=tp))
    held = [carry_out(plan, whole) for plan in plans if plan is not None]
    width = 4096 // tp
    np.testing.assert_array_equal(held[-1][:width], np.arange(4096 - width, 4096))
    np.testing.assert_array_equal(held[-1][-1], 6143)
    ranks = [[store(tmp_path / str(rank), array)] for rank, array in enumerate(held)]
    leaf = union("qkv", found, ranks)
    assert len(leaf.copies) == (1 if tp == 16 else 0)
    np.testing.assert_array_equal(read_leaf(leaf), whole)


def test_megatron_qkv_says_the_same_as_the_preset() -> None:
    name = "language_model.encoder.layers.0.self_attention.query_key_value.weight"
    for number, version in ((2, 3.0), (3, 0)):
        (preset,) = Spec.preset("megatron-gpt", checkpoint_version=version).assign([name])
        assert rule_of(number, name).layout == preset.rule.layout


def test_the_padded_vocabulary_in_a_file_and_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = PYTHON
    names: dict[str, object] = {}
    exec(code, names)
    assert names["spec"] == Spec.from_toml(TOML[4])
    assert capsys.readouterr().out.splitlines() == [
        "transformer.wte.weight: rule 1 ('transformer.wte.weight'): "
        "shard(0), pad(0, to 50257), rename(embed.weight)",
        r"transformer.h.0.ln.weight: rule 3 ('re:transformer\\.h\\.(\\d+)\\.(.*)'): "
        r"replicated, rename(layers.\1.\2)",
        "score.weight: no rule matches",
    ]


def test_the_page_has_every_rule_and_preset() -> None:
    for word in (
        "unique",
        "replicated",
        "partial",
        "shard",
        "fused",
        "flat",
        "pad",
        "rename",
        "tied",
        "shares",
        "pieces",
    ):
        assert f"`{word}" in PAGE
    for name in ("megatron-gpt", "llama", "huggingface"):
        assert f"`{name}`" in PAGE
        assert Spec.preset(name).rules
