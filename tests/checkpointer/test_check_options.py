"""Promise: a mistake in the options of a callback is told when the callback is made."""

from __future__ import annotations

from typing import Any

import pytest

import everystep
from everystep.checkpointer import check_options


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": "10 bananas"},
        {"every": 0},
        {"every": 2.5},
        {"every": 10, "mtbf": "1h"},
        {"mode": "later"},
        {"keep": 3},
        {"budget": 2.0},
        {"timeout": 0},
        {"on_error": "ignore"},
        {"options": 3},
        {"preemption_exit_code": "one"},
        {"evry": 10},
    ],
)
def test_what_a_checkpointer_refuses_is_refused_before_there_is_one(
    wrong: dict[str, Any], tmp_path: Any
) -> None:
    with pytest.raises((TypeError, ValueError)):
        everystep.Checkpointer(tmp_path / "run", {}, **wrong)
    with pytest.raises((TypeError, ValueError)):
        check_options(wrong, "Callback")


def test_what_a_checkpointer_takes_is_taken() -> None:
    options: dict[str, Any] = {
        "every": "30s",
        "keep": everystep.Keep(last=3),
        "mode": "sync",
        "options": everystep.Options(),
        "preemption": False,
        "preemption_exit_code": 3,
        "start_over": True,
    }
    assert check_options(options, "Callback") == options
    assert check_options({}, "Callback") == {}
    with pytest.raises(
        TypeError, match=r"Callback: 'evry' is no option of everystep.Checkpointer, which has every, keep"
    ):
        check_options({"evry": 10}, "Callback")
