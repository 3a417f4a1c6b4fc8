"""Configurations of OmegaConf (Hydra's) to plain values and back: content, types, flags and interpolations.

Owns what a ``$omegaconf`` node holds (docs/format.md has the grammar). A configuration is taken apart as
pickle takes it, by the attributes of its nodes, and put together without OmegaConf's conversions: so
interpolations are not resolved, and ``???`` stays missing. What belongs to a class of the user (structured
configurations, enums) is refused by name: no class is looked up because a file names it.

Without omegaconf, a configuration is read as plain dicts, lists and tuples. Importing this module does not
import omegaconf.
"""

from __future__ import annotations

import re
import typing
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

from everystep.caller import stack_level
from everystep.errors import UnsupportedState
from everystep.state.node import MAX_DEPTH, Node, corrupt, shorten
from everystep.state.refusals import type_name, unsupported

OMEGACONF: Final = "$omegaconf"
OMEGACONF_TYPE: Final = "$omegaconf.type"

Check = Callable[[Any, str], object]
"""Raises `UnsupportedState` for what is no single value that can be stored."""

_CONTAINERS: Final[dict[str, type]] = {"DictConfig": dict, "ListConfig": list, "TupleConfig": tuple}
_TYPED: Final[dict[str, type]] = {
    "BooleanNode": bool,
    "BytesNode": bytes,
    "FloatNode": float,
    "IntegerNode": int,
    "PathNode": Path,
    "StringNode": str,
}
_HELD: Final = {"AnyNode": object, **_TYPED}
"""What each kind of node holds, besides None, ``???`` and interpolations."""
_KEYS: Final = (str, bytes, int, float, bool)

_spelled: Any = typing
_TYPES: Final[dict[str, Any]] = {
    **{kind.__name__.lower(): kind for kind in (*_CONTAINERS.values(), *_TYPED.values())},
    "any": Any,
    "none": type(None),
    "...": ...,
}
_GENERICS: Final[dict[str, tuple[Any, Any]]] = {
    "Dict": (dict, _spelled.Dict),
    "List": (list, _spelled.List),
    "Tuple": (tuple, _spelled.Tuple),
    "Union": (typing.Union, typing.Union),
}
"""Origin and name, as OmegaConf spells it: ``Dict[str, int]`` is not ``dict[str, int]``."""
_TYPE_FACTS: Final = ("ref_type", "object_type", "key_type", "element_type")
_OTHER_FACTS: Final[dict[str, Any]] = {
    "optional": True,
    "key": None,
    "flags": {},
    "flags_root": False,
    "resolver_cache": {},
}
_USUAL: Final[dict[str, dict[str, Any]]] = {
    kind: dict(zip(_TYPE_FACTS, types, strict=False)) | _OTHER_FACTS
    for kind, types in {
        "DictConfig": (Any, dict, Any, Any),
        "ListConfig": (Any, list, int, Any),
        "TupleConfig": (_spelled.Tuple[Any, ...], tuple, int, Any),
        "AnyNode": (Any, None),
        **{kind: (held, held) for kind, held in _TYPED.items()},
    }.items()
}
"""The facts of a node that OmegaConf was told nothing about. Only others are stored."""
_FLAG = re.compile(r"[a-z_]{1,64}", re.ASCII)


def is_config(value: object) -> bool:
    """Whether the value is a configuration of OmegaConf, and of no subclass."""
    return _kind(type(value)) in _CONTAINERS


def _kind(of: type) -> str:
    return of.__name__ if of.__module__.startswith("omegaconf.") else ""


def _child(parent: Any, key: Any) -> Any:
    """The node at a key of a container; None if it has none there."""
    content = vars(parent).get("_content")
    if type(content) is dict:
        return content.get(key)
    return content[key] if type(content) is list and type(key) is int and 0 <= key < len(content) else None


def _fits(kind: str, single: object) -> bool:
    if single is None or type(single) is str:  # also missing, or an interpolation
        return True
    return kind in _HELD and isinstance(single, _HELD[kind]) and not is_config(single)


# --- apart --------------------------------------------------------------------------------------------------


def name_of_class(kind: type, place: str) -> str:
    """The name of a configuration's class, which Lightning stores beside it."""
    if _kind(kind) in _CONTAINERS:
        return kind.__name__
    raise unsupported(place, f"it is the class {kind.__module__}.{kind.__qualname__}. Store its name instead")


def apart(config: Any, place: str, check: Check) -> list[Any]:
    """A configuration, and what it is a part of: interpolations reach there, and flags come from there."""
    steps = []
    while (parent := vars(config)["_parent"]) is not None:
        key = vars(config)["_metadata"].key
        # One that was copied (`copy.deepcopy`) or taken out (`pop`) has a parent that does not have it.
        steps.append(key if _child(parent, key) is config else _item(config, place, None, check))
        config = parent
        if len(steps) >= MAX_DEPTH:
            raise unsupported(place, f"a configuration that is part of more than {MAX_DEPTH} others")
    return [_item(config, place, None, check), *reversed(steps)]


