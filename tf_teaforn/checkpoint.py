"""Checkpoints: writing, keeping, choosing, averaging; on any file system that etils.epath knows.

    <model_dir>/checkpoints/<step>/   model.safetensors  optimizer.safetensors  state.json
    <model_dir>/best/                 model.safetensors  state.json
    <model_dir>/averages/<name>/      model.safetensors  state.json    name: average-<n>-<last step>

A folder is written as `<name>.tmp`, flushed to the disk and then renamed; what it replaces is
`<name>.old` until that is done. `state.json` is written last and removed first, so a folder without
it does not count; `update_state` replaces it in one step. It holds the SHA-256 of the files beside
it and of itself: a truncated or altered checkpoint is noticed when it is read.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import safetensors
import safetensors.numpy
from etils import epath

from tf_teaforn.errors import UserError
from tf_teaforn.paths import flush, is_remote, move_folder, write_whole

_FORMAT = 1
_MODEL = "model.safetensors"
_OPTIMIZER = "optimizer.safetensors"
_STATE = "state.json"
_TEMPORARY = ".tmp"
_OLD = ".old"

_STEP_FOLDER = re.compile(r"(0|[1-9][0-9]*)(\.old|\.tmp)?")

_logger = logging.getLogger(__name__)


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing or not what was written."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a `--checkpoint` value stands for.

    Attributes:
        name: "best", "<step>" or "average-<n>-<last step>".
        folders: the folders to read; several are to be averaged.
        steps: the training step of each folder.
    """

    name: str
    folders: tuple[epath.Path, ...]
    steps: tuple[int, ...]


class Variable(Protocol):
    """What `assign` needs of a variable; Keras variables have it."""

    shape: Any

    def assign(self, value: np.ndarray) -> Any: ...


