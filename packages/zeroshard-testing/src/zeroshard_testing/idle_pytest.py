"""A pytest that is configured but runs nothing: workers live inside it, and get its assertions and warning filters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zeroshard_testing.execution import ProtocolPlugin


def with_idle_pytest(pytest_args: list[str], body: Callable[[pytest.Session], None]) -> None:
    """Load torch, configure pytest, and call ``body`` where collection would be.

    Args:
        pytest_args: Command line for pytest.
        body: Takes the session; hooks of it may be called from there.
    """
    # Before pytest is configured: a filter that makes an error of warnings is for tests, not for torch's own modules.
    import torch

    torch.set_num_threads(1)
    pytest.main(pytest_args, plugins=[_TakeOver(body), _Registrar()])


class _Registrar:
    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(ProtocolPlugin(), ProtocolPlugin.name)


class _TakeOver:
    def __init__(self, body: Callable[[pytest.Session], None]) -> None:
        self._body = body

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        self._body(session)
        return True
