"""Configurations of OmegaConf (Hydra's) to nodes and back: content, types, flags and interpolations.

Owns the form of ``$omegaconf`` nodes (docs/format.md has their grammar). A configuration is taken apart as
pickle takes it, by the attributes of its nodes, and put together without OmegaConf's conversions: so
interpolations are not resolved, and ``???`` stays missing. What belongs to a class of the user (structured
configurations, enums) is refused by name: no class is looked up because a file names it.

Without omegaconf, a configuration is read as plain dicts, lists and tuples. Importing this module does not
import omegaconf.
"""

from __future__ import annotations

import math
import re
import typing
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.caller import stack_level
from holdfast.errors import UnsupportedState
from holdfast.state.node import MAX_DEPTH, MAX_EXACT_INT, Node, collide, corrupt, shorten, tag_of
from holdfast.state.refusals import type_name, unsupported
from holdfast.state.value_decoder import DECODERS

OMEGACONF: Final = "$omegaconf"
OMEGACONF_TYPE: Final = "$omegaconf.type"

Encode = Callable[[Any, str], Node]
"""How a single value becomes a node."""

_CONTAINERS: Final = {"dict": "DictConfig", "list": "ListConfig", "tuple": "TupleConfig"}
_NODES: Final = {
    **_CONTAINERS,
    "any": "AnyNode",
    "bool": "BooleanNode",
    "bytes": "BytesNode",
    "float": "FloatNode",
    "int": "IntegerNode",
    "path": "PathNode",
    "str": "StringNode",
}
_KINDS: Final = {name: kind for kind, name in _NODES.items()}
_PLAIN: Final[dict[str, type]] = {"dict": dict, "list": list, "tuple": tuple}
_HELD: Final[dict[str, type]] = {
    "any": object,
    "bool": bool,
    "bytes": bytes,
    "float": float,
    "int": int,
    "path": Path,
    "str": str,
}
"""What each kind of node holds, besides None, ``???`` and interpolations."""
_TYPES: Final[dict[str, Any]] = {
    "any": Any,
    "none": type(None),
    "...": ...,
    **_PLAIN,
    **{kind: held for kind, held in _HELD.items() if kind != "any"},
}
_spelled: Any = typing
_GENERICS: Final[dict[str, Callable[[tuple[Any, ...]], Any]]] = {
    "Dict": lambda inner: _spelled.Dict[inner],
    "List": lambda inner: _spelled.List[inner],
    "Optional": lambda inner: _spelled.Optional[inner[0]],
    "Tuple": lambda inner: _spelled.Tuple[inner],
}
"""As OmegaConf spells them: ``Dict[str, int]`` is not ``dict[str, int]``."""
_FACTS: Final = ("ref_type", "object_type", "key_type", "element_type")
_DEFAULTS: Final[dict[str, tuple[Any, ...]]] = {
    "dict": (Any, dict, Any, Any),
    "list": (Any, list, int, Any),
    "tuple": (_spelled.Tuple[Any, ...], tuple, int, Any),
    "any": (Any, None),
    **{kind: (held, held) for kind, held in _HELD.items() if kind != "any"},
}
"""The facts of a node that OmegaConf was told nothing about. Only others are stored."""
_FLAG = re.compile(r"[a-z_]{1,64}", re.ASCII)


def is_config(value: object) -> bool:
    """Whether the value is a configuration of OmegaConf, of none but its own classes."""
    return _is_container(type(value))


def _is_container(kind: type) -> bool:
    return kind.__module__.startswith("omegaconf.") and _KINDS.get(kind.__name__) in _CONTAINERS


# --- to nodes -----------------------------------------------------------------------------------------------


def encode_type(kind: type, place: str) -> Node:
    """The class of a configuration, which Lightning stores beside it."""
    if _is_container(kind):
        return kind.__name__
    raise unsupported(place, f"it is the class {kind.__module__}.{kind.__qualname__}. Store its name instead")


def encode(config: Any, place: str, value: Encode, depth: int) -> Node:
    """A configuration, and what it is a part of: interpolations reach there, and flags come from there."""
    return _whole(config, place, value, depth)


