"""The names of parameters in models of transformers: where a model begins in them.

`from_pretrained` gives random weights to what it does not find, with a warning at most. So a writer must know
whether names are those of the model that ``config.json`` names, or have a wrapper's prefix before them
(``module.``, ``_orig_mod.``, the attribute of a Lightning module).

The table holds the families that people train most. Tests compare it with transformers itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everystep.errors import StateMismatch

# Modules that wrap another one inside of a model; no model has a part of this name.
_INNER_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# What wraps a whole model, if its kind is not known.
_OUTER_WRAPPERS = frozenset({"module", "_forward_module", "net", "network"})
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose names are alike.

    A model with a head has its base below `base`. `first` are parts that every base has, one of them at
    least.
    """

    types: tuple[str, ...]
    base: str
    first: tuple[str, ...]


def _family(types: str, base: str, first: str) -> Family:
    return Family(tuple(types.split()), base, tuple(first.split()))


_FAMILIES = (
    _family(
        "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 olmo olmo2 granite cohere smollm3 stablelm",
        "model",
        "embed_tokens",
    ),
    _family(
        "phi starcoder2 mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 gpt_oss", "model", "embed_tokens"
    ),
    _family("gpt2", "transformer", "wte"),
    _family("gptj gpt_neo codegen", "transformer", "wte"),
    _family("gpt_neox", "gpt_neox", "embed_in"),
    _family("opt", "model", "decoder"),
    _family("bloom falcon", "transformer", "word_embeddings"),
    _family("mpt", "transformer", "wte"),
    _family("bart mbart", "model", "shared encoder"),
    _family("whisper", "model", "encoder"),
    _family("t5 mt5 umt5", "", "shared"),
    _family("bert", "bert", "embeddings"),
    _family("roberta xlm-roberta camembert", "roberta", "embeddings"),
    _family("distilbert", "distilbert", "embeddings"),
    _family("deberta deberta-v2", "deberta", "embeddings"),
    _family("electra", "electra", "embeddings"),
    _family("albert", "albert", "embeddings"),
    _family("mpnet", "mpnet", "embeddings"),
    _family("vit", "vit", "embeddings"),
    _family("mamba", "backbone", "embeddings embedding"),
)
_BY_TYPE = {kind: family for family in _FAMILIES for kind in family.types}


@dataclass(frozen=True, slots=True)
class Published:
    """The names that `from_pretrained` looks for, by the names as they are. `stripped`: what they lost."""

    names: dict[str, str]
    stripped: tuple[str, ...]


def family_of(model_type: str | None) -> Family | None:
    return None if model_type is None else _BY_TYPE.get(model_type)


def published(names: Iterable[str], model_type: str | None) -> Published:
    """The names without the prefixes of wrappers.

    `StateMismatch` if they are not those of a model of this type: its weights would be random.
    """
    given = list(names)
    inner = {
        name: ".".join(part for part in name.split(".") if part not in _INNER_WRAPPERS) for name in given
    }
    stripped = [
        f"{wrapper}."
        for wrapper in sorted(_INNER_WRAPPERS)
        if any(wrapper in name.split(".") for name in given)
    ]
    family = family_of(model_type)
    prefix = _wrappers(inner.values()) if family is None else _before(family, list(inner.values()))
    if prefix:
        stripped.insert(0, prefix)
    found = {name: short[len(prefix) :] for name, short in inner.items()}
    if len(set(found.values())) != len(found):
        raise StateMismatch(f"without {', '.join(stripped)} two parameters would have one name")
    return Published(found, tuple(stripped))


def is_first(name: str, model_type: str | None) -> bool:
    """Whether this is the embedding at a model's beginning, which other names may be tied to."""
    family = family_of(model_type)
    return family is not None and any(part in name.split(".") for part in family.first)


def _before(family: Family, names: list[str]) -> str:
    """What stands before the model in all names."""
    base = rf"(?:{re.escape(family.base)}\.)?" if family.base else ""
    first = "|".join(map(re.escape, family.first))
    begin = re.compile(rf"((?:[^.]+\.)*?){base}(?:{first})(?:\.|$)")
    prefixes = {found[1] for name in names if (found := begin.match(name)) is not None}
    prefix = min(prefixes, key=len, default=None)
    kind = family.types[0]
    expected = f"{family.base}.{family.first[0]}" if family.base else family.first[0]
    if prefix is None:
        raise StateMismatch(
            f"no name is like {expected!r}, which every model of type {kind!r} has, so that from_pretrained "
            f"would give random weights. Names: {_listed(names)}. Select the leaves of the model (--select), "
            "or rename them with a spec (--spec)",
            missing=[expected],
        )
    others = [name for name in names if not name.startswith(prefix)]
    if others:
        raise StateMismatch(
            f"the model of type {kind!r} is below {prefix!r}, but not all leaves are: {_listed(others)}. "
            "Select those of the model (--select)",
            extra=others,
        )
    return prefix


def _wrappers(names: Iterable[str]) -> str:
    """The prefix of wrappers that all names have."""
    left = [name.split(".") for name in names]
    prefix = ""
    while left and all(len(parts) > 1 and parts[0] == left[0][0] for parts in left):
        if left[0][0] not in _OUTER_WRAPPERS:
            break
        prefix += f"{left[0][0]}."
        left = [parts[1:] for parts in left]
    return prefix


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
