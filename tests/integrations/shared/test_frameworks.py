"""What a user reads whose framework is missing, too old or too new."""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata

import pytest

from everystep.integrations.shared.frameworks import require

FRAMEWORKS = ["lightning", "transformers", "accelerate", "deepspeed", "jax", "chainer", "keras", "tensorflow"]


def first_used(name: str) -> None:
    module = importlib.import_module(f"everystep.integrations.{name}")
    getattr(module, module.__all__[0])


def found(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: version)


@pytest.mark.parametrize("version", ["2.6", "2.6.0", "2.6.6", "2.6.6.post1", "2.6.99rc1"])
def test_supported_versions_pass(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    found(monkeypatch, version)
    require("lightning", "2.6", "2.7", extra="lightning")
    with pytest.raises(ImportError, match=f"lightning {version}, which is too old"):
        require("lightning", "2.7", "2.8", extra="lightning")


def test_another_build_of_the_same_package_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package != "tensorflow-cpu":
            raise metadata.PackageNotFoundError(package)
        return "2.21.0"

    monkeypatch.setattr(metadata, "version", version)
    require("tensorflow", "2.21", "2.22", extra="tensorflow", builds=("tensorflow-cpu",))
    with pytest.raises(ImportError, match=r"does not know tensorflow 2\.21\.0, which is too old"):
        require("tensorflow", "2.22", "2.23", extra="tensorflow", builds=("tensorflow-cpu",))


@pytest.mark.parametrize(
    ("version", "how"), [("2.5.9", "old"), ("1.9", "old"), ("2.7.0", "new"), ("3.0a1", "new")]
)
def test_other_versions_are_named_with_those_supported(
    monkeypatch: pytest.MonkeyPatch, version: str, how: str
) -> None:
    found(monkeypatch, version)
    wanted = rf"lightning {version}, which is too {how}: it supports lightning from 2\.6 up to.* 2\.7"
    with pytest.raises(ImportError, match=wanted):
        require("lightning", "2.6", "2.7", extra="lightning")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_missing_framework_says_what_to_install(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.fail(f"{name} is installed here; the tests that need it run in an environment of `make peers`")
    with pytest.raises(ImportError, match=rf"pip install 'everystep\[{name}\]'"):
        first_used(name)


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize(("version", "how"), [("0.9", "old"), ("99.0", "new")])
def test_each_module_checks_the_version_before_it_imports_the_framework(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str, how: str
) -> None:
    found(monkeypatch, version)
    wanted = rf"{name} {version}, which is too {how}: it supports {name} from .* up to, not including"
    with pytest.raises(ImportError, match=wanted):
        first_used(name)


def test_trainer_needs_an_accelerate_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"transformers": "5.23.1", "accelerate": "1.16.0"}.__getitem__)
    with pytest.raises(
        ImportError, match=r"transformers does not know accelerate 1\.16\.0, which is too new"
    ):
        importlib.import_module("everystep.integrations.transformers")
