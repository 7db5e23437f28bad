"""The chat page: static files that the server reads once and a browser keeps, with headers that shut them in."""

from collections.abc import Awaitable, Callable
from hashlib import sha256
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from llmc.runtime.server.http.call import call_of

MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

# The page loads nothing but these files and images that it holds itself, is shown in no frame, and cannot turn text
# into markup (trusted types).
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, but asked for by its ETag each time
}


def read_page() -> dict[str, bytes]:
    """The page's files by the path that each is served at: ``/`` for the page itself, ``/page/NAME`` for the others."""
    found = {item.name: item for item in files(__name__).iterdir() if item.name.rpartition(".")[2] in MEDIA_TYPES}
    return {"/" if name == "index.html" else f"/page/{name}": item.read_bytes() for name, item in found.items()}


def mount(app: FastAPI) -> None:
    """Serve the page at ``/``. Its files hold no secret, so that they need no key: the page itself asks for one."""
    for path, content in sorted(read_page().items()):
        app.add_route(path, serve(path, content), include_in_schema=False)


def serve(path: str, content: bytes) -> Callable[[Request], Awaitable[Response]]:
    """The route of one file; a browser that has it already gets a 304."""
    suffix = "html" if path == "/" else path.rpartition(".")[2]
    etag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": etag}

    async def route(request: Request) -> Response:
        call_of(request.scope).note(route=path)  # the framework names those of its own routes alone
        known = request.headers.get("If-None-Match", "").split(",")
        if etag in (tag.strip().removeprefix("W/") for tag in known):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=MEDIA_TYPES[suffix])

    return route
