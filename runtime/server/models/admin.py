"""Models loaded, swapped and unloaded on demand, by those whose key is an admin's."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.types import Scope

from llmc.runtime.server.http.call import Call, Called, call_of
from llmc.runtime.server.http.errors import ApiError, no_route
from llmc.runtime.server.models.service import Served, Service

PREFIX = "/admin/models"


def refusal(scope: Scope) -> ApiError | None:
    """The refusal of whoever is no admin: 404, as of any route that is not there, where the file of keys names no
    admin; 403, where the key is another one's."""
    call = call_of(scope)
    if not call.has_admin or call.client.key is None:
        return no_route(scope)
    try:
        call.client.check_admin()
    except ApiError as error:
        return error
    return None


async def require_admin(request: Request) -> None:
    """Refuse whoever is no admin. Raises ApiError: 404 or 403."""
    if (error := refusal(request.scope)) is not None:
        raise error


router = APIRouter(prefix=PREFIX, tags=["Administration"], dependencies=[Depends(require_admin)])


def _state(call: Call, service: Service, name: str) -> dict[str, Any]:
    adapters = [it for it, base in service.pool.adapters.items() if base == name and call.client.allows(it)]
    return {"id": name, **asdict(service.pool.states()[name]), "adapters": adapters}


def _note(call: Call, service: Service, name: str, adapter: str | None = None) -> None:
    """Log a model and its adapter. Raises ApiError: there is no such model, or the key is not for both."""
    call.note(model=service.find(call.client, name, adapters=False))
    if adapter is not None:
        call.note(adapter=adapter[:80])
        call.client.check_model(adapter[:80])


@router.get("")
async def models(call: Called, service: Served) -> dict[str, Any]:
    """The models of the admin's key: phase, reason of the last failure, memory that they hold, and who uses them."""
    plan = {"memory": service.pool.memory, "memory_taken": service.pool.memory_taken}
    return {
        "object": "list",
        "data": [_state(call, service, name) for name in service.pool.names if call.client.allows(name)],
        **plan,
    }


# Before the routes of models, whose names may have a slash.
@router.post("/{name:path}/adapters/{adapter}/load")
async def load_adapter(name: str, adapter: str, call: Called, service: Served) -> dict[str, Any]:
    """Let requests name an adapter that is in a model's bundle; the model is loaded if it is not."""
    _note(call, service, name, adapter)
    await service.pool.place(name).load_adapter(adapter)
    return _state(call, service, name)


@router.post("/{name:path}/adapters/{adapter}/unload")
async def unload_adapter(name: str, adapter: str, call: Called, service: Served) -> dict[str, Any]:
    """Take no more requests for an adapter; those that have it go on."""
    _note(call, service, name, adapter)
    await service.pool.place(name).unload_adapter(adapter)
    return _state(call, service, name)


@router.post("/{name:path}/reload")
async def reload(name: str, call: Called, service: Served) -> dict[str, Any]:
    """Load the bundle that is in a model's folder now: beside the one that serves, which goes on if it fails."""
    _note(call, service, name)
    await service.pool.place(name).swap()
    return _state(call, service, name)


@router.post("/{name:path}/unload")
async def unload(name: str, call: Called, service: Served) -> dict[str, Any]:
    """Let a model go. Its requests finish, and the next one loads it again."""
    _note(call, service, name)
    await service.pool.place(name).unload()
    return _state(call, service, name)
