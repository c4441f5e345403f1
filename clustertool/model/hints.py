"""Commands in messages name the program that the user typed: `clustertool` or `inv`.

A node, the model and an action do not know this program. They write PROGRAM: f"{PROGRAM} jobs lists the jobs". The laptop fills
it in where it shows a text (show/terminal.py, show/report_html.py). Such a text may contain a name, a path or a line of a log.
PROGRAM cannot occur in these: it begins with half of a surrogate pair. Text that was decoded from bytes has at most the halves
U+DC80 to U+DCFF (`surrogateescape`).
"""

from __future__ import annotations

PROGRAM = "\ud800{clustertool}"


def fill_program(text: str, program: str) -> str:
    """Replace the placeholder of the program in commands by its name."""
    return text.replace(PROGRAM, program)


def fill_program_in_value(value: object, program: str) -> object:
    """Replace the placeholder of the program in all texts of a value of JSON. Keys are not changed."""
    if isinstance(value, dict):
        return {key: fill_program_in_value(item, program) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [fill_program_in_value(item, program) for item in value]
    return fill_program(value, program) if isinstance(value, str) else value
