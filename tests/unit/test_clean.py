"""No character that a terminal obeys gets through, and no secret that is known."""

from __future__ import annotations

import unicodedata

import pytest

from clustertool.model.masking import mask
from clustertool.watch.sanitize import harmless


def test_ordinary_text_is_untouched() -> None:
    for text in ("", "plain", "tab\tbed", "é 漢字 😀 ألف", "\u00a0\u3000", "[bold]no markup[/bold]"):
        assert harmless(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\nc", "a\\rb\\nc"),
        ("\x9b31m\x7f\x00", "\\x9b31m\\x7f\\x00"),
        ("user\u202etxt.exe", "user\\u202etxt.exe"),
    ],
)
def test_control_sequences_are_spelled_out(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_over_all_of_unicode_no_control_and_no_bidi_override_is_left() -> None:
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    left = harmless(everything)
    assert {c for c in left if unicodedata.category(c) in ("Cc", "Zl", "Zp")} == {"\t"}
    embedding = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    assert not {c for c in left if unicodedata.bidirectional(c) in embedding}
    assert harmless(left) == left


def test_secrets_are_masked_the_longest_first() -> None:
    hide = mask(["abc", "abcdef", ""])
    assert hide("x abcdef y abc z") == "x *** y *** z"


def test_secrets_are_no_patterns() -> None:
    assert mask(["a.c", "(["])("abc a.c ([") == "abc *** ***"


def test_nothing_to_hide_changes_nothing() -> None:
    assert mask([])("text") == mask([""])("text") == "text"


def test_a_secret_of_one_character_is_masked() -> None:
    assert mask(["7"])("7 of 17") == "*** of 1***"


def test_the_lines_of_a_long_secret_are_masked_one_by_one() -> None:
    hide = mask(["-----BEGIN KEY-----\nMIIabc\r\n}\n"])
    assert [hide(line) for line in ("-----BEGIN KEY-----", "MIIabc", "if x {}")] == ["***", "***", "if x {}"]


def test_a_secret_with_a_control_character_is_masked_before_it_is_spelled_out() -> None:
    assert harmless(mask(["se\x1bcret"])("my se\x1bcret\x1b")) == "my ***\\x1b"
