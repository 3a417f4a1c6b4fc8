"""``everystep spec check``: which rule takes which parameter, and what does not fit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from support.foreign.megatron_writer import Model, write_megatron
from support.processes.command import command

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")

PRESET = 'preset = { name = "megatron-gpt", vocab_size = 21, swiglu = true }\n'


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_megatron(tmp_path_factory.mktemp("megatron"), Model(), optimizer=False)


def spec_file(folder: Path, text: str) -> Path:
    path = folder / "spec.toml"
    path.write_text(text)
    return path


def test_every_parameter_is_listed_with_its_rule(tmp_path: Path, source: Path) -> None:
    file = spec_file(tmp_path, PRESET + '[[rule]]\nmatch = "*position*"\nreplicated = true\n')
    outcome = command("spec", "check", file, source)
    assert outcome.code == 0, outcome.out + outcome.err
    row = "language_model.embedding.position_embeddings.weight 1 *position* replicated"
    assert row in outcome.lines
    assert "every parameter has a rule, and the rules fit" in outcome.out
    found = command("spec", "check", file, source, "--json").document
    assert (found["kind"], found["unmatched"], found["problem"]) == ("megatron", [], None)
    assert found["parameters"][0] == {
        "name": "language_model.embedding.word_embeddings.weight",
        "rule": found["parameters"][0]["rule"],
        "match": r"re:(?:language_model\.)?embedding\.word_embeddings\.weight",
        "says": "shard(0), pad(0, to 21)",
        "new_name": "language_model.embedding.word_embeddings.weight",
    }
    assert found["unused"]


def test_convert_takes_the_spec(tmp_path: Path, source: Path) -> None:
    norm = "language_model.encoder.final_layernorm.weight"
    file = spec_file(tmp_path, PRESET + f'[[rule]]\nmatch = "{norm}"\nreplicated = true\nrename = "norm"\n')
    outcome = command("convert", source, tmp_path / "out", "--spec", file)
    assert outcome.code == 0, outcome.out + outcome.err
    leaves = command("show", tmp_path / "out", "--json").document["leaves"]
    assert "model.norm" in {leaf["name"] for leaf in leaves}
    refused = command("convert", tmp_path / "out", tmp_path / "other", "--kind", "everystep", "--spec", file)
    assert refused.code == 1
    assert "other systems" in refused.err
    assert not (tmp_path / "other").exists()


def test_parameters_without_a_rule_are_named(tmp_path: Path, source: Path) -> None:
    file = spec_file(tmp_path, '[[rule]]\nmatch = "*.weight"\nshard = 0\n')
    outcome = command("spec", "check", file, source)
    assert outcome.code == 1
    assert "no rule matches 'language_model.encoder.layers.0.input_layernorm.bias'" in outcome.out
    found = command("spec", "check", file, source, "--json").document
    assert found["unmatched"]
    assert all(name.endswith(".bias") for name in found["unmatched"])


def test_a_rule_that_does_not_fit_is_a_problem(tmp_path: Path, source: Path) -> None:
    file = spec_file(tmp_path, '[[rule]]\nmatch = "*"\nfused = { dim = 0, parts = 7 }\n')
    outcome = command("spec", "check", file, source)
    assert outcome.code == 1
    assert "does not fit" in outcome.out


@pytest.mark.parametrize(
    ("text", "message"), [("x = [", "not TOML"), ('[[rule]]\nmatch = "re:("\n', "spec.toml: rule 1")]
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, source: Path, text: str, message: str) -> None:
    outcome = command("spec", "check", spec_file(tmp_path, text), source)
    assert (outcome.code, outcome.out) == (1, "")
    assert message in outcome.err


def test_what_is_missing_is_named(tmp_path: Path, source: Path) -> None:
    outcome = command("spec", "check", tmp_path / "no.toml", source)
    assert outcome.code == 1
    assert "no.toml" in outcome.err
    outcome = command("spec", "check", spec_file(tmp_path, PRESET), tmp_path / "nothing")
    assert outcome.code == 1
    assert "there is no checkpoint at" in outcome.err
    assert command("spec", "check").code == 2
    assert command("spec").code == 2
