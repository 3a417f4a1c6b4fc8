"""`Spec`: the rules for a foreign checkpoint, in order, and which of them takes which parameter."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from everystep.errors import SpecError
from everystep.universal.rules import Rule

_LISTED = 20


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which rule takes a parameter. `number` counts from 1; without a rule that matches it is None."""

    name: str
    rule: Rule | None
    number: int | None
    new_name: str

    def __str__(self) -> str:
        if self.rule is None:
            return f"{self.name}: no rule matches"
        return f"{self.name}: rule {self.number} ({self.rule.match}): {self.rule}"


@dataclass(frozen=True, slots=True)
class Assigned:
    """A parameter, the rule that takes it, and its name from then on. `tied_to` is such a name, too."""

    name: str
    new_name: str
    rule: Rule
    tied_to: str | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """How a foreign checkpoint lays out its parameters: the first rule that matches a name takes it.

    >>> from everystep.universal import Spec, replicated, rule, shard
    >>> spec = Spec([rule("*.norm.weight", replicated()), rule("*.weight", shard(0))])
    >>> for line in spec.explain(["h.0.norm.weight", "h.0.mlp.weight", "h.0.mlp.bias"]):
    ...     print(line)
    h.0.norm.weight: rule 1 ('*.norm.weight'): replicated
    h.0.mlp.weight: rule 2 ('*.weight'): shard(0)
    h.0.mlp.bias: no rule matches

    Args:
        rules: The rules, in the order in which they are tried.
    """

    rules: tuple[Rule, ...]

    def __init__(self, rules: Iterable[Rule]) -> None:
        given = tuple(rules)
        for found in given:
            if not isinstance(found, Rule):
                raise TypeError(f"a Spec is made of rules, not {type(found).__name__}")
        object.__setattr__(self, "rules", given)

    def __add__(self, other: Spec) -> Spec:
        """The rules of both; those of the first go before."""
        return Spec((*self.rules, *other.rules))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Spec:
        """Reads a TOML file (the grammar is in docs/universal-spec.md).

        Args:
            path: The file.
        """
        from everystep.universal.spec_file import read_spec

        return cls(read_spec(path))

    @classmethod
    def from_toml(cls, text: str) -> Spec:
        """Read the text of a TOML file.

        Args:
            text: The text.
        """
        from everystep.universal.spec_file import parse_spec

        return cls(parse_spec(text))

    @classmethod
    def preset(cls, name: str, **options: object) -> Spec:
        """The rules for a known system.

        Args:
            name: ``megatron-gpt``, ``llama`` or ``huggingface``.
            options: Those of the functions in `everystep.universal.presets`.
        """
        from everystep.universal.presets import preset_rules

        return cls(preset_rules(name, options))

    @classmethod
    def deepspeed(cls, info: Mapping[str, object]) -> Spec:
        """The rules that DeepSpeed's ``universal_checkpoint_info`` stands for.

        Args:
            info: The dictionary, as it is in a model file.
        """
        from everystep.universal.presets import deepspeed_rules

        return cls(deepspeed_rules(info))

    def explain(self, names: Iterable[str]) -> tuple[Explanation, ...]:
        """Which rule takes each of the names. Never fails.

        Args:
            names: Parameters, as the foreign files name them.
        """
        return tuple(self._explain(name) for name in names)

    def assign(self, names: Iterable[str]) -> tuple[Assigned, ...]:
        """The rule and the new name of every parameter, in order.

        Raises `SpecError` with the names that no rule matches, that get the same new name, or that are tied
        to a parameter that does not exist.

        Args:
            names: Names of all parameters.
        """
        explained = self.explain(names)
        unmatched = [found.name for found in explained if found.rule is None]
        if unmatched:
            raise SpecError(f"no rule matches {_listed(unmatched)}", names=unmatched)
        taken = [
            Assigned(found.name, found.new_name, found.rule, found.rule.tied.to if found.rule.tied else None)
            for found in explained
            if found.rule is not None
        ]
        _require_one_claim(taken)
        _require_tied_targets(taken)
        return tuple(taken)

    def _explain(self, name: str) -> Explanation:
        for number, found in enumerate(self.rules, 1):
            if found.match.matches(name):
                return Explanation(name, found, number, found.new_name(name))
        return Explanation(name, None, None, name)


def _require_one_claim(taken: list[Assigned]) -> None:
    claims: defaultdict[str, list[str]] = defaultdict(list)
    for found in taken:
        claims[found.new_name].append(found.name)
    twice = {name: claimants for name, claimants in claims.items() if len(claimants) > 1}
    if twice:
        lines = [f"{name!r} from {_listed(claimants)}" for name, claimants in twice.items()]
        raise SpecError(
            f"two parameters would get one name: {'; '.join(lines[:_LISTED])}",
            names=[name for claimants in twice.values() for name in claimants],
        )


def _require_tied_targets(taken: list[Assigned]) -> None:
    stored = {found.new_name for found in taken if found.tied_to is None}
    wrong = [found for found in taken if found.tied_to is not None and found.tied_to not in stored]
    if wrong:
        lines = [f"{found.name!r} to {found.tied_to!r}" for found in wrong]
        raise SpecError(
            f"tied to a parameter that is not there, or is tied itself: {'; '.join(lines[:_LISTED])}",
            names=[found.name for found in wrong],
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_LISTED])
    rest = len(names) - _LISTED
    return shown + (f" and {rest} more" if rest > 0 else "")
