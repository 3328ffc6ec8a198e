"""Documents cut into sentences by sentencex: rules for 300 languages, nothing to download."""

from __future__ import annotations

from collections.abc import Callable

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
        if not (code.isascii() and code.isalpha() and len(code) in (2, 3)):
            raise ValueError(
                f"language {language!r}: give an ISO 639 code, as en, or one of {', '.join(CODES)}"
            )
        self.code = code
        self.keep_newlines = keep_newlines
        self._segment()

    def __call__(self, text: str) -> list[str]:
        sentences = self._segment()(self.code, text)
        if not self.keep_newlines:
            sentences = [sentence.strip() for sentence in sentences]
        return [sentence for sentence in sentences if sentence]

    @staticmethod
    def _segment() -> Callable[[str, str], list[str]]:
        try:
            from sentencex import segment  # ty: ignore[import-not-found]  # an extra, untyped
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "--split-sentences needs sentencex: pip install 'mb-data[sentences]'",
                name="sentencex",
            ) from error
        return segment
