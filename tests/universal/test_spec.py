"""The language: patterns, rules, their order, what is an error, and the presets."""

from __future__ import annotations

import sys

import pytest

from everystep.errors import SpecError
from everystep.universal import (
    Spec,
    flat,
    fused,
    pad,
    part,
    partial,
    rename,
    replicated,
    rule,
    shard,
    tied,
    unique,
)

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")


def test_the_first_rule_that_matches_takes_a_name() -> None:
    spec = Spec(
        [
            rule("*.norm.weight", replicated()),
            rule("re:h\\.\\d+\\.(mlp|attn)\\..*", shard(1)),
            rule("*", shard(0)),
        ]
    )
    found = spec.explain(["h.0.norm.weight", "h.12.mlp.weight", "h.x.mlp.weight"])
    assert [line.number for line in found] == [1, 2, 3]
    assert str(found[1]) == "h.12.mlp.weight: rule 2 ('re:h\\\\.\\\\d+\\\\.(mlp|attn)\\\\..*'): shard(1)"


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("a.*.b", "a.x.y.b", True),
        ("a.*.b", "a.b", False),
        ("a.?", "a.1", True),
        ("a.?", "aX1", False),
        ("a[01]", "a1", True),
        ("a[!01]", "a1", False),
        ("a[0-3]", "a2", True),
        ("a[", "a[", True),
        ("re:a", "ab", False),
        ("re:a.*", "a\nb", True),
    ],
)
def test_patterns_match_whole_names(pattern: str, name: str, matches: bool) -> None:
    assert rule(pattern).match.matches(name) is matches


def test_renames_carry_what_stars_and_groups_matched() -> None:
    spec = Spec(
        [
            rule("transformer.h.*.attn.*", rename("layers.*.attention.*")),
            rule(r"re:blocks\.(\d+)\.(?P<rest>.*)", rename(r"layers.\g<1>.\g<rest>")),
            rule("*"),
        ]
    )
    names = ["transformer.h.3.attn.c.weight", "blocks.7.mlp.bias", "other"]
    assert [found.new_name for found in spec.assign(names)] == [
        "layers.3.attention.c.weight",
        "layers.7.mlp.bias",
        "other",
    ]


def test_names_without_a_rule_are_listed() -> None:
    with pytest.raises(SpecError, match=r"no rule matches 'b', 'c'$") as caught:
        Spec([rule("a", unique())]).assign(["a", "b", "c"])
    assert caught.value.names == ("b", "c")
    with pytest.raises(SpecError, match="and 5 more"):
        Spec([]).assign([str(number) for number in range(25)])


def test_a_name_that_two_parameters_would_get_is_an_error() -> None:
    spec = Spec([rule("a.*", rename("x.*")), rule("b.*", rename("x.*")), rule("*")])
    with pytest.raises(SpecError, match=r"'x\.w' from 'a\.w', 'b\.w'") as caught:
        spec.assign(["a.w", "b.w", "c"])
    assert caught.value.names == ("a.w", "b.w")
    with pytest.raises(SpecError, match=r"'x\.w' from 'a\.w', 'x\.w'"):
        spec.assign(["a.w", "x.w"])


