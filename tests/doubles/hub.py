"""A Hugging Face hub on loopback, for the real client: repositories of a few kilobytes, served from memory.

Answers and headers are the hub's: https://huggingface.co/docs/hub/api and the client's ``hf_raise_for_status``.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Repository:
    """A repository: its files, and how it answers.

    Attributes:
        commits: files by path, by commit; "main" and other revisions are in ``revisions``.
        sent: content by path that is sent instead of the listed one.
        listing: entries added to the list of files, as the hub writes them.
        error: status and X-Error-Code of each answer that gives content; of the list, too, if ``hidden``.
        token: the token that it asks for.
        headers: headers of files, in place of the true ones.
        cuts: connections that end after half of the content, by path; each counts down.
    """

    commits: dict[str, dict[str, bytes]]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    tags: list[str] = field(default_factory=lambda: ["license:apache-2.0"])
    sent: dict[str, bytes] = field(default_factory=dict)
    listing: list[dict[str, Any]] = field(default_factory=list)
    error: tuple[int, str] | None = None
    hidden: bool = False
    token: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)


def repository(files: dict[str, bytes], **options: Any) -> Repository:
    return Repository({COMMIT: files}, **options)


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".gguf", ".bin"))


def digest_of(path: str, content: bytes) -> str:
    """What the hub names the content by: git's hash, or SHA-256 for large files."""
    if is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()


def list_files(files: dict[str, bytes]) -> list[dict[str, Any]]:
    listed = []
    for path, content in files.items():
        entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": digest_of("", content)}
        if is_large(path):
            entry["lfs"] = {"size": len(content), "sha256": digest_of(path, content), "pointerSize": 130}
        listed.append(entry)
    return listed


@dataclass
class Request:
    """A request that a server got."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Hub:
    """The hub: ``repositories`` by name, ``renamed`` names, and the requests that it got.

    ``storage`` is another hub, at another host, that gives the content of large files.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    storage: "Hub | None" = None
    requests: list[Request] = field(default_factory=list)
    address: str = ""

    def paths(self, method: str = "") -> list[str]:
        return [request.path for request in self.requests if request.method.startswith(method)]

    def downloads(self) -> list[str]:
        """Paths of the files whose content was asked for."""
        return [path.partition("/resolve/")[2].partition("/")[2] for path in self.paths("GET") if "/resolve/" in path]


class _Answer(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, *_: object) -> None:
        pass

    def answer(self) -> None:
        self.hub.requests.append(Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        path = unquote(urlsplit(self.path).path).removeprefix("/")
        listed = path.startswith("api/models/")
        name = "/".join(path.removeprefix("api/models/").split("/")[:2])
        if new := self.hub.renamed.get(name):
            return self.send(307, headers={"Location": "/" + path.replace(name, new, 1)})
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.token and self.headers["Authorization"] != f"Bearer {repository.token}"):
            return self.send(401, headers={"X-Error-Code": "RepoNotFound"})
        if repository.error and (repository.hidden or not listed):
            return self.send(repository.error[0], headers={"X-Error-Code": repository.error[1]})
        rest = path.removeprefix("api/models/").removeprefix(f"{name}/")
        revision = (rest.removeprefix("revision/") if rest != name else "main") if listed else rest.split("/")[1]
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.commits:
            return self.send(404, headers={"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit]
        if listed:
            siblings = [*list_files(files), *repository.listing]
            model = {"id": name, "sha": commit, "tags": repository.tags, "siblings": siblings}
            return self.send(200, json.dumps(model).encode())
        return self.send_file(repository, files, commit, "/".join(rest.split("/")[2:]))

    def send_file(self, repository: Repository, files: dict[str, bytes], commit: str, name: str) -> None:
        if name not in files:
            return self.send(404, headers={"X-Error-Code": "EntryNotFound"})
        content = repository.sent.get(name, files[name])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest_of(name, files[name])}"', "Accept-Ranges": "bytes"}
        headers |= repository.headers
        if self.hub.storage is not None and is_large(name):
            headers |= {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(content))}
            return self.send(302, headers={**headers, "Location": f"{self.hub.storage.address}{self.path}"})
        begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        cut = self.command == "GET" and repository.cuts.get(name, 0) > 0
        if cut:
            repository.cuts[name] -= 1
        return self.send(206 if begin else 200, content[begin:], headers, cut=cut)

    def send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = self.close_connection or cut


@contextmanager
def serve(hub: Hub, host: str = "127.0.0.1") -> Iterator[Hub]:
    """The hub while the block runs, at ``hub.address``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (_Answer,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
