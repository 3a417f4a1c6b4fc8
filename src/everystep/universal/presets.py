"""Rules for known systems: Megatron GPT, Llama under tensor parallelism, Hugging Face names, DeepSpeed's own.

A user puts rules before those of a preset (``Spec([...]) + Spec.preset("llama")``): the first that matches
wins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everystep.errors import SpecError
from everystep.universal.cuts import even
from everystep.universal.rules import (
    Layout,
    Pad,
    Rule,
    fused,
    pad,
    partial,
    rename,
    replicated,
    rule,
    shard,
    tied,
    unique,
)


def megatron_gpt(
    *,
    vocab_size: int | None = None,
    swiglu: bool = False,
    checkpoint_version: float = 3.0,
    tied_output: bool = True,
) -> tuple[Rule, ...]:
    """Megatron-LM's GPT, in the names of its own modules and in those of Megatron-Core.

    QKV is stored head by head (one group of heads after another), so that ranks follow each other. Only
    version 0 has all queries of a rank first.

    Args:
        vocab_size: The length of the vocabulary without padding. Without it the padding stays.
        swiglu: Whether gate and up projection are fused.
        checkpoint_version: Megatron's version of the format.
        tied_output: Whether the output layer, where a stage has one, is the word embedding.
    """
    vocabulary: tuple[Pad, ...] = () if vocab_size is None else (pad(0, vocab_size),)
    qkv: Layout = fused(0, 3) if checkpoint_version < 1 else shard(0)
    up: Layout = fused(0, 2) if swiglu else shard(0)
    both = r"(?:self_attention|attention|inter_attention|cross_attention)"
    embedding = r"re:(?:language_model\.)?embedding\.word_embeddings\.weight"
    output: tuple[Rule, ...] = (rule(r"re:(?:language_model\.)?output_layer\.weight", shard(0), *vocabulary),)
    head: tuple[Rule, ...] = ()
    if tied_output:
        head = (
            rule("word_embeddings_for_head.weight", tied("language_model.embedding.word_embeddings.weight")),
            rule("output_layer.weight", tied("embedding.word_embeddings.weight")),
        )
    return (
        *head,
        rule(embedding, shard(0), *vocabulary),
        *output,
        rule(r"re:(?:.*\.)?position_embeddings\.weight", replicated()),
        rule(rf"re:.*\.{both}\.(?:query_key_value|linear_qkv)\.(?:weight|bias)", qkv),
        rule(rf"re:.*\.{both}\.(?:query|key_value|linear_q|linear_kv)\.(?:weight|bias)", shard(0)),
        rule(rf"re:.*\.{both}\.(?:dense|linear_proj)\.weight", shard(1)),
        rule(r"re:.*\.mlp\.(?:dense_h_to_4h|linear_fc1)\.(?:weight|bias)", up),
        rule(r"re:.*\.mlp\.(?:dense_4h_to_h|linear_fc2)\.weight", shard(1)),
        # Biases that are added after the sum over ranks, and norms.
        rule(r"re:.*\.(?:dense|linear_proj|dense_4h_to_h|linear_fc2)\.bias", replicated()),
        rule(
            r"re:(?:.*\.)?[A-Za-z_]*(?:layernorm|layer_norm|norm)[A-Za-z_]*(?:\.|_)(?:weight|bias)",
            replicated(),
        ),
        rule(r"re:.*\.mlp\.router\..*", replicated()),
    )


def llama(*, vocab_size: int | None = None, qkv: Sequence[int] | None = None) -> tuple[Rule, ...]:
    """Llama-style models under tensor parallelism, in the module names of Hugging Face and of Meta.

    Args:
        vocab_size: The length of the vocabulary without padding. Without it the padding stays.
        qkv: The numbers of query, key and value heads (or the sizes), for models that fuse the three.
    """
    vocabulary: tuple[Pad, ...] = () if vocab_size is None else (pad(0, vocab_size),)
    fused_qkv: tuple[Rule, ...] = ()
    if qkv is not None:
        fused_qkv = (rule(r"re:.*\.(?:qkv_proj|wqkv)\.(?:weight|bias)", fused(0, shares=list(qkv))),)
    return (
        rule(r"re:(?:.*\.)?(?:embed_tokens|lm_head|output)\.weight", shard(0), *vocabulary),
        rule("tok_embeddings.weight", shard(1)),
        *fused_qkv,
        rule(r"re:.*\.(?:q_proj|k_proj|v_proj|wq|wk|wv)\.(?:weight|bias)", shard(0)),
        rule(r"re:.*\.(?:o_proj|wo)\.weight", shard(1)),
        rule(r"re:.*\.gate_up_proj\.(?:weight|bias)", fused(0, 2)),
        rule(r"re:.*\.(?:gate_proj|up_proj|w1|w3)\.(?:weight|bias)", shard(0)),
        rule(r"re:.*\.(?:down_proj|w2)\.weight", shard(1)),
        rule(r"re:.*\.(?:o_proj|wo|down_proj|w2)\.bias", replicated()),
        rule(r"re:(?:.*\.)?[a-z_]*norm\.(?:weight|bias)", replicated()),
        rule(r"re:(?:.*\.)?(?:rope\.freqs|rotary_emb\.inv_freq)", replicated()),
    )


def huggingface(*, tied_output: str | None = None) -> tuple[Rule, ...]:
    """Whole parameters in the names of Hugging Face: wrappers' prefixes are taken away.

    Args:
        tied_output: The embedding that ``lm_head.weight`` is tied to.
    """
    wrapped = r"(?:module\.|_orig_mod\.|_fsdp_wrapped_module\.)*"
    head: tuple[Rule, ...] = ()
    if tied_output is not None:
        head = (rule(rf"re:{wrapped}lm_head\.weight", tied(tied_output), rename("lm_head.weight")),)
    return (*head, rule(rf"re:{wrapped}(.+)", unique(), rename(r"\1")))


_PRESETS: Mapping[str, Callable[..., tuple[Rule, ...]]] = {
    "megatron-gpt": megatron_gpt,
    "llama": llama,
    "huggingface": huggingface,
}


def preset_rules(name: str, options: Mapping[str, object]) -> tuple[Rule, ...]:
    """The rules of a preset by its name."""
    if name not in _PRESETS:
        raise SpecError(f"there is no preset {name!r}; there are {', '.join(_PRESETS)}")
    made = _PRESETS[name]
    try:
        return made(**options)
    except TypeError as error:
        raise SpecError(f"preset {name!r}: {error}") from None


def deepspeed_rules(info: Mapping[str, object]) -> tuple[Rule, ...]:
    """The rules of DeepSpeed's ``universal_checkpoint_info``, in its order of precedence.

    Its patterns are regular expressions that match at the start of a name. What none of them matches is
    joined along dimension 0. Parameters of the vocabulary are cut to its true length after that. Which
    parameters several pipeline stages hold (``pipeline_replicated_parameter_patterns``) is for the reader of
    the files.
    """
    layouts: list[tuple[str, Layout]] = []
    simple: tuple[tuple[str, Layout], ...] = (
        ("tp_replicated_parameter_patterns", replicated()),
        ("parameter_to_average_patterns", partial("mean")),
        ("parameter_with_2_sub_params_cat_dim_0", fused(0, 2)),
    )
    for key, layout in simple:
        layouts += [(pattern, layout) for pattern in _patterns(info, key)]
    _require_even_widths(info)
    for entry in _list(info, "parameter_with_sub_params"):
        layouts += _sub_params(entry)
    layouts += [(pattern, shard(1)) for pattern in _patterns(info, "parameter_with_row_parallelism_patterns")]
    layouts.append(("", shard(0)))
    rules: list[Rule] = []
    vocabulary = info.get("original_vocab_size")
    words = _patterns(info, "vocabulary_parameter_patterns")
    if words and vocabulary is not None:
        if not isinstance(vocabulary, int):
            raise SpecError(f"original_vocab_size is {vocabulary!r}, not a whole number")
        for word in words:
            for pattern, layout in layouts:
                rules.append(rule(f"re:(?={word})(?:{pattern}).*", layout, pad(0, vocabulary)))
    rules += [rule(f"re:(?:{pattern}).*", layout) for pattern, layout in layouts]
    return tuple(rules)


def _sub_params(entry: object) -> list[tuple[str, Layout]]:
    """`entry`: patterns, the shape with a tuple of sizes in one place, and which place that is."""
    found: dict[str, Any] = {
        key: entry.get(key) if isinstance(entry, Mapping) else getattr(entry, key, None)
        for key in ("patterns", "shape", "partition_dim")
    }
    patterns, shape, dim = found["patterns"], found["shape"], found["partition_dim"]
    if (
        not isinstance(patterns, (list, tuple))
        or not isinstance(shape, (list, tuple))
        or not isinstance(dim, int)
        or not 0 <= dim < len(shape)
    ):
        raise SpecError(f"parameter_with_sub_params: {entry!r} lacks patterns, shape or partition_dim")
    sizes = shape[dim]
    if not isinstance(sizes, (list, tuple)) and (type(sizes) is not int or sizes < 1):
        raise SpecError(f"parameter_with_sub_params: {entry!r} has no sizes, nor a number of equal parts")
    # Sizes are a tuple. One number, as older versions wrote, is how many equal parts there are.
    layout = fused(dim, sizes if isinstance(sizes, int) else list(sizes))
    return [(_checked(pattern), layout) for pattern in patterns]


def _require_even_widths(info: Mapping[str, object]) -> None:
    """Version 0.4 tells how long each rank's piece of each part is; `fused` knows only even pieces."""
    widths = info.get("sub_param_shard_widths") or {}
    if not isinstance(widths, Mapping):
        raise SpecError(f"sub_param_shard_widths is {type(widths).__name__}, not a dictionary")
    for pattern, parts in widths.items():
        for part in parts if isinstance(parts, (list, tuple)) else [None]:
            if not isinstance(part, (list, tuple)) or not all(type(width) is int for width in part):
                raise SpecError(f"sub_param_shard_widths of {pattern!r} are {parts!r}, not lists of lengths")
            if list(part) != even(sum(part), len(part)):
                raise SpecError(
                    f"sub_param_shard_widths: the ranks hold {list(part)} of a part of {pattern!r}, which no "
                    "rule can say yet; only parts that are cut evenly are read"
                )


def _patterns(info: Mapping[str, object], key: str) -> list[str]:
    return [_checked(pattern) for pattern in _list(info, key)]


def _list(info: Mapping[str, object], key: str) -> Sequence[object]:
    found = info.get(key) or ()
    if not isinstance(found, (list, tuple)):
        raise SpecError(f"{key} is {type(found).__name__}, not a list")
    return found


def _checked(pattern: object) -> str:
    if not isinstance(pattern, str):
        raise SpecError(f"a pattern is text, not {pattern!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise SpecError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern
