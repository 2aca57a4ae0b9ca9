"""The families that `--init_from` knows."""

import contextlib

from etils import epath

from tf_teaforn.errors import UserError
from tf_teaforn.models.presets import PREFIX
from tf_teaforn.pretrained.bart import Bart
from tf_teaforn.pretrained.google_pegasus import GooglePegasus
from tf_teaforn.pretrained.hub import HubPreset
from tf_teaforn.pretrained.importer import Pretrained
from tf_teaforn.pretrained.marian import Marian
from tf_teaforn.pretrained.own import OwnRun
from tf_teaforn.pretrained.pegasus import Pegasus
from tf_teaforn.pretrained.t5 import T5
from tf_teaforn.pretrained.tensors import model_type

# The first that recognizes a folder opens it.
_IMPORTERS = {
    "a --model_dir of bin/train": OwnRun,
    "a Hugging Face folder of PEGASUS": Pegasus,
    "of Marian": Marian,
    "of BART": Bart,
    "of T5": T5,
    "a checkpoint of google-research/pegasus": GooglePegasus,
}


def open_folder(folder) -> Pretrained:
    """Opens what `--init_from` names.

    Args:
        folder: path; for one of our model directories also <path>@<checkpoint>; or a preset of
            KerasHub, keras_nlp:<preset>.

    Raises:
        UserError: there is no such folder, or no importer for what it holds.
    """
    if str(folder).startswith(PREFIX):
        return _open_preset(str(folder))
    path = epath.Path(folder)
    if not path.is_dir():
        base, at, _ = str(folder).rpartition("@")
        path = epath.Path(base) if at else path
        if not path.is_dir():
            raise UserError(f"--init_from={folder}: there is no such folder.")
    with usable(folder):
        for importer in _IMPORTERS.values():
            if importer.recognizes(path):
                return importer(epath.Path(folder))
    kind = model_type(path)
    raise UserError(
        f"--init_from={folder} holds {f'a {kind}, ' if kind else ''}none of the models that can be "
        f"read: {'; '.join(_IMPORTERS)}."
    )


@contextlib.contextmanager
def usable(folder):
    """Inside, what the files of a foreign folder make Python stumble over is a `UserError`."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise UserError(f"--init_from={folder} cannot be used: {error!r}.") from error


def _open_preset(name):
    path = epath.Path(name.removeprefix(PREFIX))
    if path.is_dir() and model_type(path):
        # KerasHub's converter wants settings that newer files of Hugging Face do not have.
        pretrained = open_folder(path)
        pretrained.model = name
        return pretrained
    return HubPreset(name)
