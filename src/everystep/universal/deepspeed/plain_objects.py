"""Objects of DeepSpeed's own classes as plain values, and back.

Beside tensors and values, DeepSpeed saves objects of a few classes of its own (`names.CLASSES`), and its
users their ``argparse.Namespace``. Everystep stores no pickles, but the name of the class and the attributes.
`integrations.deepspeed` writes them, and `everystep convert --kind deepspeed` reads them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any

from everystep.universal.deepspeed.names import CLASSES, NAMESPACE

_CLASS, _STATE = "everystep.class", "everystep.state"


def _same(value: Any) -> Any:
    return value


def to_plain(value: Any, leaf: Callable[[Any], Any] = _same) -> Any:
    """The value with plain values for objects of known classes. `leaf` converts all that is not nested.

    Objects of other classes stay: Everystep refuses them, and names their place.
    """
    kind = type(value)
    if kind is dict:
        return {key: to_plain(item, leaf) for key, item in value.items()}
    if kind is OrderedDict:
        made = OrderedDict((key, to_plain(item, leaf)) for key, item in value.items())
        vars(made).update(vars(value))  # the versions of modules, in a module's state dict
        return made
    if kind is list:
        return [to_plain(item, leaf) for item in value]
    if kind is tuple:
        return tuple([to_plain(item, leaf) for item in value])
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in CLASSES or name == NAMESPACE:
        state = value.value if isinstance(value, Enum) else to_plain(vars(value), leaf)
        return {_CLASS: name, _STATE: state}
    return leaf(value)


def from_plain(value: Any, make: Callable[[str, Any], Any], leaf: Callable[[Any], Any] = _same) -> Any:
    """The reverse. `make` gets the name of a known class, and the attributes or the value of an object."""
    kind = type(value)
    if kind is dict:
        if value.keys() == {_CLASS, _STATE} and (value[_CLASS] in CLASSES or value[_CLASS] == NAMESPACE):
            return make(value[_CLASS], from_plain(value[_STATE], make, leaf))
        return {key: from_plain(item, make, leaf) for key, item in value.items()}
    if kind is OrderedDict:
        made = OrderedDict((key, from_plain(item, make, leaf)) for key, item in value.items())
        vars(made).update(vars(value))
        return made
    if kind is list:
        return [from_plain(item, make, leaf) for item in value]
    if kind is tuple:
        return tuple([from_plain(item, make, leaf) for item in value])
    return leaf(value)