def _refuse(place: str, what: str) -> NoReturn:
    advice = "Store OmegaConf.create(OmegaConf.to_container(config, enum_to_str=True)) instead"
    raise unsupported(place, f"{what}. {advice}")


def _item(node: Any, place: str, key: Any, check: Check) -> Any:
    """One node. A plain value, which most are, is itself; any other has its kind, facts and content."""
    kind = _kind(type(node))
    if kind not in _USUAL:
        _refuse(place, f"an {type_name(node)} in a configuration of OmegaConf")
    held = "_content" if kind in _CONTAINERS else "_val"
    if vars(node).keys() != {"_metadata", "_parent", "_flags_cache", held}:
        raise unsupported(place, f"an {type_name(node)} with attributes of its own: {sorted(vars(node))}")
    facts, content = _facts(node, kind, place, key, check), vars(node)[held]
    prefix = f"{place}." if place else ""
    if type(content) is dict and kind == "DictConfig":
        for at in content:
            check(at, place)
        inside = {at: _item(its, f"{prefix}{at}", at, check) for at, its in content.items()}
        return [kind, facts, inside]
    if type(content) is list and kind in _CONTAINERS:
        return [kind, facts, [_item(its, f"{prefix}{at}", at, check) for at, its in enumerate(content)]]
    if not _fits(kind, content):
        _refuse(place, f"an {type_name(node)} that holds a {type_name(content)}")
    check(content, place)
    return content if kind == "AnyNode" and not facts else [kind, facts, content]


def _facts(node: Any, kind: str, place: str, key: Any, check: Check) -> dict[str, Any]:
    usual = {**_USUAL[kind], "key": key}
    known = dict(vars(vars(node)["_metadata"]))
    if known.keys() != usual.keys():
        raise unsupported(place, f"an {type_name(node)} with unknown facts: {sorted(known)}")
    known["flags"] = known["flags"] or {}
    known["resolver_cache"] = {name: its for name, its in known["resolver_cache"].items() if its}
    found = {}
    for name, its in known.items():
        if its is not usual[name] and (type(its) is not type(usual[name]) or its != usual[name]):
            found[name] = _named(its, place) if name in _TYPE_FACTS else its
            if name not in _TYPE_FACTS and not _is_fact(name, its):
                raise unsupported(place, f"a configuration whose {name} is {shorten(its)}")
    for resolver, results in known["resolver_cache"].items():
        try:
            for result in results.values():
                check(result, place)
        except UnsupportedState as error:
            raise unsupported(
                place,
                f"a configuration that remembers what the resolver {shorten(resolver)!r} returned, which is "
                "no single value. Call OmegaConf.clear_cache(config) before",
            ) from error
    return found


def _named(kind: Any, place: str) -> Any:
    """A type that OmegaConf checks values against, by names."""
    if kind is None:
        return None
    for name, known in _TYPES.items():
        if kind is known:
            return name
    arguments = typing.get_args(kind)
    for name, (origin, generic) in _GENERICS.items():
        if typing.get_origin(kind) is origin:
            made = generic[arguments]
            if made == kind and type(made) is type(kind):
                return [name, *(_named(its, place) for its in arguments)]
    _refuse(place, f"a configuration whose values have the type {shorten(kind)}")


# --- together -----------------------------------------------------------------------------------------------


def class_of_name(name: Node) -> object:
    if type(name) is not str or name not in _CONTAINERS:
        corrupt(f"{OMEGACONF_TYPE} holds {shorten(name)}")
    omegaconf = _import()
    return _CONTAINERS[name] if omegaconf is None else _class_of(omegaconf, name)


def together(body: object, is_value: Callable[[object], bool]) -> Any:
    """The configuration that `apart` took apart; without omegaconf, plain containers and a warning.

    It may come from a hostile file. `is_value` tells single values.
    """
    omegaconf = _import()
    if type(body) is not list or not 0 < len(body) <= MAX_DEPTH + 1:
        corrupt(f"{OMEGACONF} holds {shorten(body)}")
    build = _Builder(omegaconf, is_value)
    whole, *steps = body
    found = build.container(whole)
    for step in steps:
        if type(step) is list:
            around, found = found, build.container(step)
            vars(found)["_parent"] = around
        else:
            found = _child(found, step) if type(step) in _KEYS else None
            if found is None or "_content" not in vars(found):
                corrupt(f"{OMEGACONF} has no configuration at {shorten(step)}")
    return _plain(found) if omegaconf is None else found


