"""Which of a question's options an answer names: by its letter, or by its text.

Nothing is guessed: an answer that names no option, several, or one that the question does not have
gives `None`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence

from dlm_decode.errors import InvalidInputError

__all__ = ["LETTERS", "VERSION", "parse_choice", "plain_text"]

LETTERS = string.ascii_uppercase
VERSION = 1
"""Raise it where the same answer may be read otherwise, so that no run mixes both readings."""

# What may stand behind a letter for it to be one: the end, punctuation, or a reason. A word behind
# it makes it an article ("A man ..."), or the camera wearer whom EgoSchema calls C.
_END = (
    r"(?=\s*$|\s*\n|[)\]}.:;!?,]+(?:\s|$)|\s+[-\u2013\u2014]\s"
    r"|,?\s+(?:because|since)\b|\s*[/&])"
)
_BRACKETED = r"[(\[{]\s*([a-z])\s*[)\]}]"
_NOT_DENIED = (
    r"(?![)\]}]*\s+(?:(?:is|are|was|does)"
    r"(?:n't|\s+(?:not|wrong|incorrect|false|unlikely)\b)|cannot|can't))"
)
_BEFORE = r"(?:(?:option|choice)\s+)?"
_IS = r"(?:(?:is|are|(?:would|should|must|might|could|may)\s+be)\b|[:=\-])[\s:]*"
_NAMED = re.compile(
    rf"\b(?:answer\b\s*(?:{_IS})?|(?:option|choice)\b\s*{_IS}){_BEFORE}"
    rf"(?:{_BRACKETED}|[(\[{{]?\s*\b([a-z]){_END})",
    re.IGNORECASE,
)
_CORRECT = re.compile(
    rf"(?:{_BRACKETED}|\b([a-z]))\s+(?:is|seems|looks)\s+(?:correct\b|right[.!]"
    r"|(?:the\s+)?(?:correct|right|best)\s+(?:answer|option|choice)\b)",
    re.IGNORECASE,
)
_FIRST = re.compile(
    rf"\s*{_BEFORE}(?:{_BRACKETED}{_NOT_DENIED}|[(\[{{]?([a-z]){_NOT_DENIED}{_END})", re.IGNORECASE
)
_MARKED = re.compile(r"(?:^|\s)[(\[{]?([A-Z])[)\]}.:](?=\s)")
_LAST = re.compile(
    r"(?:\n\s*|(?<!not )(?<!n't )"
    r"\b(?:so|therefore|thus|hence|choose|chose|pick|select|it is|it's),?\s+)"
    rf"{_BEFORE}[(\[{{]?([A-Z])[)\]}}]?[.!]?\s*$"
)
_ANY_BRACKETED = re.compile(_BRACKETED + _NOT_DENIED, re.IGNORECASE)
_ANOTHER = re.compile(
    r"[)\]}]?\s*(?:,|/|&|\band\b|\bor\b)\s*(?:(?:and|or)\s+)?[(\[{]?[A-Za-z]"
    r"(?=[)\]}.,:;!?]|\s*$|\s+(?:and|or)\b)"
)
_MARKUP = re.compile(r"</?\w+>|\\boxed|\\text|[*`#$\"\u201c\u201d]|(?<!\w)'|'(?!\w)")


def parse_choice(text: str, options: Sequence[str]) -> str | None:
    """The letter of the option that an answer names.

    In this order: a letter that is called the answer ("Answer: B", "(C) is correct"; the last such
    statement counts); a letter that begins the answer, alone or followed by punctuation ("B", "B.",
    "(B) a red car"); a letter that ends it ("so B", or on a line of its own); the only letter in
    brackets; the text of an option, which is the whole answer or, if that of no other is, part of
    it. A small letter counts where a large one does, except at the end.

    A letter must stand alone: neither the "A" of "A man walks" nor the "B" of "Best" is one. What
    names a letter that the question does not have is not read further, and what repeats the options
    from A on does not begin with an answer.

    Args:
        text: the answer, as the model gave it.
        options: the options' texts without their letters, at most 26; the first is A.

    Returns:
        A letter of `LETTERS[:len(options)]`, or `None`.

    Raises:
        InvalidInputError: no options, or more than there are letters.
    """
    if not 1 <= len(options) <= len(LETTERS):
        raise InvalidInputError(f"a question needs 1 to 26 options, got {len(options)}.")
    cleaned = _MARKUP.sub("", unicodedata.normalize("NFKC", text)).replace("{}", "").strip()
    allowed = LETTERS[: len(options)]
    found = [*_NAMED.finditer(cleaned), *_CORRECT.finditer(cleaned)]
    is_listing = _MARKED.findall(cleaned)[:3] == ["A", "B", "C"]
    first = None if is_listing else _FIRST.match(cleaned)
    last = _LAST.search(cleaned)
    for match in (max(found, key=lambda m: m.end(), default=None), first, last):
        if match is not None:
            letter = next(group for group in match.groups() if group).upper()
            is_alone = _ANOTHER.match(cleaned, match.end()) is None
            return letter if is_alone and letter in allowed else None
    bracketed = {match.group(1).upper() for match in _ANY_BRACKETED.finditer(cleaned)}
    if bracketed:
        letter = bracketed.pop()
        return letter if not bracketed and letter in allowed else None
    return _by_text(plain_text(cleaned), [plain_text(option) for option in options])


def plain_text(text: str) -> str:
    """`text` in small letters, with single spaces and without punctuation around words."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(filter(None, (word.strip(string.punctuation) for word in words)))


def _by_text(answer: str, options: Sequence[str]) -> str | None:
    if answer in options and answer:
        return LETTERS[options.index(answer)]
    mentioned, rest = [], f" {answer} "
    # Longest first: "red car" inside "dark red car" is no mention of its own.
    for option in sorted({*options} - {""}, key=len, reverse=True):
        if f" {option} " in rest:
            mentioned.append(option)
            rest = rest.replace(f" {option} ", " | ")
    return LETTERS[options.index(mentioned[0])] if len(mentioned) == 1 else None
