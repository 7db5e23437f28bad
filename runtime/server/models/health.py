"""Questions to the server itself: alive, ready, and how much it does."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from llmc.runtime.server.http.call import Called
from llmc.runtime.server.models.service import Served

LOADING = "when a machine loads a bundle for the first time, it is checked, once"
router = APIRouter(tags=["Operation"])


@router.get("/health")
async def health() -> dict[str, Any]:
    """The process answers; it needs no key, and says nothing of models."""
    return {"status": "ok"}


@router.get("/ready", response_model=None, responses={503: {"description": "A model is loading or has failed."}})
async def ready(response: Response, call: Called, service: Served) -> dict[str, Any]:
    """200 once the models of the start were loaded and passed their self-tests; 503 before, and at the end."""
    ready = service.is_ready
    response.status_code = 200 if ready else 503
    states = service.pool.states()
    models = {name: asdict(state) for name, state in states.items() if call.client.allows(name)}
    warm = (name for name in service.warm if name in models)
    loading = [name for name in warm if states[name].phase == "loading" and not states[name].loads]
    said = {"message": f"{', '.join(loading)} is loading; {LOADING}"} if loading and not ready else {}
    return {"status": "ready" if ready else "not ready", **said, "models": models}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, call: Called, service: Served) -> Response:
    """Counters and histograms of the server, and of every model of the client's key that is loaded, for Prometheus."""
    text = await run_in_threadpool(request.app.state.metrics.exposition, service.pool, call.client)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
