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

__all__ = ["LETTERS", "parse_choice", "plain_text"]

LETTERS = string.ascii_uppercase

# What may stand behind a letter for it to be one: the end, punctuation, or a reason. A word behind
# it makes it an article ("A man ..."), or the camera wearer whom EgoSchema calls C.
_END = (
    r"(?=\s*$|\s*\n|[)\]}.:;!?,]+(?:\s|$)|\s+[-\u2013\u2014]\s"
    r"|,?\s+(?:because|since)\b|\s*[/&])"
)
_BRACKETED = r"[(\[{]\s*([a-z])\s*[)\]}]"
_NAMED = re.compile(
    r"\b(?:answer|option|choice)\b\s*(?:(?:is|are|would be|should be|must be)\b|[:=\-])?[\s:]*"
    rf"(?:(?:option|choice)\s+)?(?:{_BRACKETED}|[(\[{{]?\s*\b([a-z]){_END})",
    re.IGNORECASE,
)
_SUBJECT = re.compile(
    rf"\b(?:(?:option|choice)\s+(?:{_BRACKETED}|([a-z]))\s+(?:is|because|since|seems|matches|fits)\b"
    rf"|(?:{_BRACKETED}|\b([a-z]))\s+is\s+(?:correct\b|(?:the\s+)?(?:correct|right|best)\s+"
    r"(?:answer|option|choice)\b))",
    re.IGNORECASE,
)
_FIRST = re.compile(
    rf"\s*(?:{_BRACKETED}|[(\[{{]?([a-z])[)\]}}]?{_END})",
    re.IGNORECASE,
)
_LAST = re.compile(
    r"(?:\n\s*|\b(?:so|therefore|thus|hence|choose|chose|pick|select|it is|it's),?\s+)"
    r"[(\[{]?([A-Z])[)\]}]?[.!]?\s*$"
)
_ANY_BRACKETED = re.compile(_BRACKETED, re.IGNORECASE)
_ANOTHER = re.compile(
    r"[)\]}]?\s*(?:,|/|&|\band\b|\bor\b)\s*(?:(?:and|or)\s+)?[(\[{]?[A-Za-z]"
    r"(?=[)\]}.,:;!?]|\s*$|\s+(?:and|or)\b)"
)
_MARKUP = re.compile(r"</?\w+>|\\boxed|\\text|[*`#\"\u201c\u201d]|(?<!\w)'|'(?!\w)")


def parse_choice(text: str, options: Sequence[str]) -> str | None:
    """The letter of the option that an answer names.

    In this order: a letter that is called the answer ("Answer: B", "the correct option is (C)"; the
    last such statement counts); a letter that begins the answer, alone or followed by punctuation
    ("B", "B.", "(B) a red car"); a letter that ends it ("so B", or on a line of its own); the only
    letter in brackets; the text of an option, which is the whole answer or, if that of no other
    is, part of it. A small letter counts where a large one does, except at the end.

    A letter must stand alone: neither the "A" of "A man walks" nor the "B" of "Best" is one. What
    names a letter that the question does not have is not read further.

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
    found = [*_NAMED.finditer(cleaned), *_SUBJECT.finditer(cleaned)]
    first, last = _FIRST.match(cleaned), _LAST.search(cleaned)
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
