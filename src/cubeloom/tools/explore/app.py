"""The application: static files and answers in JSON, for whoever has the address."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cubeloom.base.errors import UserError
from cubeloom.base.pages import CURVES, SCRIPTS, static
from cubeloom.tools.explore import layouts, plans, schedules
from cubeloom.tools.explore.query import Query
from cubeloom.tools.explore.runs import Runs

HOSTS = ("127.0.0.1", "localhost", "[::1]")
_SHELL = ("index.html", "explore.js", "controls.js", "layouts.js")
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
_HEADERS = {
    # Nothing from elsewhere is loaded, and no other page shows this one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def application(token: str, folder: Path) -> ASGIApp:
    """`folder`: where runs are looked for."""
    runs = Runs(folder)
    answers: dict[str, Callable[[Query], Any]] = {
        "choices": lambda _: {
            "plan": plans.choices(),
            "schedules": schedules.choices(),
            "layouts": layouts.choices(),
        },
        "plan": plans.planned,
        "usual": plans.usual,
        "schedules": schedules.drawn,
        "layouts": layouts.laid_out,
        "runs": lambda _: runs.listed(),
        "run": runs.drawn,
    }
    routes = [
        *(Route(f"/{token}/api/{name}", _answered(answer)) for name, answer in answers.items()),
        *(_file(f"/{token}/{name}", name) for name in (*SCRIPTS, *CURVES, *_SHELL, "style.css")),
        _file(f"/{token}/", "index.html"),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token)])


class Guard:
    """Refuses requests without the token, and those that name another host: another site's page cannot send either."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(scope):
            refusal = PlainTextResponse("403: open the address that cubeloom explore printed\n", 403, _HEADERS)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = scope["path"].split("/")[1]
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        named = [host if host.endswith("]") else host.rpartition(":")[0] or host for host in hosts]
        return hmac.compare_digest(given.encode(), self._token.encode()) and len(named) == 1 and named[0] in HOSTS


def _answered(answer: Callable[[Query], Any]) -> Callable[[Request], Response]:
    """Starlette runs it in a thread, so that a long search does not keep others waiting."""

    def respond(request: Request) -> Response:
        try:
            content, status = answer(Query(request.query_params)), 200
        except UserError as error:
            content, status = {"error": str(error)}, 400
        return Response(json.dumps(content, allow_nan=False), status, _HEADERS, "application/json")

    return respond


def _file(path: str, name: str) -> Route:
    def respond(_: Request) -> Response:
        return Response(static(name), 200, _HEADERS, _TYPES[Path(name).suffix])

    return Route(path, respond)
