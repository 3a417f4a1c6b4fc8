"""Random sequences of rules against a shelf: the state machines of hypothesis."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def assert_machine(
    machine: type[RuleBasedStateMachine], *, examples: int, steps: int, **attributes: object
) -> None:
    """Runs a machine with these attributes of its class; its rules and invariants assert."""
    run_state_machine_as_test(
        type(machine.__name__, (machine,), attributes),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