def save(
    model_dir: epath.PathLike,
    step: int,
    weights: Mapping[str, np.ndarray],
    optimizer: Mapping[str, np.ndarray],
    state: Mapping[str, Any],
    keep: int,
    delete: Collection[int] = (),
) -> epath.Path:
    """Writes a checkpoint, then deletes the oldest beyond `keep`, never the one just written.

    Args:
        model_dir: local or remote folder; made if missing.
        step: training step, the folder's name. A checkpoint of the same step is replaced.
        weights, optimizer: arrays of any shape by name; booleans, integers or IEEE floats.
        state: whatever else is needed to go on, as JSON.
        keep: how many checkpoints to leave, at least 1.
        delete: steps of other checkpoints that go first, as far as they are there.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: the folder cannot be written (full disk, no permission); earlier checkpoints are
            as they were. One that cannot be deleted is named in a logged warning.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step={step} must be at least 0 and keep={keep} at least 1")
    folder = _checkpoints(model_dir) / str(step)
    tensors = ((_MODEL, weights), (_OPTIMIZER, optimizer))
    files = ((name, _serialize(arrays)) for name, arrays in tensors)
    with _write_errors(folder):
        _clear_leftovers(folder.parent)
        _write_folder(folder, files, {"step": step, "state": dict(state)})
        _delete_others(model_dir, step, keep, delete)
    return folder


def update_state(
    model_dir: epath.PathLike,
    step: int,
    state: Mapping[str, Any],
    keep: int,
    delete: Collection[int] = (),
) -> None:
    """Writes another state into the checkpoint of `step`; weights and optimizer stay as they are.

    Args:
        state, keep, delete: as `save` takes them; it deletes as `save` does.

    Raises:
        UserError: there is no such checkpoint, its state is damaged, or it cannot be written and is
            as it was.
    """
    (folder,) = resolve(model_dir, str(step)).folders
    record = _read_record(folder)
    with _write_errors(folder):
        # Of a process that was killed here.
        for leftover in folder.glob(f"{_STATE}.*"):
            leftover.unlink()
        write_whole(folder / _STATE, _sealed({**record, "state": _plain(dict(state))}))
        _delete_others(model_dir, step, keep, delete)


def _delete_others(model_dir, step, keep, delete):
    others = [other for other in steps(model_dir) if other != step]
    kept = [other for other in others if other not in delete]
    oldest = kept[: max(0, len(kept) + 1 - keep)]
    discard(model_dir, {*others} - {*kept} | {*oldest})


def discard(model_dir: epath.PathLike, unwanted: Iterable[int]) -> None:
    """Deletes the checkpoints of some steps; one that cannot be deleted is a logged warning."""
    for step in sorted(unwanted):
        _discard(_find(_checkpoints(model_dir) / str(step)))


def steps(model_dir: epath.PathLike) -> list[int]:
    """Steps of the checkpoints in `model_dir`, ascending; temporary and incomplete ones ignored.

    Raises:
        UserError, or what TensorFlow raises of an object store: what is there cannot be told (no
            permission, a network or a disk that fails).
    """
    checkpoints = _checkpoints(model_dir)
    names = (_STEP_FOLDER.fullmatch(path.name) for path in _listed(checkpoints))
    found = {int(name[1]) for name in names if name}
    return sorted(step for step in found if _find(checkpoints / str(step)))


def resolve(model_dir: epath.PathLike, spec: str) -> Checkpoint:
    """Finds the checkpoint that `spec` stands for.

    Args:
        spec: best, latest, <step>, average:<n>, or the name of what `write_average` wrote.

    Raises:
        UserError: there is no such checkpoint, or not enough to average; names those that exist.
    """
    spec = str(spec)
    model_dir = epath.Path(model_dir)
    if not model_dir.is_dir():
        raise UserError(f"there is no model directory {model_dir}: check --model_dir")
    if spec == "best":
        folder = _find(model_dir / "best")
        if folder is None:
            raise UserError(
                f"{model_dir} has no best checkpoint; steps saved: {listing(model_dir)}. "
                "Name one with --checkpoint"
            )
        return Checkpoint("best", (folder,), (_read_record(folder)["step"],))
    if re.fullmatch(r"average-[1-9][0-9]{0,8}-[0-9]{1,18}", spec):
        folder = _find(_averages(model_dir) / spec)
        if folder is None:
            raise UserError(
                f"--checkpoint={spec}: {model_dir} does not have it; steps saved: "
                f"{listing(model_dir)}. bin/average writes it"
            )
        return Checkpoint(spec, (folder,), tuple(_read_record(folder)["averaged"]))

    available = steps(model_dir)
    if spec == "latest":
        count, chosen = 1, available[-1:]
    elif re.fullmatch(r"[0-9]{1,18}", spec):
        count, chosen = 1, [step for step in available if step == int(spec)]
    elif average := re.fullmatch(r"average:([1-9][0-9]{0,8})", spec):
        count = int(average[1])
        chosen = available[-count:]
    else:
        raise UserError(
            f"--checkpoint={spec} is not best, latest, average:<n> or a step; "
            f"steps saved: {listing(model_dir)}"
        )
    if len(chosen) < count:
        raise UserError(
            f"--checkpoint={spec}: {model_dir} does not have "
            f"{'it' if count == 1 else f'{count} checkpoints'}; steps saved: {listing(model_dir)}"
        )
    name = f"average-{count}-{chosen[-1]}" if spec.startswith("average") else str(chosen[0])
    folders = tuple(_find(_checkpoints(model_dir) / str(step)) for step in chosen)
    if None in folders:
        # A run that goes on has deleted one since they were listed.
        return resolve(model_dir, spec)
    return Checkpoint(name, folders, tuple(chosen))


def listing(model_dir: epath.PathLike) -> str:
    """The steps of the checkpoints in `model_dir`, for messages."""
    return ", ".join(map(str, steps(model_dir))) or "none"


def load_weights(
    model_dir: epath.PathLike, spec: str
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads the weights of the checkpoint that `spec` stands for (see `resolve`).

    `average:<n>` is the mean of the last n checkpoints, summed in float64 and returned in the
    weights' own type; tensors that are not floating point are the last checkpoint's. Checkpoints
    that hold the same weights or were trained with different settings are refused; those that are
    not evenly apart are averaged with a logged warning.

    Returns:
        Arrays by name, and the state that `save` was given, with "checkpoint" (its name), "step"
        (of the last checkpoint), "steps" (of every checkpoint averaged) and, for best, "metrics".

    Raises:
        UserError: there is no such checkpoint, it is damaged, or the averaged ones do not match.
    """
    checkpoint, weights, record = _load(model_dir, spec)
    state = record["state"] | {
        "checkpoint": checkpoint.name,
        "step": record["step"],
        "steps": list(checkpoint.steps),
    }
    if "metrics" in record:
        state["metrics"] = record["metrics"]
    return weights, state


def _load(model_dir, spec):
    """(`Checkpoint`, weights, state.json of the last one)."""
    failed: Any = ()
    while True:
        checkpoint = None
        try:
            checkpoint = resolve(model_dir, spec)
            records = [_read_record(folder) for folder in checkpoint.folders]
            weights = _mean_weights(checkpoint.folders, records)
        except DamagedCheckpointError:
            # A run that goes on may have deleted or replaced what is being read, by another of the
            # same step too.
            if failed == checkpoint:
                raise
            failed = checkpoint
        else:
            record = records[-1]
            if checkpoint.name == "best":
                checkpoint = dataclasses.replace(checkpoint, steps=(record["step"],))
            _warn_of_uneven_steps(checkpoint)
            return checkpoint, weights, record


