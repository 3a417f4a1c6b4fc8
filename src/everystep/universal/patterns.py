"""Patterns for names: globs (``*``, ``?``, ``[abc]``) or, after ``re:``, regular expressions.

A pattern matches whole names. A ``*`` also matches dots.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from everystep.errors import SpecError

_REGULAR = "re:"
_MAX_PATTERN = 4096


@dataclass(frozen=True, slots=True)
class Pattern:
    text: str
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _stars: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.text:
            raise SpecError("a pattern must not be empty")
        if len(self.text) > _MAX_PATTERN:
            raise SpecError(f"a pattern has at most {_MAX_PATTERN} characters: {self.text[:60]!r}...")
        if self.text.startswith(_REGULAR):
            expression, stars = self.text[len(_REGULAR) :], 0
        else:
            expression, stars = _of_glob(self.text)
        try:
            compiled = re.compile(expression, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise SpecError(f"{self.text!r} is not a regular expression: {error}") from None
        object.__setattr__(self, "_compiled", compiled)
        object.__setattr__(self, "_stars", stars)

    def __str__(self) -> str:
        return repr(self.text)

    @property
    def regular(self) -> bool:
        return self.text.startswith(_REGULAR)

    def matches(self, name: str) -> bool:
        return self._compiled.fullmatch(name) is not None

    def check_template(self, template: str) -> None:
        """Fails if the text of a rename refers to what this pattern does not have."""
        if not template:
            raise SpecError(f"{self}: rename needs a name")
        if self.regular:
            try:
                self._compiled.sub(template, "")  # parses the template, also when nothing matches
            except (re.error, IndexError) as error:
                raise SpecError(f"{self}: rename to {template!r}: {error}") from None
        elif template.count("*") > self._stars:
            raise SpecError(f"{self}: rename to {template!r} has more '*' than the pattern")

    def expand(self, name: str, template: str) -> str:
        """The text of a rename, with what this pattern matched in a name."""
        found = self._compiled.fullmatch(name)
        if found is None:
            raise ValueError(f"{self} does not match {name!r}")
        if self.regular:
            return found.expand(template)
        pieces = template.split("*")
        stars = [found[f"s{number}"] for number in range(len(pieces) - 1)]
        return pieces[0] + "".join(star + piece for star, piece in zip(stars, pieces[1:], strict=True))


def _of_glob(glob: str) -> tuple[str, int]:
    """A glob as a regular expression in which each ``*`` is a group; and how many there are."""
    out: list[str] = []
    stars = 0
    at = 0
    while at < len(glob):
        char = glob[at]
        at += 1
        if char == "*":
            out.append(f"(?P<s{stars}>.*?)")
            stars += 1
        elif char == "?":
            out.append(".")
        elif char == "[" and (end := glob.find("]", at + 1 + glob.startswith("!", at))) > 0:
            inner = glob[at:end]
            inverted = inner.startswith("!")
            members = re.escape(inner[inverted:]).replace(r"\-", "-")
            out.append(f"[{'^' if inverted else ''}{members}]")
            at = end + 1
        else:
            out.append(re.escape(char))
    return "".join(out), stars
