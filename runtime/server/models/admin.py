"""Models loaded, swapped and unloaded on demand, by those whose key is an admin's."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.types import Scope

from llmc.runtime.server.http.accounts import allows_model, check_model
from llmc.runtime.server.http.errors import ApiError, no_route
from llmc.runtime.server.http.logs import note
from llmc.runtime.server.models.service import Served, Service

PREFIX = "/admin/models"


def refusal(scope: Scope) -> ApiError | None:
    """The refusal of whoever is no admin: 404, as of any route that is not there, where the file of keys names no
    admin; 403, where the key is another one's."""
    state = scope.get("state", {})
    key = state.get("key")
    if not state.get("has_admin") or key is None:
        return no_route(scope)
    if not key.admin:
        return ApiError(403, f"the key {key.name!r} is no admin's; use one that has admin = true in the file of keys")
    return None


async def require_admin(request: Request) -> None:
    """Refuse whoever is no admin. Raises ApiError: 404 or 403."""
    if (error := refusal(request.scope)) is not None:
        raise error


router = APIRouter(prefix=PREFIX, tags=["Administration"], dependencies=[Depends(require_admin)])


def _state(service: Service, name: str) -> dict[str, Any]:
    adapters = [it for it, base in service.pool.adapters.items() if base == name and allows_model(it)]
    return {"id": name, **asdict(service.pool.states()[name]), "adapters": adapters}


def _note_adapter(service: Service, name: str, adapter: str) -> None:
    """Log a model and its adapter. Raises ApiError: there is no such model, or the key is for one of them alone."""
    note(model=service.name(name, adapters=False), adapter=adapter[:80])
    check_model(adapter[:80])


@router.get("")
async def models(service: Served) -> dict[str, Any]:
    """The models of the admin's key: phase, reason of the last failure, memory that they hold, and who uses them."""
    plan = {"memory": service.pool.memory, "memory_taken": service.pool.memory_taken}
    return {
        "object": "list",
        "data": [_state(service, name) for name in service.pool.names if allows_model(name)],
        **plan,
    }


# Before the routes of models, whose names may have a slash.
@router.post("/{name:path}/adapters/{adapter}/load")
async def load_adapter(name: str, adapter: str, service: Served) -> dict[str, Any]:
    """Let requests name an adapter that is in a model's bundle; the model is loaded if it is not."""
    _note_adapter(service, name, adapter)
    await service.pool.load_adapter(name, adapter)
    return _state(service, name)


@router.post("/{name:path}/adapters/{adapter}/unload")
async def unload_adapter(name: str, adapter: str, service: Served) -> dict[str, Any]:
    """Take no more requests for an adapter; those that have it go on."""
    _note_adapter(service, name, adapter)
    await service.pool.unload_adapter(name, adapter)
    return _state(service, name)


@router.post("/{name:path}/reload")
async def reload(name: str, service: Served) -> dict[str, Any]:
    """Load the bundle that is in a model's folder now: beside the one that serves, which goes on if it fails."""
    note(model=service.name(name, adapters=False))
    await service.pool.swap(name)
    return _state(service, name)


@router.post("/{name:path}/unload")
async def unload(name: str, service: Served) -> dict[str, Any]:
    """Let a model go. Its requests finish, and the next one loads it again."""
    note(model=service.name(name, adapters=False))
    await service.pool.unload(name)
    return _state(service, name)