def _warn_of_uneven_steps(checkpoint):
    gaps = {after - before for before, after in itertools.pairwise(checkpoint.steps)}
    if len(gaps) > 1:
        _logger.warning(
            "Warning: %s is the mean of steps %s, which are not evenly apart: validations and the "
            "last step save checkpoints too. Train with --eval_every and --train_steps that are "
            "multiples of --checkpoint_every.",
            checkpoint.name,
            ", ".join(map(str, checkpoint.steps)),
        )


def load_training(
    model_dir: epath.PathLike,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]] | None:
    """Reads the newest good checkpoint to go on training from.

    A damaged checkpoint is named in a logged warning and the next newest one is tried.

    Returns:
        Weights, optimizer, and state with "step"; None if there is no checkpoint yet.

    Raises:
        UserError: there are checkpoints, and all of them are damaged; or one is there and cannot be
            read (no permission, a network or a disk that fails).
    """
    available = steps(model_dir)
    for step in reversed(available):
        folder = _find(_checkpoints(model_dir) / str(step))
        try:
            record = _read_record(folder)
            weights = _read_tensors(folder, record, _MODEL)
            optimizer = _read_tensors(folder, record, _OPTIMIZER)
        except DamagedCheckpointError as error:
            _logger.warning("Skipping checkpoint %d: %s", step, error)
            continue
        return weights, optimizer, record["state"] | {"step": record["step"]}
    if available:
        raise UserError(
            f"every checkpoint in {_checkpoints(model_dir)} is damaged "
            f"({', '.join(map(str, available))}): restore one, or delete all to start again"
        )
    return None


def latest_state(model_dir: epath.PathLike) -> dict[str, Any] | None:
    """State of the newest checkpoint with its "step"; None if there is none or it is damaged.

    Raises:
        UserError: as `steps`.
    """
    available = steps(model_dir)
    record = _whole_record(_checkpoints(model_dir) / str(available[-1])) if available else None
    return record and record["state"] | {"step": record["step"]}


def interrupted(model_dir: epath.PathLike) -> list[int]:
    """Steps of the checkpoints whose state says "interrupted"."""
    records = (
        (step, _whole_record(_checkpoints(model_dir) / str(step))) for step in steps(model_dir)
    )
    return [step for step, record in records if record and record["state"].get("interrupted")]


def is_best(model_dir: epath.PathLike, step: int) -> bool:
    """Whether `<model_dir>/best` has the weights of the checkpoint of `step`, which is there."""
    best = _whole_record(epath.Path(model_dir) / "best")
    if best is None or best["step"] != step:
        return False
    source = _whole_record(_checkpoints(model_dir) / str(step))
    # Of a damaged one, the copy is what there is.
    return source is None or best["files"][_MODEL] == source["files"][_MODEL]


def promote_best(model_dir: epath.PathLike, step: int, metrics: Mapping[str, float]) -> epath.Path:
    """Copies the checkpoint of `step`, without its optimizer, to `<model_dir>/best`.

    Args:
        metrics: what it reached, kept in the copy's state.json.

    Returns:
        The folder. If this is interrupted, `resolve` finds the previous best one or the new one.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or best cannot be written.
    """
    (source,) = resolve(model_dir, str(step)).folders
    record = _read_record(source)
    model = _read_checked(source, record, _MODEL)
    best = epath.Path(model_dir) / "best"
    details = {"step": record["step"], "state": record["state"], "metrics": dict(metrics)}
    with _write_errors(best):
        _write_folder(best, [(_MODEL, model)], details)
    return best


def write_average(model_dir: epath.PathLike, count: int) -> Checkpoint:
    """Writes the mean weights of the last `count` checkpoints to `<model_dir>/averages/<name>`.

    Returns:
        What was written, to be asked for by its name.

    Raises:
        UserError: there are fewer checkpoints; as `load_weights`; the folder cannot be written.
    """
    if count > len(steps(model_dir)) and epath.Path(model_dir).is_dir():
        raise UserError(
            f"--last={count}: {model_dir} does not have so many checkpoints; steps saved: "
            f"{listing(model_dir)}. Take fewer, or train on"
        )
    checkpoint, weights, record = _load(model_dir, f"average:{count}")
    folder = _averages(model_dir) / checkpoint.name
    details = {
        "step": checkpoint.steps[-1],
        "averaged": checkpoint.steps,
        "state": record["state"],
    }
    with _write_errors(folder):
        _write_folder(folder, [(_MODEL, _serialize(weights))], details)
    return resolve(model_dir, checkpoint.name)


