"""Commands of other distributions: found by their entry points, and missed in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from everystep.cli import plugins
from everystep.cli.app import app
from everystep.cli.completion import proposals
from everystep.cli.examples import EXAMPLES
from everystep.cli.plugins import Plugin, installed
from support.processes.command import command


def greet(name: str = "you") -> None:
    """Say hello."""
    print(f"hello {name}")


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The entry points that there are: none, until a test adds some."""
    found: list[Any] = []
    monkeypatch.setattr(metadata, "entry_points", lambda group: found if group == plugins.GROUP else [])
    monkeypatch.setattr("everystep.cli.plugins.EXAMPLES", dict(EXAMPLES))
    installed.cache_clear()
    yield found
    installed.cache_clear()


def entry(name: str, load: Any) -> Any:
    return SimpleNamespace(name=name, load=load)


def broken() -> Plugin:
    raise ImportError("it needs a newer Everystep")


def test_a_plugin_is_a_command_like_ours(entries: list[Any]) -> None:
    entries.append(entry("greet", lambda: Plugin(greet)))
    assert command("greet", "--name", "Ada").out == "hello Ada\n"
    assert "Say hello." in command("--help").out
    assert proposals(typer.main.get_command(app), "everystep gr") == ["greet"]
    assert proposals(typer.main.get_command(app), "everystep greet --n") == ["--name"]


@pytest.mark.parametrize("words", [("bench",), ("bench", "/scratch", "--quick", "--json"), ("study", "run")])
def test_what_is_not_installed_says_what_to_install(entries: list[Any], words: tuple[str, ...]) -> None:
    outcome = command(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"everystep: {words[0]} is part of another package: pip install everystep-study\n"
    assert "pip install everystep-study" in " ".join(command("--help").out.replace("│", " ").split())


def test_a_broken_plugin_takes_no_other_command_along(entries: list[Any]) -> None:
    entries.append(entry("greet", broken))
    entries.append(entry("other", lambda: Plugin(greet)))
    outcome = command("greet", "--name", "Ada")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "everystep: greet cannot be loaded: ImportError: it needs a newer Everystep\n"
    assert command("other").out == "hello you\n"
    assert "greet cannot be loaded" in command("--help").out


def test_ours_cannot_be_replaced(entries: list[Any]) -> None:
    entries.append(entry("doctor", lambda: Plugin(greet)))
    assert "Say hello" not in command("doctor", "--help").out
    assert "Say hello" not in command("--help").out


def test_our_own_commands_look_for_no_plugins(entries: list[Any], tmp_path: Path) -> None:
    assert command("doctor", tmp_path, "--json").code == 0
    assert installed.cache_info().currsize == 0
    command("bench", "--help")
    assert installed.cache_info().currsize == 1