def test_a_tie_leads_to_a_stored_parameter() -> None:
    spec = Spec([rule("head", tied("embed")), rule("tok", rename("embed")), rule("*")])
    head, embed = spec.assign(["head", "tok"])
    assert (head.tied_to, embed.tied_to, embed.new_name) == ("embed", None, "embed")
    with pytest.raises(SpecError, match="'head' to 'embed'"):
        spec.assign(["head"])
    with pytest.raises(SpecError, match="'a' to 'b'"):
        Spec([rule("a", tied("b")), rule("b", tied("c")), rule("c")]).assign(["a", "b", "c"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rule("re:("), "not a regular expression"),
        (lambda: rule(""), "not be empty"),
        (lambda: rule("a", shard(0), replicated()), "at most one layout"),
        (lambda: rule("a", tied("b"), shard(0)), "laid out as the one"),
        (lambda: rule("a", tied("b"), pad(0, 5)), "padded as the one"),
        (lambda: rule("a", rename("*")), "more '\\*' than the pattern"),
        (lambda: rule("re:a(b)", rename(r"\2")), "invalid group reference"),
        (lambda: rule("a", flat(), pad(0, 3)), "flat strips its own padding"),
        (lambda: rule("a", pad(0, 2), pad(0, 3)), "two pads"),
        (lambda: shard(-1), "at least 0"),
        (lambda: shard(True), "at least 0"),
        (lambda: shard(0, pieces=0), "at least 1"),
        (lambda: fused(0), "either parts or shares"),
        (lambda: fused(0, []), "at least one part"),
        (lambda: fused(0, 0), "at least 1"),
        (lambda: fused(0, [4, -1]), "at least 1"),
        (lambda: partial("median"), "mean"),  # type: ignore[arg-type]
        (lambda: pad(0, 0), "at least 1"),
        (lambda: Spec.preset("gpt5"), "there is no preset 'gpt5'"),
        (lambda: Spec.preset("llama", heads=3), "heads"),
    ],
)
def test_a_wrong_rule_is_an_error_at_once(make: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()  # type: ignore[operator]


@needs_toml
def test_a_file_says_the_same_as_python() -> None:
    text = r"""
        [[rule]]
        match = "a.*"
        unique = true
        [[rule]]
        match = ["b", "re:c\\d"]
        replicated = true
        [[rule]]
        match = "d"
        partial = "sum"
        [[rule]]
        match = "e"
        shard = 1
        [[rule]]
        match = "f"
        shard = { dim = 0, pieces = 2 }
        rename = "g"
        [[rule]]
        match = "h"
        fused = { dim = 0, parts = [4096, { size = 1024, pieces = 2 }] }
        [[rule]]
        match = "i"
        fused = { dim = 1, parts = 2 }
        [[rule]]
        match = "j"
        fused = { dim = 0, shares = [4, 1, 1] }
        [[rule]]
        match = "k"
        flat = true
        [[rule]]
        match = "l"
        shard = 0
        pad = [{ dim = 0, to = 50257 }, { dim = 1, to = 3 }]
        [[rule]]
        match = "m"
        tied = "l"
    """
    same = Spec(
        [
            rule("a.*", unique()),
            rule("b", replicated()),
            rule("re:c\\d", replicated()),
            rule("d", partial("sum")),
            rule("e", shard(1)),
            rule("f", shard(0, 2), rename("g")),
            rule("h", fused(0, [4096, part(1024, 2)])),
            rule("i", fused(1, 2)),
            rule("j", fused(0, shares=[4, 1, 1])),
            rule("k", flat()),
            rule("l", shard(0), pad(0, 50257), pad(1, 3)),
            rule("m", tied("l")),
        ]
    )
    assert Spec.from_toml(text) == same


@needs_toml
def test_a_preset_comes_after_the_rules_of_the_file() -> None:
    spec = Spec.from_toml('preset = "llama"\n[[rule]]\nmatch = "*.extra"\nunique = true\n')
    assert spec == Spec([rule("*.extra", unique())]) + Spec.preset("llama")
    with_options = Spec.from_toml('preset = { name = "llama", vocab_size = 7, qkv = [4, 1, 1] }')
    assert with_options == Spec.preset("llama", vocab_size=7, qkv=[4, 1, 1])


@needs_toml
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = [", "not TOML"),
        ("", "no rules, and no preset"),
        ('rules = "x"', "the file has rules"),
        ('rule = "x"', r"\[\[rule\]\]"),
        ("[[rule]]\nmatch = 3", "rule 1: match is a pattern"),
        ('[[rule]]\nmatch = "a"\nsliced = 1', "rule 1: 'sliced' is no rule"),
        ('[[rule]]\nmatch = "a"\nunique = false', "unique = true"),
        ('[[rule]]\nmatch = "a"\nshard = "0"', "dimension of shard"),
        ('[[rule]]\nmatch = "a"\nfused = 3', "fused = {"),
        ('[[rule]]\nmatch = "a"\nfused = { parts = 3 }', "fused lacks dim"),
        ('[[rule]]\nmatch = "a"\nfused = { dim = 0, parts = [{ count = 3 }] }', "a part has count"),
        ('[[rule]]\nmatch = "a"\npad = { dim = 0 }', "pad lacks to"),
        ('[[rule]]\nmatch = "a"\nrename = ""', "rename takes a name"),
        ("preset = 3", "preset is a name"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Spec.from_toml(text)


@needs_toml
def test_errors_of_a_file_name_it(tmp_path: object) -> None:
    path = tmp_path / "my.toml"  # type: ignore[operator]
    path.write_text('[[rule]]\nmatch = "re:("\n')
    with pytest.raises(SpecError, match=r"my\.toml: rule 1: 're:\(' is not a regular expression"):
        Spec.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=r"my\.toml: not UTF-8"):
        Spec.load(path)


def test_without_tomllib_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tomllib", None)
    with pytest.raises(SpecError, match=r"on 3\.10, write the spec in Python"):
        Spec.from_toml("")


def layouts(spec: Spec, *names: str) -> list[str]:
    return [str(found.rule) for found in spec.assign(names)]


def test_deepspeed_info_keeps_its_order_of_precedence() -> None:
    info = {
        "original_vocab_size": 50257,
        "vocabulary_parameter_patterns": [r"tied_modules\.embed\.weight"],
        "tp_replicated_parameter_patterns": [r".*norm\.weight", r"\d+\.dense\.bias"],
        "parameter_to_average_patterns": [r".*scale"],
        "parameter_with_2_sub_params_cat_dim_0": [r"\d+\.gate_up"],
        "parameter_with_sub_params": [
            {"patterns": [r"\d+\.qkv\.weight"], "shape": ((8, 2, 2), 16), "partition_dim": 0}
        ],
        "parameter_with_row_parallelism_patterns": [r"\d+\.dense\.weight", r"\d+\.gate_up"],
    }
    names = ["1.norm.weight", "1.dense.bias", "2.scale", "3.gate_up.weight", "3.qkv.weight", "4.dense.weight"]
    assert layouts(Spec.deepspeed(info), *names, "5.other", "tied_modules.embed.weight") == [
        "replicated",
        "replicated",
        "partial(mean)",
        "fused(0, shares 1, 1)",
        "fused(0, parts 8, 2, 2)",
        "shard(1)",
        "shard(0)",
        "shard(0), pad(0, to 50257)",
    ]


def test_deepspeed_sub_params_by_number_and_with_even_widths() -> None:
    info = {
        "parameter_with_sub_params": [
            {"patterns": ["old"], "shape": (3, -1), "partition_dim": 0},
            {"patterns": ["new"], "shape": ((4, 3), -1), "partition_dim": 0},
        ],
        "sub_param_shard_widths": {"new": [[2, 2], [2, 1]]},
    }
    assert layouts(Spec.deepspeed(info), "old", "new") == ["fused(0, shares 1, 1, 1)", "fused(0, parts 4, 3)"]


def test_deepspeed_patterns_match_at_the_start_and_the_vocabulary_keeps_its_layout() -> None:
    info = {
        "original_vocab_size": 9,
        "vocabulary_parameter_patterns": ["embed"],
        "tp_replicated_parameter_patterns": ["embed.bias$", "x"],
    }
    assert layouts(Spec.deepspeed(info), "embed.bias", "embed.bias2", "xy", "yx") == [
        "replicated, pad(0, to 9)",
        "shard(0), pad(0, to 9)",
        "replicated",
        "shard(0)",
    ]
    assert layouts(Spec.deepspeed({}), "any") == ["shard(0)"]


@pytest.mark.parametrize(
    "info",
    [
        {"tp_replicated_parameter_patterns": "a"},
        {"tp_replicated_parameter_patterns": [3]},
        {"tp_replicated_parameter_patterns": ["("]},
        {"parameter_with_sub_params": [{"patterns": ["a"]}]},
        {"parameter_with_sub_params": [{"patterns": ["a"], "shape": (3,), "partition_dim": 1}]},
        {"parameter_with_sub_params": [{"patterns": ["a"], "shape": (None,), "partition_dim": 0}]},
        {"sub_param_shard_widths": {"a": [[3, 1]]}},
        {"sub_param_shard_widths": {"a": [3, 1]}},
        {"sub_param_shard_widths": [1]},
        {"vocabulary_parameter_patterns": ["a"], "original_vocab_size": "many"},
    ],
)
def test_deepspeed_info_that_makes_no_sense_is_an_error(info: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        Spec.deepspeed(info)


def test_the_megatron_preset_knows_both_families_of_names() -> None:
    spec = Spec.preset("megatron-gpt", vocab_size=100, swiglu=True)
    old = "language_model.encoder.layers.0."
    assert layouts(
        spec,
        "language_model.embedding.word_embeddings.weight",
        "language_model.embedding.position_embeddings.weight",
        f"{old}input_layernorm.weight",
        f"{old}self_attention.query_key_value.weight",
        f"{old}self_attention.dense.weight",
        f"{old}self_attention.dense.bias",
        f"{old}mlp.dense_h_to_4h.weight",
        f"{old}mlp.dense_4h_to_h.weight",
        "language_model.encoder.final_layernorm.bias",
        "word_embeddings_for_head.weight",
    ) == [
        "shard(0), pad(0, to 100)",
        "replicated",
        "replicated",
        "shard(0)",
        "shard(1)",
        "replicated",
        "fused(0, shares 1, 1)",
        "shard(1)",
        "replicated",
        "tied(language_model.embedding.word_embeddings.weight)",
    ]
    core = "decoder.layers.1."
    assert layouts(
        Spec.preset("megatron-gpt", tied_output=False),
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        f"{core}self_attention.linear_qkv.layer_norm_weight",
        f"{core}self_attention.linear_qkv.bias",
        f"{core}self_attention.q_layernorm.weight",
        f"{core}self_attention.linear_proj.weight",
        f"{core}mlp.linear_fc1.weight",
        f"{core}mlp.linear_fc1.layer_norm_weight",
        f"{core}mlp.linear_fc2.weight",
        f"{core}mlp.linear_fc2.bias",
        "decoder.final_layernorm.weight",
    ) == [
        "shard(0)",
        "shard(0)",
        "replicated",
        "shard(0)",
        "replicated",
        "shard(1)",
        "shard(0)",
        "replicated",
        "shard(1)",
        "replicated",
        "replicated",
    ]


def test_the_llama_preset_knows_the_names_of_hugging_face_and_of_meta() -> None:
    assert layouts(
        Spec.preset("llama", qkv=[32, 8, 8]),
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        "tok_embeddings.weight",
        "layers.0.attention.wk.weight",
        "layers.0.attention_norm.weight",
        "layers.0.feed_forward.w2.weight",
        "output.weight",
        "rope.freqs",
    ) == [
        "shard(0)",
        "shard(0)",
        "fused(0, shares 32, 8, 8)",
        "shard(1)",
        "fused(0, shares 1, 1)",
        "shard(1)",
        "replicated",
        "replicated",
        "shard(1)",
        "shard(0)",
        "replicated",
        "shard(1)",
        "shard(0)",
        "replicated",
    ]


def test_the_hugging_face_preset_takes_wrappers_away() -> None:
    spec = Spec.preset("huggingface", tied_output="model.embed_tokens.weight")
    found = spec.assign(["module._orig_mod.model.embed_tokens.weight", "module.lm_head.weight"])
    assert [line.new_name for line in found] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert found[1].tied_to == "model.embed_tokens.weight"
