"""Tokenizers by kind, to and from a folder.

    <folder>/tokenizer.json   {"kind": …, "files": [names of the files beside it], "settings": {…}}

A folder without tokenizer.json has a vocabulary of our own, `vocab.model`.
"""

import json
import os

from etils import epath

from tf_teaforn.data.byte_pair_tokenizer import BytePairTokenizer
from tf_teaforn.data.marian_tokenizer import MarianTokenizer
from tf_teaforn.data.pegasus_tokenizer import PegasusTokenizer
from tf_teaforn.data.t5_tokenizer import T5Tokenizer
from tf_teaforn.data.tokenizer import VOCABULARY_FILE, SubwordTokenizer, Tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.paths import write_whole

DESCRIPTION = "tokenizer.json"

_KINDS = {
    cls.kind: cls
    for cls in (Tokenizer, PegasusTokenizer, BytePairTokenizer, T5Tokenizer, MarianTokenizer)
}


def save_tokenizer(tokenizer: SubwordTokenizer, folder: str | os.PathLike) -> None:
    """Writes the tokenizer's files and, last, `tokenizer.json` into an existing folder.

    Each appears as a whole, for those who read meanwhile.
    """
    description = {
        "kind": tokenizer.kind,
        "files": list(tokenizer.files),
        "settings": dict(tokenizer.settings),
    }
    text = json.dumps(description, indent=2) + "\n"
    for name, content in {**tokenizer.files, DESCRIPTION: text.encode()}.items():
        write_whole(epath.Path(folder) / name, content)


def has_tokenizer(folder: str | os.PathLike) -> bool:
    """Whether `load_tokenizer` finds something there."""
    folder = epath.Path(folder)
    return (folder / DESCRIPTION).exists() or (folder / VOCABULARY_FILE).exists()


def load_tokenizer(folder: str | os.PathLike) -> SubwordTokenizer:
    """Reads what `save_tokenizer` wrote.

    Raises:
      UserError: a file is missing or damaged, or the kind is unknown.
    """
    folder = epath.Path(folder)
    path = folder / DESCRIPTION
    if not path.exists():
        return Tokenizer.load(folder / VOCABULARY_FILE)
    try:
        description = json.loads(path.read_bytes())
        kind, names, settings = (description[key] for key in ("kind", "files", "settings"))
        if any(epath.Path(name).name != name for name in names):
            raise ValueError("a file's name must have no folder")
        files = {name: (folder / name).read_bytes() for name in names}
    except OSError as error:
        raise UserError(f"{folder}: cannot read the tokenizer: {error}.") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} does not describe a tokenizer: {error!r}.") from None
    if kind not in tuple(_KINDS):
        raise UserError(f"{path}: unknown kind {kind!r}; known are {', '.join(_KINDS)}.")
    try:
        return _KINDS[kind](files, **settings)
    except (TypeError, KeyError) as error:
        raise UserError(f"{path} does not fit its kind {kind}: {error}.") from None
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
