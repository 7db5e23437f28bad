"""The application as a whole: what holds for several routes."""

import inspect

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from llmc.runtime.server.app import ROUTERS


def dependencies(dependant: Dependant) -> list[Dependant]:
    return [found for own in dependant.dependencies for found in (own, *dependencies(own))]


def test_nothing_of_a_request_takes_a_thread_by_being_no_coroutine():
    """A hop to a thread and back costs more than all the rest of a small request."""
    called = {
        call
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for call in (route.endpoint, *(own.call for own in dependencies(route.dependant)))
    }
    assert called
    assert [call for call in called if not inspect.iscoroutinefunction(call)] == []
