"""What holds for every test: the environment that it leaves is the one that it found; and what each one costs."""

import os
import resource

import pytest

# Before anything imports torch: two workers share two cores, and a process that is started with other variables than
# those can't be forked from the one that has everything imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_PYTEST_OWN = {"PYTEST_CURRENT_TEST"}
_COST = "processor_seconds"
_MOST_SECONDS = 20.0
"""Of the processor, that a test of the default suite should take: a machine's load changes wall times, hardly these."""
_BEGUN = pytest.StashKey[float]()


@pytest.fixture(autouse=True)
def environment_as_it_was():
    """Undo what code under test writes into `os.environ`, such as the interface that a rank settles on."""
    before = dict(os.environ)
    yield
    for name in (set(os.environ) | set(before)) - _PYTEST_OWN:
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)


def _processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def pytest_runtest_setup(item):
    item.stash[_BEGUN] = _processor_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown" and _BEGUN in item.stash and not item.get_closest_marker("slow"):
        item.user_properties.append((_COST, _processor_seconds() - item.stash[_BEGUN]))
    return (yield)


def pytest_terminal_summary(terminalreporter):
    """Name the tests that have become expensive. A cost fails nothing."""
    reports = [report for several in terminalreporter.stats.values() for report in several]
    costs = {
        report.nodeid: dict(report.user_properties)[_COST]
        for report in reports
        if getattr(report, "when", "") == "teardown" and _COST in dict(report.user_properties)
    }
    terminalreporter.write_line(f"processor time of the default suite's tests: {sum(costs.values()):.0f} s")
    for name, seconds in sorted(costs.items(), key=lambda item: -item[1]):
        if seconds > _MOST_SECONDS:
            terminalreporter.write_line(f"{seconds:.0f} s, above {_MOST_SECONDS:.0f}: {name}")
