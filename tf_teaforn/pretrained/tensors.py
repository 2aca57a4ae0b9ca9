"""Tensors of a foreign file onto our weights, every name and shape checked before any is read."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping

import numpy as np
from etils import epath

from tf_teaforn.errors import UserError

# What numpy calls a safetensors type; it has none for the upper half of a float32.
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a weight comes from.

    Attributes:
        name: of the tensor.
        transpose: whether it is kept as [out, in], as PyTorch's linear layers are.
        rows: int [n], the order of the rows that our ids ask for, or None.
        squeeze: whether there is an axis of 1 in front.
        skip: number of rows in front that are not needed.
        shape: shape without the axes of heads, where our weight has them, or None.
    """

    name: str
    transpose: bool = False
    rows: np.ndarray | None = None
    squeeze: bool = False
    skip: int = 0
    shape: tuple[int, ...] | None = None

    def file_shape(self, shape):
        """Shape of the tensor for a weight of `shape`."""
        shape = tuple(self.shape or shape)
        shape = shape[::-1] if self.transpose else shape
        shape = (shape[0] + self.skip, *shape[1:])
        return (1, *shape) if self.squeeze else shape

    def convert(self, value):
        """The weight of the tensor's value, float32."""
        value = np.asarray(value, np.float32)
        if self.squeeze:
            value = value[0]
        value = value[self.skip :]
        if self.transpose:
            value = value.T
        return value if self.rows is None else value[self.rows]


@dataclasses.dataclass(frozen=True)
class TensorFile:
    """Named tensors, read one at a time.

    Attributes:
        origin: names the file in errors.
        shapes: {name: shape}.
        read: function of a name.
        aliases: {name: name of the tensor that it is another name of}.
    """

    origin: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def under(self, prefix):
        """The same with `prefix` in front of every name."""
        return TensorFile(
            self.origin,
            {prefix + name: shape for name, shape in self.shapes.items()},
            lambda name: self.read(name.removeprefix(prefix)),
            {prefix + name: prefix + kept for name, kept in self.aliases.items()},
        )

    def with_alias(self, alias, kept):
        """The same with `alias` as another name of the tensor `kept`."""
        return TensorFile(
            self.origin,
            {**self.shapes, alias: self.shapes[kept]},
            lambda name: self.read(kept if name == alias else name),
            {**self.aliases, alias: self.aliases.get(kept, kept)},
        )

    def equal(self, name, other):
        """Whether two names have the same values; the same tensor is not read for it."""
        if self.aliases.get(name, name) == self.aliases.get(other, other):
            return True
        return np.array_equal(self.read(name), self.read(other))


def with_tied(tensors, name, copies):
    """`TensorFile` that has a tied tensor by its name, if it has it by any.

    Args:
        tensors: `TensorFile`.
        name: of the tensor.
        copies: other names that it may have, also besides.

    Raises:
        UserError: a copy has other values.
    """
    copies = [copy for copy in copies if copy in tensors.shapes]
    if copies and name not in tensors.shapes:
        tensors = tensors.with_alias(name, copies[0])
    for copy in copies:
        if not tensors.equal(copy, name):
            raise UserError(f"{tensors.origin}: {copy} differs from {name}: they must be one.")
    return tensors


def assign(variables, sources, tensors, ignored=()):
    """Sets variables from the tensors of a file.

    Args:
        variables: {key: Keras variable}, all that the model has.
        sources: {key: `Source`}.
        tensors: `TensorFile`.
        ignored: names of tensors that may be there and are not needed.

    Raises:
        UserError: tensors are missing, unknown or of another shape; names the first five. Nothing
            is changed then.
    """
    wanted = {source.name for source in sources.values()}
    problems = [f"{name} is missing" for name in wanted if name not in tensors.shapes]
    unknown = set(tensors.shapes) - wanted - set(ignored)
    problems += [f"{name} is unknown" for name in unknown]
    for key, source in sources.items():
        expected = source.file_shape(variables[key].shape)
        found = tuple(tensors.shapes.get(source.name, expected))
        if found != expected:
            problems.append(f"{source.name} has shape {found} instead of {expected}")
    if problems:
        problems.sort()
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(
            f"{tensors.origin} does not fit its settings: {'; '.join(problems[:5])}{more}."
        )
    for key, source in sources.items():
        value = source.convert(tensors.read(source.name))
        variables[key].assign(value.reshape(variables[key].shape))


