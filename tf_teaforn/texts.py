"""Files of texts, one a line: a newline inside a text is written <n>."""

from collections.abc import Iterable

from etils import epath

_NEWLINE = "<n>"


def to_lines(texts: Iterable[str]) -> bytes:
    """Contents of such a file."""
    return "".join(text.replace("\n", _NEWLINE) + "\n" for text in texts).encode()


def read_lines(path: epath.PathLike) -> list[str]:
    """Texts of such a file, without a character dropped."""
    text = epath.Path(path).read_bytes().decode()
    return [line.replace(_NEWLINE, "\n") for line in text.removesuffix("\n").split("\n")]
