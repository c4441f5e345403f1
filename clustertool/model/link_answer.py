"""A link answer is the result of one connection. A node sends the value; another text is the system's error message."""

from __future__ import annotations

from clustertool.model.name_enum import Name


class LinkAnswer(Name):
    """The result of one connection to a node, with the text by which nodes send it."""

    OK = "ok"
    NO_AGENT = "no answer of the agent"
    REFUSED = "refused"
    NO_ROUTE = "no route"
    OTHER_NODE = "another node answered"
    OTHER_PROGRAM = "something else listens there"
    NO_ANSWER = "no answer"
    OTHER = "other"

    @classmethod
    def of(cls, text: str) -> LinkAnswer:
        """Return the answer with the text that a node sent, OTHER for any other text."""
        return next((answer for answer in cls if answer.value == text), cls.OTHER)
