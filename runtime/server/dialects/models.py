"""Models: what is served."""

from typing import Any

from fastapi import APIRouter

from llmc.runtime.server.http.call import Called
from llmc.runtime.server.models.service import Served, Service

router = APIRouter(tags=["Models"])


def card(service: Service, name: str) -> dict[str, Any]:
    manifest = service.pool.manifest(name)
    about = {
        "fingerprint": manifest.source.fingerprint,
        "target": manifest.target.name,
        "precision": manifest.recipe.precision,
        "generates": manifest.geometry.generates,
        "chats": manifest.geometry.generates and service.pool.has_template(name),
        "sees": manifest.geometry.vision is not None,
        "hears": manifest.geometry.audio is not None,
    }
    base = service.pool.base(name)
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "llmc",
        "root": base,
        "parent": None if base == name else base,
        "max_model_len": service.config.max_context or manifest.limits.max_context,
        "x_llmc": about,
    }


@router.get("/v1/models")
async def models(call: Called, service: Served) -> dict[str, Any]:
    """The models that are served to this client; the first of all answers requests that name none."""
    return {"object": "list", "data": [card(service, name) for name in service.names(call.client)]}


@router.get("/v1/models/{name}")
async def model(name: str, call: Called, service: Served) -> dict[str, Any]:
    """One model."""
    return card(service, service.find(call.client, name))