def _import() -> Any:
    try:
        import omegaconf
    except ImportError:
        warnings.warn(
            "the checkpoint holds configurations of OmegaConf, and omegaconf is not installed: they are read "
            "as plain dicts and lists, with interpolations and ??? as text. pip install omegaconf",
            RuntimeWarning,
            stacklevel=stack_level(),
        )
        return None
    return omegaconf


def _class_of(omegaconf: Any, name: str) -> Any:
    found = getattr(omegaconf, name, None)
    if found is None:
        raise UnsupportedState(
            f"the state holds a {name} of OmegaConf, which this version of omegaconf does not have: "
            "pip install --upgrade omegaconf"
        )
    return found


class _Builder:
    """Puts nodes together; what stands for them if `omegaconf` is None."""

    def __init__(self, omegaconf: Any, is_value: Callable[[object], bool]) -> None:
        self._omegaconf = omegaconf
        self._is_value = is_value

    def container(self, item: Any) -> Any:
        if type(item) is not list or not item or type(item[0]) is not str or item[0] not in _CONTAINERS:
            corrupt(f"{OMEGACONF} holds {shorten(item)} where a configuration belongs")
        return self._node(item, None)

    def _node(self, item: Any, key: Any) -> Any:
        kind, facts, body = item if type(item) is list and len(item) == 3 else ("AnyNode", {}, item)
        if type(kind) is not str or kind not in _USUAL or type(facts) is not dict:
            corrupt(f"{OMEGACONF} holds {shorten(item)} where a node belongs")
        content: Any = body
        inside: Any = ()
        if kind == "DictConfig" and type(body) is dict and all(type(at) in _KEYS for at in body):
            content = {at: self._node(its, at) for at, its in body.items()}
            inside = content.values()
        elif kind in _CONTAINERS and kind != "DictConfig" and type(body) is list:
            content = inside = [self._node(its, at) for at, its in enumerate(body)]
        elif not _fits(kind, body) or not self._is_value(body):
            corrupt(f"{OMEGACONF} has {shorten(body)} in a node of the kind {kind}")
        found = self._made(kind, _metadata(kind, facts, key), content)
        for its in inside:
            vars(its)["_parent"] = found
        return found

    def _made(self, kind: str, facts: dict[str, Any], content: Any) -> Any:
        """A node without a parent."""
        is_container = kind in _CONTAINERS
        held = {"_content" if is_container else "_val": content}
        if self._omegaconf is None:
            return SimpleNamespace(kind=kind, **held)
        record = vars(self._omegaconf.base)["ContainerMetadata" if is_container else "Metadata"]
        try:
            known = record(**facts)
        except Exception as error:  # it checks types by assertions and errors of its own
            corrupt(f"{OMEGACONF} has facts that do not fit together: {shorten(str(error))}")
        found = object.__new__(_class_of(self._omegaconf if is_container else self._omegaconf.nodes, kind))
        vars(found).update(_metadata=known, _parent=None, _flags_cache=None, **held)
        return found


def _plain(node: Any) -> Any:
    """The content of what stands for a node."""
    content = vars(node).get("_content", vars(node).get("_val"))
    if type(content) is dict:
        return {key: _plain(its) for key, its in content.items()}
    return _CONTAINERS[node.kind](map(_plain, content)) if type(content) is list else content


def _metadata(kind: str, facts: dict[Any, Any], key: Any) -> dict[str, Any]:
    found = {**_USUAL[kind], "flags": {}, "key": key}
    for name, its in facts.items():
        if name not in found or (name not in _TYPE_FACTS and not _is_fact(name, its)):
            corrupt(f"{OMEGACONF} says {shorten({name: its})} of a node of the kind {kind}")
        found[name] = _type(its) if name in _TYPE_FACTS else its
    found["resolver_cache"] = defaultdict(dict, found["resolver_cache"])
    return found


def _is_fact(name: str, its: Any) -> bool:
    if name == "key":
        return its is None or type(its) in _KEYS
    if name == "flags":
        return type(its) is dict and all(
            type(flag) is str and _FLAG.fullmatch(flag) and (on is None or type(on) is bool)
            for flag, on in its.items()
        )
    if name == "resolver_cache":
        return type(its) is dict and all(
            type(resolver) is str
            and type(results) is dict
            and all(type(key) is tuple and all(type(one) is str for one in key) for key in results)
            for resolver, results in its.items()
        )
    return type(its) is bool


def _type(names: Any) -> Any:
    if names is None:
        return None
    if type(names) is str and names in _TYPES:
        return _TYPES[names]
    if type(names) is list and names and type(names[0]) is str and names[0] in _GENERICS:
        try:
            return _GENERICS[names[0]][1][tuple(map(_type, names[1:]))]
        except TypeError as error:  # of another number of arguments
            corrupt(f"{OMEGACONF} holds {shorten(names)} where a type belongs: {shorten(str(error))}")
    corrupt(f"{OMEGACONF} holds {shorten(names)} where a type belongs")
