"""From one of our own model directories: another method, task or schedule, the same model."""

from tf_teaforn import checkpoint
from tf_teaforn import model_dir as model_dirs
from tf_teaforn.data.tokenizers import load_tokenizer
from tf_teaforn.errors import UserError
from tf_teaforn.pretrained.importer import Pretrained
from tf_teaforn.pretrained.tensors import settings_if_any


class OwnRun(Pretrained):
    """<model_dir> or <model_dir>@<checkpoint>; the best checkpoint by default."""

    @classmethod
    def recognizes(cls, folder):
        return "format_version" in settings_if_any(folder, model_dirs.CONFIG)

    def __init__(self, folder):
        self._spec = "best"
        if not folder.is_dir():
            name, _, self._spec = folder.name.rpartition("@")
            folder = folder.with_name(name)
        self._folder = folder
        self._config = model_dirs.read_config(folder)
        self.model = self._config.model.model
        self.tokenizer = load_tokenizer(folder)
        try:
            checkpoint.resolve(folder, self._spec)
        except checkpoint.DamagedCheckpointError:
            raise
        except UserError:
            raise UserError(
                f"--init_from: {folder} has no checkpoint {self._spec}; steps saved: "
                f"{checkpoint.listing(folder)}. Write {folder}@<step>, or {folder}@latest."
            ) from None

    def build(self, dtype=None, dropout=None):
        config = self._config if dropout is None else self._config.replace({"dropout": dropout})
        seq2seq, _ = model_dirs.load_seq2seq(
            self._folder, config, self.tokenizer, self._spec, dtype or config.model.precision
        )
        return seq2seq