def assign(variables: Mapping[str, Variable], weights: Mapping[str, np.ndarray]) -> None:
    """Sets every variable from the tensor of its name; changes nothing if any does not fit.

    Raises:
        UserError: tensors are missing, unknown or of another shape; names the first five.
    """
    problems = [f"{name} is missing" for name in variables if name not in weights]
    problems += [f"{name} is not in the model" for name in weights if name not in variables]
    for name, variable in variables.items():
        expected = tuple(variable.shape)
        if name in weights and np.shape(weights[name]) != expected:
            found = np.shape(weights[name])
            problems.append(f"{name} has shape {found}, the model's is {expected}")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"the checkpoint does not fit the model: {'; '.join(problems[:5])}{more}")
    for name, variable in variables.items():
        variable.assign(weights[name])


def _mean_weights(
    folders: Sequence[epath.Path], records: Sequence[Mapping[str, Any]]
) -> dict[str, np.ndarray]:
    last = _read_tensors(folders[-1], records[-1], _MODEL)
    if len(folders) == 1:
        return last
    _check_distinct(folders, records)
    floating = [name for name, value in last.items() if value.dtype.kind == "f"]
    sums = {name: last[name].astype(np.float64) for name in floating}
    for folder, record in zip(folders[:-1], records[:-1], strict=True):
        weights = _read_tensors(folder, record, _MODEL)
        if _layout(weights) != _layout(last):
            raise UserError(f"{folder} and {folders[-1]} are of different models: cannot average")
        for name in floating:
            sums[name] += weights[name]
    means = {name: np.asarray(sums[name] / len(folders), last[name].dtype) for name in floating}
    return last | means


def _check_distinct(folders: Sequence[epath.Path], records: Sequence[Mapping[str, Any]]) -> None:
    """Refuses copies of one checkpoint, and checkpoints of runs with different settings."""
    seen: dict[str, epath.Path] = {}
    for folder, record in zip(folders, records, strict=True):
        twin = seen.setdefault(record["files"][_MODEL], folder)
        if twin != folder:
            raise UserError(f"{twin} and {folder} hold the same weights: cannot average")
        if record["state"].get("settings") != records[-1]["state"].get("settings"):
            raise UserError(
                f"{folder} and {folders[-1]} were trained with different settings: cannot average"
            )


def _layout(weights: Mapping[str, np.ndarray]) -> dict[str, tuple]:
    return {name: (value.shape, value.dtype) for name, value in weights.items()}


def _checkpoints(model_dir: epath.PathLike) -> epath.Path:
    return epath.Path(model_dir) / "checkpoints"


def _averages(model_dir: epath.PathLike) -> epath.Path:
    return epath.Path(model_dir) / "averages"


def _sibling(folder: epath.Path, suffix: str) -> epath.Path:
    return folder.parent / (folder.name + suffix)


def _find(folder: epath.Path) -> epath.Path | None:
    """The complete folder of this name: while it is being replaced, that is the old one."""
    for candidate in (folder, _sibling(folder, _OLD)):
        if _exists(candidate / _STATE):
            return candidate
    return None


def _exists(path: epath.Path) -> bool:
    """Whether there is a file; what fails to tell is no "no".

    Raises:
        UserError, or what TensorFlow raises of an object store: it cannot be told.
    """
    if is_remote(path):
        return path.exists()
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def _listed(folder: epath.Path) -> list[epath.Path]:
    """What is in a folder, nothing if it is not there; raises as `_exists`."""
    if not _exists(folder):
        return []
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(path: epath.Path, error: OSError) -> UserError:
    # It may be whole: to go on from an older one would throw away what was trained since.
    return UserError(
        f"{path} cannot be read ({error.strerror or error}): try again, give access to it, or move "
        "it away"
    )


def _serialize(arrays: Mapping[str, np.ndarray]) -> bytes:
    # safetensors reads an array's memory as if it were laid out in C order.
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    for name, array in dense.items():
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name} has type {array.dtype}, not a boolean, integer or IEEE float")
    return safetensors.numpy.save(dense)


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _plain(value: Any) -> Any:
    """What JSON makes of it (string keys, lists), which is what will be read and checked."""
    return json.loads(json.dumps(value))


def _sealed(record: Mapping[str, Any]) -> bytes:
    """Content of state.json: the record and its SHA-256."""
    digest = hashlib.sha256(_canonical(record)).hexdigest()
    return json.dumps({**record, "sha256": digest}, indent=1).encode()


