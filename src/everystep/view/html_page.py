"""One self-contained HTML page: its style, script and data are inside, and it can load nothing else.

The data is inert JSON that the script parses. A policy in the page names the one script and the one style by
digest, so no text in the data can run as a script.
"""

from __future__ import annotations

import base64
import hashlib
import html
from typing import Any

import msgspec

_FORBIDDEN_IN_JSON = {
    b"<": b"\\u003c",
    b">": b"\\u003e",
    b"&": b"\\u0026",
    "\u2028".encode(): b"\\u2028",
    "\u2029".encode(): b"\\u2029",
}


def embedded_json(document: object) -> str:
    """A document (dataclasses and plain data) as JSON that is safe inside any element.

    NaN and infinities become null.
    """
    try:
        data = msgspec.json.encode(document)
    except UnicodeEncodeError:  # a path that is not UTF-8, in some error's message
        data = msgspec.json.encode(_valid(msgspec.to_builtins(document)))
    for character, escape in _FORBIDDEN_IN_JSON.items():
        data = data.replace(character, escape)  # JSON has none of them outside strings
    return data.decode()


def content_policy(style: str, script: str, *, may_fetch: bool) -> str:
    """The Content-Security-Policy of a page with only this style and script."""
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_digest(style)}'",
            f"script-src '{_digest(script)}'",
            "img-src data:",
            "connect-src 'self'" if may_fetch else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def assemble(
    *, title: str, style: str, body: str, script: str, document: object, may_fetch: bool = False
) -> str:
    """A page. `document` is the text of the element ``data``; `may_fetch`: from its server."""
    if "</script" in script or "</style" in style:
        raise ValueError("a script or a style must not hold the end of its own element")
    policy = content_policy(style, script, may_fetch=may_fetch)
    shown = title.encode("utf-8", "replace").decode()
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(shown)}</title>\n"
        f"<style>{style}</style>\n"
        f"</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{embedded_json(document)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_valid(key): _valid(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(item) for item in value]
    return value


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
