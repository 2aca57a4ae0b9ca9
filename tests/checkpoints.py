"""What checkpoints hold, read without the package."""

import safetensors.numpy


def tensors(model_dir, step):
    """{"model/<name>" or "optimizer/<name>": array} of the checkpoint of a step."""
    folder = model_dir / "checkpoints" / str(step)
    return {
        f"{name}/{key}": value
        for name in ("model", "optimizer")
        for key, value in safetensors.numpy.load(
            (folder / f"{name}.safetensors").read_bytes()
        ).items()
    }
