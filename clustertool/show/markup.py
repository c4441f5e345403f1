"""HTML consists of tags: a value that is not Html is text and is escaped, so the output of a program is never markup."""

from __future__ import annotations

from html import escape

from clustertool.model.hints import filled
from clustertool.show.program_name import commanded

Child = object  # Html, text, a number, None, or a list of these


class Html(str):
    """Markup that was made here."""

    __slots__ = ()


def tag(name: str, *children: Child, **attributes: object) -> Html:
    """Create an element of HTML: tag("td", 3, class_="num") is <td class="num">3</td>.

    Attributes that are None are left out, `_` reads `-`.
    """
    given = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    inside = "".join(f' {key}="{escape(str(value))}"' for key, value in given)
    return Html(f"<{name}{inside}>{join(children)}</{name}>")


def join(children: Child) -> Html:
    if isinstance(children, Html):
        return children
    if children is None:
        return Html("")
    if isinstance(children, (list, tuple)):
        return Html("".join(map(join, children)))
    return Html(escape(filled(str(children), commanded())))
