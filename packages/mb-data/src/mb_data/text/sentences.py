"""Documents cut into sentences by sentencex: rules for 300 languages, nothing to download."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate, pairwise

from mb_data.words import missing_package

# Megatron names languages as NLTK's models were named.
CODES = {
    "czech": "cs",
    "danish": "da",
    "dutch": "nl",
    "english": "en",
    "estonian": "et",
    "finnish": "fi",
    "french": "fr",
    "german": "de",
    "greek": "el",
    "italian": "it",
    "malayalam": "ml",
    "norwegian": "no",
    "polish": "pl",
    "portuguese": "pt",
    "russian": "ru",
    "slovene": "sl",
    "spanish": "es",
    "swedish": "sv",
    "turkish": "tr",
}

# Two letters must be a language: sentencex falls back to general rules without a word.
ISO_639_1 = (
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu "
    "cv cy da de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi "
    "ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks "
    "ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl "
    "nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk "
    "sl sm sn so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz "
    "ve vi vo wa wo xh yi yo za zh zu "
)


# sentencex takes what stands between an initial and its full stop for one byte ("plan B ."), and
# panics at a space of more. All such full stops are found fast, and then those behind a letter.
_STOP = re.compile(r"\.(?<=[^\S\x00-\x7f]\.)")
_SPACE = re.compile(r"([^\W\d_]\s*)[^\S\x00-\x7f](?=\.)")


class SentenceSplitter:
    """Cuts a text into sentences.

    Args:
        language: Megatron's name of it ("english") or an ISO 639 code ("en").
        keep_newlines: keep the white space after each sentence; without, sentences are stripped.

    Raises:
        ModuleNotFoundError: sentencex is not installed.
        ValueError: the language is neither a known name nor a code.
    """

    def __init__(self, language: str = "english", *, keep_newlines: bool = False) -> None:
        code = CODES.get(language.lower(), language)
        three = len(code) == 3 and code.isascii() and code.isalpha()
        if code not in ISO_639_1.split() and not three:
            raise ValueError(
                f"language {language!r}: give an ISO 639 code, as en, or one of {', '.join(CODES)}"
            )
        self.code = code
        self.keep_newlines = keep_newlines

    def __call__(self, text: str) -> list[str]:
        """The sentences of a text.

        Raises:
            ValueError: sentencex panics at it.
        """
        sentences = self._cut(text)
        if not self.keep_newlines:
            sentences = [sentence.strip() for sentence in sentences]
        return [sentence for sentence in sentences if sentence]

    def _cut(self, text: str) -> list[str]:
        """The text in pieces, nothing left out."""
        segment = self._segment()
        shown = _SPACE.sub(r"\1 ", text) if _STOP.search(text) else text
        try:
            pieces = segment(self.code, shown)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's, which is no Exception
                raise
            raise ValueError(f"sentencex cannot split this text: {error}") from None
        if shown == text:
            return pieces
        ends = accumulate(map(len, pieces), initial=0)  # the same: it has as many letters
        return [text[start:end] for start, end in pairwise(ends)]

    @staticmethod
    def _segment() -> Callable[[str, str], list[str]]:
        try:
            from sentencex import segment  # ty: ignore[import-not-found]  # an extra, untyped
        except ModuleNotFoundError as error:
            wanted = "--split-sentences needs sentencex"
            raise missing_package("sentencex", wanted, "sentences") from error
        return segment
