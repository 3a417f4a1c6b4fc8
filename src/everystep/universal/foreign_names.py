"""A spec's renames in reverse: the name that a parameter had in the foreign files, out of its name here.

A rename can be reversed if its pattern is plain text with ``*`` or groups in it, and the new name has all of
them. Whatever is found must lead back to the same name by the same rule.
"""

from __future__ import annotations

import re

from everystep.errors import SpecError
from everystep.universal.patterns import Pattern
from everystep.universal.rules import Rule
from everystep.universal.spec import Spec

_REFERENCE = re.compile(r"\\(\d+)|\\g<(\w+)>|\\(.)|([^\\]+)", re.DOTALL)
_SPECIAL = frozenset(".^$*+?{}[]|")


def foreign_name(spec: Spec, name: str) -> tuple[str, Rule]:
    """The foreign name of a parameter, and the rule that takes it. `SpecError` if there is none."""
    stuck: list[Rule] = []
    for found in spec.rules:
        if _leads_back(spec, found, name, name):
            return name, found
        if found.rename is None:
            continue
        try:
            before = _reversed(found.match, found.rename.to, name)
        except _NotReversible:
            stuck.append(found)
            continue
        if before is not None and _leads_back(spec, found, before, name):
            return before, found
    why = "".join(f"; the rename of {rule.match} cannot be reversed" for rule in stuck[:3])
    raise SpecError(
        f"no rule of the spec matches {name!r}, or renames to it, so its layout is not known{why}",
        names=[name],
    )


class _NotReversible(Exception):
    pass


def _leads_back(spec: Spec, rule: Rule, before: str, name: str) -> bool:
    (found,) = spec.explain([before])
    return found.rule is rule and found.new_name == name


def _reversed(pattern: Pattern, template: str, name: str) -> str | None:
    """What `pattern` matched, if the new name is `name`; None if it cannot have been this pattern."""
    if pattern.regular:
        tokens = _tokens_of_expression(pattern.text.removeprefix("re:"))
        expression = _template_expression(template, tokens)
    else:
        if set(pattern.text) & {"?", "["} or pattern.text.count("*") != template.count("*"):
            raise _NotReversible
        tokens = []
        for number, text in enumerate(pattern.text.split("*")):
            tokens += [text] if number == 0 else [(number, "", ".*?"), text]
        expression = "".join(
            (f"(?P<g{number}>.*?)" if number else "") + re.escape(text)
            for number, text in enumerate(template.split("*"))
        )
    matched = re.fullmatch(expression, name, re.DOTALL)
    if matched is None:
        return None
    return "".join(token if isinstance(token, str) else matched[f"g{token[0]}"] for token in tokens)


_Token = str | tuple[int, str, str]
"""Plain text, or a group: its number, its name, and what it matches."""


def _tokens_of_expression(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = groups = 0
    while at < len(text):
        char = text[at]
        if char == "(":
            end = _end_of_group(text, at)
            inner, name = text[at + 1 : end], ""
            if inner.startswith("?"):
                named = re.match(r"\?P<(\w+)>", inner)
                if named is None:
                    raise _NotReversible
                inner, name = inner[named.end() :], named[1]
            if re.search(r"(?<!\\)\((?!\?:)", inner):
                raise _NotReversible  # groups inside of groups
            groups += 1
            tokens.append((groups, name, inner))
            at = end + 1
            if text[at : at + 1] in ("*", "+", "?", "{"):
                raise _NotReversible
        elif char == "\\" and at + 1 < len(text) and not text[at + 1].isalnum():
            tokens.append(text[at + 1])
            at += 2
        elif char == "\\" or char in _SPECIAL or char == ")":
            raise _NotReversible
        else:
            tokens.append(char)
            at += 1
            if text[at : at + 1] in ("*", "+", "?", "{"):
                raise _NotReversible
    return tokens


def _end_of_group(text: str, at: int) -> int:
    depth = 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "[":
            at = text.find("]", at + 2)
            if at < 0:
                break
        elif text[at] == "(":
            depth += 1
        elif text[at] == ")":
            depth -= 1
            if not depth:
                return at
        at += 1
    raise _NotReversible


def _template_expression(template: str, tokens: list[_Token]) -> str:
    """An expression for the new name, whose groups have the numbers of the pattern's."""
    groups = [token for token in tokens if not isinstance(token, str)]
    by_key = {str(number): (number, inner) for number, _, inner in groups}
    by_key.update({name: (number, inner) for number, name, inner in groups if name})
    out: list[str] = []
    used: list[int] = []
    for number, name, escaped, plain in _REFERENCE.findall(template):
        if number or name:
            group, inner = by_key[number or name]
            out.append(f"(?P=g{group})" if group in used else f"(?P<g{group}>{inner})")
            used.append(group)
        else:
            out.append(re.escape(escaped or plain))
    if set(used) != {number for number, _, _ in groups}:
        raise _NotReversible
    return "".join(out)
