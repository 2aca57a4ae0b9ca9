"""Models that compile fast, for tests of whole runs.

bin/train --module_import=tests.nano_model --model=transformer_nano …
"""

from tf_teaforn.models import catalog

_, _, _SIZES = catalog._MODELS["transformer_tiny"]
catalog._MODELS["transformer_nano"] = (
    *catalog._MODELS["transformer_tiny"][:2],
    {**_SIZES, "num_layers": 1, "hidden_dim": 16, "intermediate_dim": 32, "num_heads": 2},
)
# As wide as a TPU's arrays are without padding.
catalog._MODELS["transformer_thin"] = (
    *catalog._MODELS["transformer_tiny"][:2],
    {**_SIZES, "num_layers": 1},
)
FLAGS = ("--module_import=tests.nano_model", "--model=transformer_nano")
