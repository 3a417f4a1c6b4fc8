"""A URL is never taken for a path: ``s3://bucket/run`` would be a directory ``s3:`` on the local disk."""

from __future__ import annotations

import importlib.util
import os
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import everystep
from everystep.cli.app import app
from everystep.cli.plugins import installed
from everystep.paths import local_path
from support.processes.path_calls import CALLS, framework_of, path_parameters

URLS: list[str | Path] = ["s3://bucket/run", Path("gs://bucket/run"), "file:///tmp/everystep-url/run"]


class Named:
    """An `os.PathLike` that is no `Path`, as `fsspec` and `cloudpathlib` have them."""

    def __fspath__(self) -> str:
        return "memory://bucket/run"


@pytest.fixture(autouse=True)
def nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    yield
    assert os.listdir(here) == []
    assert not os.path.exists("/tmp/everystep-url")


def test_every_public_call_that_takes_a_path_is_tested() -> None:
    found = path_parameters()
    # As many as there were when this was written, or the search finds less than it did.
    assert len(found) >= 60
    assert found <= set(CALLS) | {
        # DCP asks with these whether a path can be used; the answer is no.
        "dcp.Reader.validate_checkpoint_id.checkpoint_id",
        "dcp.Writer.validate_checkpoint_id.checkpoint_id",
    }


@pytest.mark.parametrize("url", URLS, ids=["text", "path", "file"])
@pytest.mark.parametrize("call", CALLS)
def test_a_url_is_refused_and_nothing_is_made(call: str, url: str | Path) -> None:
    framework = framework_of(call)
    if framework is not None and importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed; `make peers` looks at it")
    with pytest.raises(everystep.errors.UnsupportedURL, match="Give the path"):
        CALLS[call](url)


@pytest.mark.parametrize("url", [*URLS, Named()], ids=["text", "path", "file", "PathLike"])
def test_dcp_gets_the_error_for_a_url(url: Any) -> None:
    from everystep.integrations.dcp import Reader, Writer

    assert not Reader.validate_checkpoint_id(url)
    assert not Writer.validate_checkpoint_id(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/run",
        "S3://bucket/run",
        b"s3://bucket/run",
        Path("s3://bucket") / "run",
        str(Path("s3://bucket/run")),
        pytest.param(Named(), id="PathLike"),
        "simplecache::s3://bucket/run",
        Path("simplecache::s3://bucket/run"),
        "file:///tmp/run",
        "file:/tmp/run",
        "dbfs:/mnt/run",
        "hf://datasets/x/run",
        "abfss://box@account.dfs.core.windows.net/run",
        " s3://bucket/run",
        os.path.join("/work", "s3://bucket/run"),
        os.path.abspath("/work/memory://bucket/run"),
        Path("/work") / "s3://bucket/run",
        os.path.join("runs", "s3://bucket"),
    ],
    ids=str,
)
def test_a_url_is_known_in_every_form(url: Any) -> None:
    with pytest.raises(everystep.errors.UnsupportedURL) as raised:
        local_path(url)
    assert os.fsdecode(url) in str(raised.value)


@pytest.mark.parametrize(
    "path",
    [
        "runs/gpt",
        "/work/runs/gpt@30",
        "a:b",
        "runs/lr=1e-3:warm/x",
        "s3:",
        "c:/runs",
        "/work/12:30/run",
        "http-logs/run",
        "runs//gpt",
        "http/x:y/z",
        Path("a") / "b:" / "c",
    ],
    ids=str,
)
def test_a_path_with_a_colon_is_a_path(path: str | Path) -> None:
    assert local_path(path) == os.path.abspath(path)


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(everystep.errors.UnsupportedURL, match=re.escape("s3://b/x is a URL")) as raised:
        everystep.save("s3://b/x", {})
    assert "Nothing was read or written" in str(raised.value)
    assert isinstance(raised.value, ValueError)
    with pytest.raises(everystep.errors.UnsupportedURL, match="without the scheme"):
        everystep.load("file:///tmp/x")
    with pytest.raises(everystep.errors.UnsupportedURL, match="what is left of a URL"):
        everystep.load(Path("s3://b/x"))


def _commands() -> Iterator[tuple[list[str], Callable[..., Any]]]:
    def named(group: typer.Typer, before: list[str]) -> Iterator[tuple[list[str], Callable[..., Any]]]:
        for command in group.registered_commands:
            assert command.callback is not None
            yield [*before, command.name or command.callback.__name__], command.callback
        for below in group.registered_groups:
            assert below.typer_instance is not None
            assert below.name is not None
            yield from named(below.typer_instance, [*before, below.name])

    yield from named(app, [])
    yield from named(installed(), [])


def _command_lines() -> Iterator[list[str]]:
    """One line for each parameter that is a path: the URL there, and words for other arguments."""
    for name, callback in _commands():
        hints = typing.get_type_hints(callback, include_extras=True)
        parameters = {parameter: typing.get_args(hint) for parameter, hint in hints.items()}
        parameters = {parameter: told for parameter, told in parameters.items() if told}
        paths = [parameter for parameter, (kind, *_) in parameters.items() if "pathlib" in repr(kind)]
        for tested in paths:
            line, rest = list(name), []
            for parameter, (_, *told) in parameters.items():
                info = next((it for it in told if isinstance(it, typer.models.ParameterInfo)), None)
                if isinstance(info, typer.models.ArgumentInfo):
                    rest.append("URL" if parameter == tested else "true")
                elif parameter == tested:
                    assert info is not None
                    flags = [flag for flag in info.param_decls or () if flag.startswith("--")]
                    line += [flags[0] if flags else "--" + parameter.replace("_", "-"), "URL"]
            yield line + rest


COMMAND_LINES = list(_command_lines())


def test_the_commands_that_take_paths_are_found() -> None:
    names = {line[0] for line in COMMAND_LINES}
    assert names >= {
        *("bench", "convert", "diff", "doctor", "drill", "export", "ls", "prune", "shelf", "show", "spec"),
        *("stats", "study", "verify", "view"),
    }


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///tmp/everystep-url/run"])
@pytest.mark.parametrize("line", COMMAND_LINES, ids=" ".join)
def test_a_command_refuses_a_url_as_wrong_usage(line: list[str], url: str) -> None:
    result = CliRunner().invoke(app, [url if word == "URL" else word for word in line])
    assert result.exit_code == 2, result.output
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())
    assert f"{url} is a URL" in said
    assert "Give the path" in said


def test_a_url_given_with_an_equals_sign_is_shown_whole() -> None:
    result = CliRunner().invoke(app, ["view", "run", "--out=s3://bucket/page.html"])
    assert result.exit_code == 2
    assert "s3://bucket/page.html is a URL" in result.output
