"""The names users may rely on, and what they promise about each other."""

from __future__ import annotations

import builtins
import importlib
import inspect
import pickle

import pytest

import everystep
from everystep import errors

MODULES = {"errors", "inspect", "universal", "view"}
CALLS = {"load", "open", "per_rank", "rank_zero", "rng", "save", "stable", "verify"}
TYPES = {
    "Checkpoint",
    "CheckpointInfo",
    "Checkpointer",
    "Keep",
    "LeafInfo",
    "Options",
    "PendingSave",
    "VerifyProblem",
    "VerifyReport",
    "Shelf",
    "ShelfWarning",
}

TOP_ERRORS = {
    "EverystepError",
    "CheckpointExists",
    "CheckpointNotFound",
    "CorruptCheckpoint",
    "RankFailed",
    "SaveFailed",
    "StateMismatch",
    "UnsupportedState",
}
"""What programs catch most. All others are `everystep.errors.X`, as these are."""

# Every error, and the builtin that a caller who knows nothing of Everystep would catch.
ERRORS = {
    "EverystepError": Exception,
    "CorruptCheckpoint": ValueError,
    "IncompleteCheckpoint": FileNotFoundError,
    "CheckpointNotFound": FileNotFoundError,
    "CheckpointExists": FileExistsError,
    "UnsupportedCheckpoint": NotImplementedError,
    "CheckpointClosed": ValueError,
    "LeafNotFound": KeyError,
    "StateMismatch": ValueError,
    "UnsupportedSource": ValueError,
    "DecompressionBomb": ValueError,
    "UnsupportedState": TypeError,
    "UnsupportedURL": ValueError,
    "UnsupportedVersion": ImportError,
    "SpecError": ValueError,
    "Locked": BlockingIOError,
    "RunInUse": FileExistsError,
    "RunMoved": OSError,
    "SaveFailed": OSError,
    "MutatedDuringSave": OSError,
    "DeviceTimeout": TimeoutError,
    "StorageFull": OSError,
    "StorageDenied": PermissionError,
    "StorageMissing": FileNotFoundError,
    "ReadFailed": OSError,
    "ReadDenied": PermissionError,
    "OutOfResources": OSError,
    "RankFailed": ConnectionError,
    "RankTimeout": TimeoutError,
    "RanksDisagree": ValueError,
    "SaveFailedOnRank": ConnectionError,
    "SaveRejected": ValueError,
    "SaveTimedOut": TimeoutError,
    "CorruptShelf": ValueError,
    "UnsupportedShelf": NotImplementedError,
    "ShelfNotFound": FileNotFoundError,
    "ShelfFull": OSError,
    "ShelfClosed": ValueError,
    "TransactionError": RuntimeError,
    "EngineTimeout": TimeoutError,
    "EngineUnavailable": RuntimeError,
}


def test_the_public_names_are_these_and_no_others() -> None:
    assert set(everystep.__all__) == CALLS | TYPES | MODULES | TOP_ERRORS
    assert len(everystep.__all__) == len(set(everystep.__all__))
    importlib.import_module("everystep.store.api")  # submodules, too, become attributes
    shown = {name for name in dir(everystep) if not name.startswith("__")}
    assert shown == set(everystep.__all__), "what the package itself has imported is not shown"
    assert {"__version__", "__doc__", "__all__"} <= set(dir(everystep))


@pytest.mark.parametrize("name", sorted(CALLS | TYPES | TOP_ERRORS))
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    found = getattr(everystep, name)
    assert found.__name__ == name
    assert inspect.getdoc(found)
    assert getattr(importlib.import_module(found.__module__), name) is found
    assert getattr(everystep, name) is found  # the second time, without the detour


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sav'"):
        _ = everystep.sav
    with pytest.raises(ImportError):
        exec("from everystep import sav")


def test_star_import_works_and_brings_what_all_says() -> None:
    namespace: dict[str, object] = {}
    exec("from everystep import *", namespace)
    assert set(everystep.__all__) <= set(namespace)


def test_every_error_there_is_is_public() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert defined == set(ERRORS)


@pytest.mark.parametrize(("name", "builtin"), ERRORS.items())
def test_every_error_is_ours_and_a_builtin_one(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, everystep.EverystepError)
    assert issubclass(error, builtin)
    if name != "EverystepError":
        assert any(base.__name__ in vars(builtins) and base is not Exception for base in error.__mro__)
        # Its documentation says more than its name: what happened, and what to do about it.
        assert len(inspect.getdoc(error) or "") > 60


@pytest.mark.parametrize("name", sorted(set(ERRORS) - {"CorruptCheckpoint", "IncompleteCheckpoint"}))
def test_every_error_carries_its_message(name: str) -> None:
    assert "what happened" in str(getattr(errors, name)("what happened"))


def test_corruption_names_file_and_leaf() -> None:
    error = everystep.CorruptCheckpoint("a bit is wrong", path="/run/x", leaf="model.w")
    assert (error.reason, error.path, error.leaf) == ("a bit is wrong", "/run/x", "model.w")
    assert str(error) == "corrupt checkpoint in /run/x, leaf 'model.w': a bit is wrong"
    assert isinstance(everystep.errors.IncompleteCheckpoint("missing"), everystep.CorruptCheckpoint)


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_arrives_at_another_rank_as_it_was(name: str) -> None:
    kind = getattr(errors, name)
    corrupt = issubclass(kind, everystep.CorruptCheckpoint)
    error = kind("what happened", path="/run/x", leaf="model.w") if corrupt else kind("what happened")
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is kind
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_the_signatures_of_the_calls() -> None:
    """Keyword-only from the second argument on, so that they can grow."""
    calls = (
        (everystep.save, ["path", "state"]),
        (everystep.load, ["path", "into"]),
        (everystep.open, ["path"]),
    )
    for call, positional in calls:
        parameters = inspect.signature(call).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert everystep.__version__