def _write_folder(
    folder: epath.Path, files: Iterable[tuple[str, bytes]], details: Mapping[str, Any]
) -> None:
    """Writes `files` and a state.json with `details` aside, then puts them in place of `folder`."""
    record = _plain({**details, "format": _FORMAT, "files": {}})
    temporary = _sibling(folder, _TEMPORARY)
    try:
        _remove(temporary)
        temporary.mkdir(parents=True, exist_ok=True)
        for name, data in files:
            _write_file(temporary / name, data)
            record["files"][name] = hashlib.sha256(data).hexdigest()
        _write_file(temporary / _STATE, _sealed(record))
        flush(temporary)
        _put_in_place(temporary, folder)
    except OSError:
        with contextlib.suppress(OSError):
            _remove(temporary)
        raise


@contextlib.contextmanager
def _write_errors(folder: epath.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write the checkpoint {folder} ({error.strerror or error}); "
            "earlier checkpoints are untouched"
        ) from error


def _write_file(path: epath.Path, data: bytes) -> None:
    path.write_bytes(data)
    flush(path)


def _put_in_place(temporary: epath.Path, folder: epath.Path) -> None:
    """Replaces `folder`; whenever it is interrupted, `_find(folder)` is the old or the new one."""
    old = _sibling(folder, _OLD)
    if _exists(folder / _STATE):
        _remove(old)
        move_folder(folder, old, _STATE, keep_source=True)
    _remove(folder)
    move_folder(temporary, folder, _STATE)
    _discard(old)


def _remove(folder: epath.Path) -> None:
    if not is_remote(folder) and os.path.islink(folder):
        # What a user has moved elsewhere stays there.
        os.unlink(folder)
        return
    (folder / _STATE).unlink(missing_ok=True)
    folder.rmtree(missing_ok=True)


def _discard(folder: epath.Path) -> None:
    """Removes what is needed no more; if that fails, what was written meanwhile is as good."""
    try:
        _remove(folder)
    # Those of object stores are TensorFlow's and no OSError.
    except Exception as error:
        reason = getattr(error, "strerror", None) or error
        _logger.warning("%s cannot be deleted (%s)", folder, reason)


def _clear_leftovers(checkpoints: epath.Path) -> None:
    """Removes what interrupted saves and deletions have left."""
    for path in _listed(checkpoints):
        name = _STEP_FOLDER.fullmatch(path.name)
        if name and path != _find(checkpoints / name[1]):
            _discard(path)


def _read(path: epath.Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedCheckpointError(
            f"{path} cannot be read ({error.strerror or error})"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_record(folder: epath.Path) -> dict[str, Any]:
    """Reads and checks state.json."""
    path = folder / _STATE
    try:
        record = json.loads(_read(path))
        sound = record.pop("sha256") == hashlib.sha256(_canonical(record)).hexdigest()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise DamagedCheckpointError(f"{path} is damaged: it does not match its own checksum")
    if record.get("format") != _FORMAT:
        raise UserError(
            f"{path} has format {record.get('format')}, this version reads {_FORMAT}: "
            "use the version of tf_teaforn that wrote it"
        )
    types = {"step": int, "state": dict, "files": dict}
    if not all(isinstance(record.get(key), kind) for key, kind in types.items()):
        raise DamagedCheckpointError(f"{path} is not a checkpoint's: {', '.join(types)} expected")
    foreign = sorted(set(record["files"]) - {_MODEL, _OPTIMIZER})
    if foreign:
        raise DamagedCheckpointError(f"{path} lists files that no checkpoint has: {foreign[:5]}")
    return record


def _whole_record(folder: epath.Path) -> dict[str, Any] | None:
    """state.json of a checkpoint's folder; None if that is not there or damaged."""
    found = _find(folder)
    try:
        return _read_record(found) if found else None
    except DamagedCheckpointError:
        return None


def _read_checked(folder: epath.Path, record: Mapping[str, Any], name: str) -> bytes:
    data = _read(folder / name)
    if hashlib.sha256(data).hexdigest() != record["files"].get(name):
        raise DamagedCheckpointError(
            f"{folder / name} is damaged: it does not match the checksum in {_STATE}"
        )
    return data


def _read_tensors(
    folder: epath.Path, record: Mapping[str, Any], name: str
) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load(_read_checked(folder, record, name))
    except (safetensors.SafetensorError, KeyError) as error:
        raise DamagedCheckpointError(
            f"{folder / name} cannot be used as a safetensors file ({error})"
        ) from error
