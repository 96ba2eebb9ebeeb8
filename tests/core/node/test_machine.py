"""The node under any order of events: every invariant after each step, and every waiter answered."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support.core.machine import (
    NodeMachine,
)

TestNode = NodeMachine.TestCase
TestNode.settings = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