def _check_depth(place: str, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise unsupported(place[:200], f"a configuration that is nested deeper than {MAX_DEPTH} levels")


def _whole(config: Any, place: str, value: Encode, depth: int) -> Node:
    _check_depth(place, depth)
    parent, key = vars(config)["_parent"], vars(config)["_metadata"].key
    if parent is None:
        return ["top", _item(config, place, None, value, depth)]
    around = _whole(parent, place, value, depth + 1)
    if _child(parent, key) is config:
        return ["in", around, value(key, place)]
    # Copied (`copy.deepcopy`) or taken out (`pop`): its parent does not have it.
    return ["under", around, _item(config, place, None, value, depth)]


def _child(parent: Any, key: Any) -> Any:
    content = vars(parent).get("_content")
    if type(content) is dict:
        return content.get(key)
    return content[key] if type(content) is list and type(key) is int and 0 <= key < len(content) else None


def _item(node: Any, place: str, key: Any, value: Encode, depth: int) -> Node:
    """One node. A plain value, which most are, is itself; any other has its kind, facts and content."""
    _check_depth(place, depth)
    kind = _KINDS.get(type(node).__name__) if type(node).__module__.startswith("omegaconf.") else None
    if kind is None:
        raise unsupported(place, f"an {type_name(node)} in a configuration of OmegaConf. {_ADVICE}")
    held = "_content" if kind in _CONTAINERS else "_val"
    if vars(node).keys() != {"_metadata", "_parent", "_flags_cache", held}:
        raise unsupported(place, f"an {type_name(node)} with attributes of its own: {sorted(vars(node))}")
    facts, content = _facts(node, kind, place, key, value), vars(node)[held]
    prefix = f"{place}." if place else ""
    if type(content) is list and kind in ("list", "tuple"):
        return [
            kind,
            facts,
            [_item(its, f"{prefix}{at}", at, value, depth + 1) for at, its in enumerate(content)],
        ]
    if type(content) is dict and kind == "dict":
        return [
            kind,
            facts,
            [
                [value(at, place), _item(its, f"{prefix}{at}", at, value, depth + 1)]
                for at, its in content.items()
            ],
        ]
    # None, missing, an interpolation; or a single value.
    if content is not None and type(content) is not str and not isinstance(content, _HELD.get(kind, str)):
        raise unsupported(place, f"an {type_name(node)} that holds a {type_name(content)}. {_ADVICE}")
    if is_config(content):
        raise unsupported(place, f"an {type_name(node)} that holds a {type_name(content)}. {_ADVICE}")
    single = value(content, place)
    return single if kind == "any" and not facts else [kind, facts, single]


_ADVICE = "Store OmegaConf.create(OmegaConf.to_container(config, enum_to_str=True)) instead"


def _facts(node: Any, kind: str, place: str, key: Any, value: Encode) -> dict[str, Node]:
    known = vars(vars(node)["_metadata"])
    names = _FACTS if kind in _CONTAINERS else _FACTS[:2]
    if known.keys() != {*names, "optional", "key", "flags", "flags_root", "resolver_cache"}:
        raise unsupported(place, f"an {type_name(node)} with unknown facts: {sorted(known)}")
    found: dict[str, Node] = {}
    for name, default in zip(names, _DEFAULTS[kind], strict=True):
        if known[name] is not default and known[name] != default:
            found[name] = _type_node(known[name], place)
    if known["optional"] is not True:
        found["optional"] = False
    if known["flags_root"] is not False:
        found["flags_root"] = True
    if known["flags"]:
        if not all(type(flag) is str and _FLAG.fullmatch(flag) for flag in known["flags"]):
            raise unsupported(place, f"a configuration with the flags {shorten(sorted(known['flags']))}")
        found["flags"] = {flag: None if on is None else bool(on) for flag, on in known["flags"].items()}
    if type(known["key"]) is not type(key) or known["key"] != key:
        found["key"] = value(known["key"], place)
    cache = {name: results for name, results in known["resolver_cache"].items() if results}
    if cache:
        found["cache"] = [_results(name, its, place, value) for name, its in cache.items()]
    return found


def _results(name: str, results: dict[Any, Any], place: str, value: Encode) -> Node:
    """What a resolver with a cache has returned: by its arguments, which are texts."""
    try:
        return [
            value(name, place),
            [
                [[value(argument, place) for argument in arguments], value(result, place)]
                for arguments, result in results.items()
            ],
        ]
    except UnsupportedState as error:
        raise unsupported(
            place,
            f"a configuration that remembers what the resolver {shorten(name)!r} returned, which is no "
            "single value. Call OmegaConf.clear_cache(config) before",
        ) from error


def _type_node(kind: Any, place: str) -> Node:
    """A type that OmegaConf checks values against."""
    if kind is None:
        return None
    for code, known in _TYPES.items():
        if kind is known:
            return code
    arguments = typing.get_args(kind)
    for code, make in _GENERICS.items():
        inner = tuple(its for its in arguments if code != "Optional" or its is not type(None))
        try:
            made = make(inner)
        except (TypeError, IndexError):  # of another number of arguments
            continue
        if made == kind and type(made) is type(kind):
            return [code, *(_type_node(its, place) for its in inner)]
    raise unsupported(place, f"a configuration whose values have the type {shorten(kind)}. {_ADVICE}")


# --- from nodes ---------------------------------------------------------------------------------------------


def decode_type(node: Node) -> object:
    name = node if type(node) is str else ""
    if _KINDS.get(name) not in _CONTAINERS:
        corrupt(f"{OMEGACONF_TYPE} holds {shorten(node)}")
    omegaconf = _import()
    return _PLAIN[_KINDS[name]] if omegaconf is None else _class_of(omegaconf, name)


def decode(node: Node) -> Any:
    """The configuration that a node describes; where omegaconf is missing, plain containers and a warning."""
    omegaconf = _import()
    return _Builder(omegaconf).whole(node, 0)


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
    """Puts configurations together; plain containers if `omegaconf` is None."""

    def __init__(self, omegaconf: Any) -> None:
        self._omegaconf = omegaconf

    def whole(self, node: Node, depth: int) -> Any:
        self._check_depth(depth)
        if type(node) is not list or len(node) not in (2, 3):
            corrupt(f"{OMEGACONF} holds {shorten(node)}")
        if node[0] == "top" and len(node) == 2:
            return self._container(node[1], None, depth)
        if node[0] not in ("in", "under") or len(node) != 3:
            corrupt(f"{OMEGACONF} holds {shorten(node)}")
        around = self.whole(node[1], depth + 1)
        if node[0] == "in":
            return self._inside(around, _single(node[2]))
        found = self._container(node[2], None, depth)
        if self._omegaconf is not None:
            found.__dict__["_parent"] = around
        return found

    def _inside(self, around: Any, key: Any) -> Any:
        found = around if self._omegaconf is None else vars(around)["_content"]
        if type(found) in (list, tuple):
            if type(key) is int and 0 <= key < len(found) and self._is_container(found[key]):
                return found[key]
        elif type(found) is dict and key in found and self._is_container(found[key]):
            return found[key]
        corrupt(f"{OMEGACONF} has no configuration at {shorten(key)}")

    def _is_container(self, found: Any) -> bool:
        return type(found) in _PLAIN.values() if self._omegaconf is None else "_content" in vars(found)

    def _container(self, node: Node, key: Any, depth: int) -> Any:
        if _parts(node)[0] not in _CONTAINERS:
            corrupt(f"{OMEGACONF} holds {shorten(node)} where a configuration belongs")
        return self._item(node, key, depth)

    def _item(self, node: Node, key: Any, depth: int) -> Any:
        self._check_depth(depth)
        kind, facts, body = _parts(node)
        metadata = _metadata(kind, facts, key)
        content = self._content(kind, body, depth + 1)
        if self._omegaconf is None:
            return tuple(content) if kind == "tuple" and type(content) is list else content
        is_container = kind in _CONTAINERS
        place = self._omegaconf if is_container else self._omegaconf.nodes
        record = vars(self._omegaconf.base)["ContainerMetadata" if is_container else "Metadata"]
        try:
            known = record(**metadata)
        except Exception as error:  # it checks types by assertions and errors of its own
            corrupt(f"{OMEGACONF} has facts that do not fit together: {shorten(str(error))}")
        held = {"_content" if is_container else "_val": content}
        found: Any = object.__new__(_class_of(place, _NODES[kind]))
        vars(found).update(_metadata=known, _parent=None, _flags_cache=None, **held)
        if kind in _CONTAINERS and type(content) in (dict, list):
            for its in content.values() if type(content) is dict else content:
                its.__dict__["_parent"] = found
        return found

    def _content(self, kind: str, body: Node, depth: int) -> Any:
        if kind not in _CONTAINERS or type(body) is not list:
            found = _single(body)
            if found is not None and type(found) is not str and not isinstance(found, _HELD.get(kind, str)):
                corrupt(f"{OMEGACONF} has {shorten(body)} in a node of the kind {kind}")
            return found
        if kind != "dict":
            return [self._item(item, index, depth) for index, item in enumerate(body)]
        pairs = [pair for pair in body if type(pair) is list and len(pair) == 2]
        keys = [_single(pair[0]) for pair in pairs]
        if len(pairs) != len(body) or not all(type(key) in _KEYS for key in keys):
            corrupt(f"{OMEGACONF} needs pairs of a key and a node")
        if len(set(keys)) != len(keys) or collide(keys):
            corrupt(f"{OMEGACONF} has a key twice, or more than a few keys with the same hash")
        return {key: self._item(pair[1], key, depth) for key, pair in zip(keys, pairs, strict=True)}

    @staticmethod
    def _check_depth(depth: int) -> None:
        if depth > MAX_DEPTH:
            corrupt(f"{OMEGACONF} is nested deeper than {MAX_DEPTH} levels")


_KEYS: Final = (str, bytes, int, float, bool)


def _parts(node: Node) -> tuple[str, dict[str, Node], Node]:
    """Kind, facts and content of a node."""
    if type(node) is not list:
        return "any", {}, node
    if len(node) == 3:
        kind, facts, body = node
        if type(kind) is str and kind in _NODES and type(facts) is dict:
            return kind, facts, body
    corrupt(f"{OMEGACONF} holds {shorten(node)} where a node belongs")


def _metadata(kind: str, facts: dict[str, Node], key: Any) -> dict[str, Any]:
    names = _FACTS if kind in _CONTAINERS else _FACTS[:2]
    found: dict[str, Any] = {
        **dict(zip(names, _DEFAULTS[kind], strict=True)),
        "optional": True,
        "flags_root": False,
        "flags": {},
        "key": key,
        "resolver_cache": defaultdict(dict),
    }
    for name, node in facts.items():
        if name in names:
            found[name] = _type(node, 0)
        elif name in ("optional", "flags_root") and type(node) is bool:
            found[name] = node
        elif name == "flags" and type(node) is dict and all(map(_FLAG.fullmatch, node)):
            if not all(on is None or type(on) is bool for on in node.values()):
                corrupt(f"{OMEGACONF} has the flags {shorten(node)}")
            found[name] = dict(node)
        elif name == "key" and type(its := _single(node)) in (*_KEYS, type(None)):
            found[name] = its
        elif name == "cache" and type(node) is list:
            for entry in node:
                resolver, results = _cached(entry)
                found["resolver_cache"][resolver] = results
        else:
            corrupt(f"{OMEGACONF} says {shorten({name: node})} of a node of the kind {kind}")
    return found


def _cached(entry: Node) -> tuple[str, dict[tuple[Any, ...], Any]]:
    if type(entry) is list and len(entry) == 2 and type(entry[1]) is list:
        resolver, results = _single(entry[0]), {}
        for result in entry[1]:
            if type(result) is not list or len(result) != 2 or type(result[0]) is not list:
                corrupt(f"{OMEGACONF} remembers {shorten(result)}")
            arguments = tuple(_single(argument) for argument in result[0])
            if not all(type(argument) is str for argument in arguments):
                corrupt(f"{OMEGACONF} remembers {shorten(result)}")
            results[arguments] = _single(result[1])
        if type(resolver) is str and not collide(results):
            return resolver, results
    corrupt(f"{OMEGACONF} remembers {shorten(entry)}")


def _type(node: Node, depth: int) -> Any:
    if node is None:
        return None
    if type(node) is str and node in _TYPES:
        return _TYPES[node]
    if type(node) is list and node and type(node[0]) is str and node[0] in _GENERICS and depth < MAX_DEPTH:
        inner = tuple(_type(its, depth + 1) for its in node[1:])
        try:
            return _GENERICS[node[0]](inner)
        except (TypeError, IndexError) as error:
            corrupt(f"{OMEGACONF} holds {shorten(node)} where a type belongs: {shorten(str(error))}")
    corrupt(f"{OMEGACONF} holds {shorten(node)} where a type belongs")


def _single(node: Node) -> Any:
    """The value of a node that is neither a container nor a configuration."""
    if type(node) is dict and (decoder := DECODERS.get(tag_of(node) or "")) is not None:
        ((_, body),) = node.items()
        return decoder(body)
    if node is None or type(node) in (str, bool):
        return node
    if type(node) is float and math.isfinite(node):
        return node
    if type(node) is int and -MAX_EXACT_INT <= node <= MAX_EXACT_INT:
        return node
    corrupt(f"{OMEGACONF} holds {shorten(node)} where a single value belongs")
