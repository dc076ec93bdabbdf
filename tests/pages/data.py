"""What a self-contained page has: its elements, and the JSON that its script draws."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

# Elements that HTML closes by itself.
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that elements are closed in order, and that the browser is told to load nothing."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert not [a for _, attributes in self.elements for a in attributes if a in ("src", "href", "action", "style")]
        (policy,) = [a["content"] for _, a in self.elements if a.get("http-equiv") == "Content-Security-Policy"]
        assert policy is not None and policy.startswith("default-src 'none'; ") and "http" not in policy
        scripts = [a.get("type") for tag, a in self.elements if tag == "script"]
        assert scripts == ["application/json", None]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all_text(self, tag: str) -> str:
        return "\n".join(text for inside, text in self.texts if inside == tag)

    @property
    def data(self) -> Any:
        """JSON has no NaN and no infinity: such a page would not be drawn."""
        scripts = [text for inside, text in self.texts if inside == "script"]
        return json.loads(scripts[0], parse_constant=refuse)


def refuse(name: str) -> None:
    raise AssertionError(f"{name} in JSON")
