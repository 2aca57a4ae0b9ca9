"""Files of texts, one a line: a newline inside a text is written <n>."""

from collections.abc import Iterable

from etils import epath

_NEWLINE = "<n>"


def to_lines(texts: Iterable[str]) -> bytes:
    """Contents of such a file."""
    return "".join(text.replace("\n", _NEWLINE) + "\n" for text in texts).encode()


def cut_warning(count: int, lines: int, max_length: int, what: str = "source") -> str | None:
    """What to say of lines that were too long for a model, or None if there were none."""
    if not count:
        return None
    return (
        f"{count} of {lines} {what} lines were cut: more than {max_length} subwords, the end of "
        f"sentence included (--max_{what}_length of bin/train)."
    )


def read_lines(path: epath.PathLike) -> list[str]:
    """Texts of such a file, without a character dropped."""
    text = epath.Path(path).read_bytes().decode()
    return [line.replace(_NEWLINE, "\n") for line in text.removesuffix("\n").split("\n")]
