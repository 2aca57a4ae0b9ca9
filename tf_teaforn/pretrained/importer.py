"""What an importer is, for `--init_from`."""

import contextlib
import re

from tf_teaforn.errors import UserError
from tf_teaforn.pretrained.tensors import model_type, read_settings, settings_if_any, weight_files

# What our tokenizers drop, wherever it is.
_WITHOUT_TEXT = re.compile(r"<extra_id_\d+>|<mask>")
# Of a model's own search.
_GENERATION = (
    "num_beams",
    "length_penalty",
    "min_length",
    "max_length",
    "no_repeat_ngram_size",
    "forced_bos_token_id",
    "prefix",
)


class Pretrained:
    """A pretrained model in a folder: opened cheaply, read by `build`.

    A family subclasses it and is listed in `importers.py`. What it builds is a `Seq2Seq` like any
    other, of registered Keras layers, named "embedding", "encoder" and "decoder": a model
    directory keeps its `architecture.json` and its weights, and needs the folder no more.

    Our ids are 0 for padding and 1 for the end of sentence, and search never emits 0. A family
    whose ids differ is permuted at import: `build` moves the rows of the embedding, and of a bias
    of the logits, to where the family's `SubwordTokenizer` moves its ids. What decoding starts
    from is `Seq2Seq.start_id`, after the permutation; 0 starts from the zero vector.

    Attributes:
        model: the architecture's name, for config.json and messages.
        tokenizer: `SubwordTokenizer`.
        notes: lines that the user should read.
    """

    model: str
    notes: tuple[str, ...] = ()

    @classmethod
    def recognizes(cls, folder) -> bool:
        """Whether the folder, an `epath.Path`, holds a model of this family."""
        raise NotImplementedError

    def __init__(self, folder):
        """Reads settings and vocabulary, and checks them.

        Raises:
            UserError: something is missing, damaged, or beyond what our layers compute.
        """
        raise NotImplementedError

    def build(self, dtype=None, dropout=None):
        """The `Seq2Seq` with its weights.

        Args:
            dtype: Keras policy such as "mixed_bfloat16".
            dropout: see `models.architecture.with_dropout`.

        Raises:
            UserError: names the tensors that are missing, unknown or of another shape.
        """
        raise NotImplementedError


class HuggingFaceFolder(Pretrained):
    """A folder that `save_pretrained` of transformers wrote.

    Attributes:
        types: what `model_type` in its config.json may be.
    """

    types: tuple[str, ...]

    @classmethod
    def recognizes(cls, folder):
        return model_type(folder) in cls.types

    def __init__(self, folder):
        self._folder = folder
        self._origin = folder / "config.json"
        self._settings = read_settings(folder)
        # Before data are read and a model directory is begun.
        weight_files(folder)
        # Older folders have them among the model's.
        generation = settings_if_any(folder, "generation_config.json") or self._settings
        found = [f"{n}={generation[n]}" for n in _GENERATION if generation.get(n) is not None]
        if found:
            self.notes = (
                f"Its own settings of generation are not taken over: {', '.join(found)}. See the "
                "search flags of bin/evaluate, bin/decode and bin/export.",
            )


@contextlib.contextmanager
def naming(place):
    """Inside, a `UserError` begins with the file or folder that it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from None


def refuse_added_tokens(folder, end):
    """Refuses a tokenizer with tokens that were added behind its vocabulary.

    Args:
        folder: an `epath.Path`.
        end: number of ids of the vocabulary.

    Raises:
        UserError: names the tokens, which ours would take apart like any other text.
    """
    added = settings_if_any(folder, "added_tokens.json")
    decoder = settings_if_any(folder, "tokenizer_config.json").get("added_tokens_decoder", {})
    added |= {token["content"]: int(number) for number, token in decoder.items()}
    tokens = settings_if_any(folder, "tokenizer.json").get("added_tokens", [])
    added |= {token["content"]: token["id"] for token in tokens}
    wrong = [t for t, number in added.items() if number >= end and not _WITHOUT_TEXT.fullmatch(t)]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise UserError(
            f"{folder}: the tokens {', '.join(wrong[:5])}{more} were added to its vocabulary; that "
            "is not supported. Start from the model that it was tuned from."
        )


def read_files(folder, *names):
    """{name: content} of files of a vocabulary.

    Raises:
        UserError: one is missing.
    """
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        # Of most families, transformers 5 saves tokenizer.json alone.
        raise UserError(
            f"{folder} has no {', '.join(missing)}, the vocabulary: copy what is missing from the "
            "model that this one was tuned from."
        )
    return {name: (folder / name).read_bytes() for name in names}
