"""`rename=`: other names for a checkpoint's parameters while it is restored, in the language of `Spec`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from everystep.errors import SpecError
from everystep.universal.rules import Rule, Unique
from everystep.universal.spec import Spec


def renaming(given: object) -> Callable[[str], str]:
    """The function that `rename=` stands for: prefixes and what takes their place, rules, or a `Spec`.

    The first that matches a name gives the new one. A name that nothing matches stays. A parameter that is
    `tied` to another one gets the name of that one: they must be the same bytes.

    >>> renaming({"module.": "", "old.": "new."})("module.weight")
    'weight'
    """
    if isinstance(given, Mapping):
        return _of_prefixes(given)
    if isinstance(given, Rule):
        given = [given]
    if not isinstance(given, (Spec, Iterable)) or isinstance(given, (str, bytes)):
        raise TypeError(
            f"rename= takes a dict of prefixes, such as {{'module.': ''}}, rules, or a Spec: not a "
            f"{type(given).__name__}"
        )
    spec = given if isinstance(given, Spec) else Spec(given)
    for rule in spec.rules:
        if rule.pads or rule.layout != Unique():
            raise SpecError(
                f"{rule.match}: rename= gives new names only, and this rule says {rule}. "
                "For layouts and padding there is `convert(..., spec=...)`"
            )
    return lambda name: _renamed(spec, name)


def _renamed(spec: Spec, name: str) -> str:
    (found,) = spec.explain([name])
    return found.rule.tied.to if found.rule is not None and found.rule.tied is not None else found.new_name


def _of_prefixes(given: Mapping[object, object]) -> Callable[[str], str]:
    prefixes: list[tuple[str, str]] = []
    for old, new in given.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise TypeError(f"rename= takes names for names, not {old!r}: {new!r}")
        prefixes.append((old, new))

    def rename(name: str) -> str:
        for old, new in prefixes:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    return rename