def check_sizes(tensors, vocabulary_size, *parts):
    """Refuses settings of a model far larger than its file before memory is taken for it.

    Args:
        tensors: `TensorFile`.
        vocabulary_size: V.
        *parts: settings of encoder and decoder.

    Raises:
        UserError: they are of another model.
    """
    most = 100 * sum(math.prod(shape) for shape in tensors.shapes.values())
    for part in parts:
        width, inner = part["hidden_dim"], part["intermediate_dim"]
        if (
            part["num_layers"] > len(tensors.shapes)
            or width * max(width, inner, vocabulary_size) > most
        ):
            raise UserError(
                f"{tensors.origin} does not fit its settings, which ask for {part['num_layers']} "
                f"layers of width {width} and {inner} inside, and {vocabulary_size} subwords."
            )


def read_settings(folder, name="config.json"):
    """The settings of a Hugging Face folder, a dict.

    Raises:
        UserError: not a JSON object.
    """
    path = epath.Path(folder) / name
    try:
        settings = json.loads(path.read_bytes())
        if not isinstance(settings, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    return settings


def settings_if_any(folder, name):
    """`read_settings`; {} where there is no such file."""
    return read_settings(folder, name) if (epath.Path(folder) / name).exists() else {}


def model_type(folder):
    """What a Hugging Face folder says of itself, or None."""
    return settings_if_any(folder, "config.json").get("model_type")


def weight_files(folder):
    """Paths of what `open_safetensors` reads.

    Raises:
        UserError: one is missing.
    """
    folder = epath.Path(folder)
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    # As in transformers, the one file comes first: an index may be left from earlier shards.
    if not (folder / names[0]).exists() and index.exists():
        names = sorted({*read_settings(folder, index.name).get("weight_map", {}).values()})
    paths = [folder / epath.Path(name).name for name in names]
    for path in paths:
        if not path.exists():
            raise UserError(
                f"{path} is missing. Weights are read from safetensors: save_pretrained of "
                "transformers writes them (docs/pretrained.md has the command)."
            )
    return paths


def open_safetensors(folder):
    """`TensorFile` of `model.safetensors`, or of the shards in `model.safetensors.index.json`.

    Raises:
        UserError: there is neither, or a file is damaged.
    """
    places = {}
    for path in weight_files(folder):
        places.update(_read_header(path))

    def read(name):
        place = places[name]
        with place.path.open("rb") as file:
            file.seek(place.start)
            value = np.frombuffer(file.read(place.size), _TYPES[place.kind])
        if place.kind == "BF16":
            value = (value.astype("<u4") << 16).view("<f4")
        return value.reshape(place.shape)

    shapes = {name: place.shape for name, place in places.items()}
    first = {}
    aliases = {name: first.setdefault(place, name) for name, place in places.items()}
    return TensorFile(str(folder), shapes, read, aliases)


@dataclasses.dataclass(frozen=True)
class _Place:
    path: epath.Path
    start: int
    size: int
    kind: str
    shape: tuple[int, ...]


def _read_header(path):
    """{name: `_Place`} of a file: 8 bytes of length, a JSON header of offsets, the data.

    Of tensors that share their memory, safetensors may keep one, and the others as {name: name of
    that one} in the header's metadata.
    """
    places = {}
    try:
        with path.open("rb") as file:
            # `stat` of a local path fails where its owner has no name, as in many containers.
            file.seek(0, os.SEEK_END)
            total = file.tell()
            file.seek(0)
            data = 8 + int.from_bytes(file.read(8), "little")
            if data > total:
                raise ValueError("it is cut off")
            header = json.loads(file.read(data - 8))
        aliases = header.pop("__metadata__", {})
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            kind, shape = entry["dtype"], tuple(entry["shape"])
            if not all(type(size) is int and size >= 0 for size in (start, end, *shape)):
                raise ValueError(f"{name} has sizes that are none")
            if kind not in _TYPES:
                raise ValueError(f"{name} has type {kind}")
            size = math.prod(shape) * np.dtype(_TYPES[kind]).itemsize
            if size != end - start or not 0 <= start <= end <= total - data:
                raise ValueError(f"{name} does not fit in it")
            places[name] = _Place(path, data + start, size, kind, shape)
        for name, kept in aliases.items():
            if kept in places:
                places.setdefault(name, places[kept])
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UserError(f"{path} is no safetensors file that can be used: {error}.") from error
    return places
