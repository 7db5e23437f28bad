"""Tests of this folder may be coroutines."""

import asyncio
import inspect

import pytest

WAIT_S = 20.0  # for what happens at once, on a machine that does much else


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine on a loop of its own, and fail where it waits for ever."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), WAIT_S))
    return True
