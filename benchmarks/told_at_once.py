"""A plugin of pytest for tests that may be stopped: a failure's traceback is printed at once, not at the end."""

from __future__ import annotations

import pytest


class _Teller:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    # After the terminal has written the test's line, which names it.
    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.get_terminal_writer()
            terminal.line()
            report.toterminal(terminal)
            terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # what the workers report comes to the first process
        config.pluginmanager.register(_Teller(config))
