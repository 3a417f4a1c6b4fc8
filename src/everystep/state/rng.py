"""`rng`: the random number generators of a training as one object for the state tree.

Owns what each kind of generator's state looks like as plain arrays and values, and which generators belong to
a process: Python's, NumPy's, torch's on the CPU and on its accelerator, and those it is given. Only what is
already imported is looked at; NumPy always is, since Everystep itself is built on it.

Loading another object's state may draw random numbers, so `Restore` loads this one after all others
(`restore_last`). Loading is all or nothing: what does not fit is found before the first generator changes.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from everystep.errors import StateMismatch, UnsupportedState
from everystep.state.refusals import type_name

_PYTHON_VERSION = 3
"""The form of ``random.getstate()``, the same since Python 3.2."""

_WORDS = 625
"""624 words of the Mersenne twister, and the position among them."""


def rng(*generators: object, hold: bool = False, **named: object) -> Rng:
    """Every random number generator of this process, to be saved and restored with the rest of the state.

    Covers Python's ``random``, NumPy's global generator, torch's on the CPU and on every accelerator device,
    and the generators given here. It is restored after everything else in the state, wherever it stands,
    because other objects may draw numbers while they load.

    Args:
        generators: More generators: ``random.Random``, ``numpy.random.Generator``,
            ``numpy.random.RandomState`` or ``torch.Generator``. A restore matches them by position.
        hold: Keep what is restored back until `Rng.release`. For loops that still draw numbers between the
            restore and the first step, for example to skip the batches that were seen before.
        named: More generators that a restore matches by keyword.

    >>> import everystep, random, tempfile
    >>> augmentation = random.Random(7)
    >>> state = {"rng": everystep.rng(augment=augmentation)}
    >>> saved = everystep.save(tempfile.mkdtemp() + "/checkpoint", state)
    >>> drawn = random.random(), augmentation.gauss(0, 1)
    >>> _ = everystep.load(saved.path, into=state)
    >>> drawn == (random.random(), augmentation.gauss(0, 1))
    True

    Generators must be the same in number, name and kind as when the state was saved. Accelerator devices need
    not be: a saved device that this process does not have is skipped with a warning, and one that was not
    saved keeps its state. A library that had not been imported when the state was saved is left alone.
    """
    return Rng({**{str(position): found for position, found in enumerate(generators)}, **named}, hold=hold)


class Rng:
    """What `rng` returns: ``state_dict`` and ``load_state_dict`` over all generators of the process."""

    __slots__ = ("_generators", "_held", "_hold")

    restore_last = True
    """For `Restore`: other objects may draw random numbers while they load."""

    def __init__(self, generators: Mapping[str, object], *, hold: bool = False) -> None:
        for name, generator in generators.items():
            _kind_of(generator, name)  # an unknown kind is reported here, not at the first save
        self._generators = dict(generators)
        self._hold = hold
        self._held: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        given = ", ".join(f"{name}: {type_name(found)}" for name, found in self._generators.items())
        return f"<everystep.rng of this process{' and ' + given if given else ''}>"

    def state_dict(self) -> dict[str, Any]:
        """The state of every generator, as arrays and plain values of its own; that which is held, if any."""
        return self._present() if self._held is None else dict(self._held)

    def _present(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": _get_python(random),
            "numpy": np.random.get_state(legacy=False),
        }
        torch = sys.modules.get("torch")
        if torch is not None:
            state["torch"] = {"cpu": torch.get_rng_state().numpy(), **_get_devices(torch)}
        state["generators"] = {}
        for name, generator in self._generators.items():
            kind = _kind_of(generator, name)
            state["generators"][name] = {"kind": kind.name, "state": kind.get(generator)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue every generator where it was saved. If not: `StateMismatch`, and none is changed."""
        given = self._matched(state)
        if self._hold:
            self._held = state
            return
        self._set(state, given)

    def release(self) -> None:
        """With `hold`: sets every generator to the state that was restored, if there is one."""
        state, self._held = self._held, None
        if state is not None:
            self._set(state, self._matched(state))

    def _set(self, state: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        before = self._present()
        try:
            self._load(state, given)
        except Exception as error:
            # What was saved has the right kind but not the right contents: damaged, or made by hand.
            self._load(before, before["generators"])
            raise StateMismatch(
                f"a saved state of random numbers is not one: {error}. No generator has been changed"
            ) from error

    def _matched(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The saved states of the given generators, once they are known to fit."""
        saved = state.get("generators")
        if not isinstance(saved, Mapping) or "python" not in state or "numpy" not in state:
            raise StateMismatch("what was saved here is not the state of an everystep.rng()")
        if saved.keys() != self._generators.keys():
            raise StateMismatch(
                f"the checkpoint has the states of {_listed(saved)}, and everystep.rng() was given "
                f"{_listed(self._generators)}. Give it the same generators, by the same positions and "
                "names. No generator has been changed"
            )
        for name, generator in self._generators.items():
            kind = _kind_of(generator, name)
            if saved[name]["kind"] != kind.name:
                raise StateMismatch(
                    f"generator {name!r} was a {saved[name]['kind']} when it was saved and is a {kind.name} "
                    "now: their numbers have nothing in common. No generator has been changed"
                )
        if "torch" in state and importlib.util.find_spec("torch") is None:
            raise StateMismatch(
                "torch's random numbers were saved and torch is not installed here. Install it, or leave "
                "everystep.rng() out of what is restored. No generator has been changed"
            )
        own = np.random.get_state(legacy=False)["bit_generator"]
        if state["numpy"]["bit_generator"] != own:
            raise StateMismatch(
                f"NumPy's global generator ran on {state['numpy']['bit_generator']} when it was saved and "
                f"runs on {own} now. Call numpy.random.set_bit_generator as before. No generator has been "
                "changed"
            )
        return saved

    def _load(self, state: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        _set_python(random, state["python"])
        np.random.set_state(state["numpy"])
        if "torch" in state:
            import torch

            torch.set_rng_state(_tensor(state["torch"]["cpu"]))
            _set_devices(torch, state["torch"])
        for name, generator in self._generators.items():
            _kind_of(generator, name).set(generator, given[name]["state"])


def _listed(generators: Mapping[str, object]) -> str:
    if not generators:
        return "no further generators"
    return f"{len(generators)} further generator(s) ({', '.join(map(repr, generators))})"


# --- kinds of generators ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """What kind a generator is, and how its state is taken and put back."""

    name: str
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None]


def _kind_of(generator: Any, name: str) -> _Kind:
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return _Kind("random.Random", _get_python, _set_python)
    if isinstance(generator, np.random.Generator):
        algorithm = type(generator.bit_generator).__name__
        return _Kind(f"numpy.random.Generator on {algorithm}", _get_numpy, _set_numpy)
    if isinstance(generator, np.random.RandomState):
        algorithm = generator.get_state(legacy=False)["bit_generator"]
        return _Kind(f"numpy.random.RandomState on {algorithm}", _get_legacy, _set_legacy)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(generator, torch.Generator):
        return _Kind(f"torch.Generator on {generator.device.type}", _get_torch, _set_torch)
    raise UnsupportedState(
        f"generator {name!r} is a {type_name(generator)}, whose state everystep.rng() does not know. It "
        "takes random.Random, numpy.random.Generator, numpy.random.RandomState and torch.Generator; a JAX "
        "key is an array and goes into the state itself"
    )


def _get_python(generator: Any) -> dict[str, Any]:
    version, words, gauss = generator.getstate()
    if version != _PYTHON_VERSION or len(words) != _WORDS:
        raise UnsupportedState(f"{type_name(generator)}.getstate() has a form of its own (version {version})")
    # 625 numbers as one array: as a tuple they would make the manifest grow by five times as much.
    return {"words": np.array(words, np.uint32), "gauss": gauss}


def _set_python(generator: Any, state: Mapping[str, Any]) -> None:
    generator.setstate((_PYTHON_VERSION, tuple(state["words"].tolist()), state["gauss"]))


def _get_numpy(generator: Any) -> dict[str, Any]:
    bits = generator.bit_generator
    seeds = getattr(bits, "seed_seq", None)
    if type(seeds) is not np.random.SeedSequence:
        return {"bits": bits.state, "seeds": None}
    # `spawn` counts its children in the seed sequence, which is no part of the bit generator's own state.
    return {
        "bits": bits.state,
        "seeds": {
            "entropy": seeds.entropy,
            "spawn_key": tuple(map(int, seeds.spawn_key)),
            "pool_size": seeds.pool_size,
            "n_children_spawned": seeds.n_children_spawned,
        },
    }


def _set_numpy(generator: Any, state: Mapping[str, Any]) -> None:
    bits = generator.bit_generator
    seeds = state["seeds"]
    # The only way to give a bit generator another seed sequence is the one that copying takes, since NumPy 2.
    if seeds is not None and int(np.__version__.partition(".")[0]) >= 2:
        bits.__setstate__((state["bits"], np.random.SeedSequence(**seeds)))
    else:
        bits.state = state["bits"]


def _get_legacy(generator: Any) -> Any:
    return generator.get_state(legacy=False)


def _set_legacy(generator: Any, state: Any) -> None:
    generator.set_state(state)


def _get_torch(generator: Any) -> Any:
    return generator.get_state().numpy()


def _set_torch(generator: Any, state: Any) -> None:
    generator.set_state(_tensor(state))


def _tensor(state: Any) -> Any:
    import torch

    return torch.from_numpy(np.array(state, np.uint8))  # a copy: torch wants memory it may write to


# --- accelerators -------------------------------------------------------------------------------------------


def _accelerator(torch: Any) -> tuple[str, Any] | None:
    """The kind of accelerator this torch is built for, and its module (cuda, xpu, mps, ...)."""
    found = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return None if found is None else (found.type, torch.get_device_module(found))


def _get_devices(torch: Any) -> dict[str, list[Any]]:
    found = _accelerator(torch)
    if found is None:
        return {}
    kind, module = found
    # Asking an idle device for its state would start its driver, which forbids forking workers afterwards.
    in_use = module.is_initialized() if hasattr(module, "is_initialized") else module.is_available()
    if not in_use:
        return {}
    return {kind: [module.get_rng_state(index).numpy() for index in range(module.device_count())]}


def _set_devices(torch: Any, saved: Mapping[str, Any]) -> None:
    here = _accelerator(torch)
    for kind, states in saved.items():
        if kind == "cpu":
            continue
        count = 0
        if here is not None and here[0] == kind and here[1].is_available():
            count = here[1].device_count()
            for index, state in enumerate(states[:count]):
                here[1].set_rng_state(_tensor(state), index)
        if count < len(states):
            warnings.warn(
                f"random numbers of {len(states)} {kind} device(s) were saved and this process has {count}: "
                f"those from {kind}:{count} on are not continued, and results may differ from a run on the "
                "same devices. Everything else is restored",
                stacklevel=2,
            )
