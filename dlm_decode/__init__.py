"""dlm-decode: one home for decoding masked-diffusion vision-language models.

```python
import dlm_decode

vlm = dlm_decode.load("tiny")
out = vlm.generate("What colour is the large triangle?", images=["dlm_decode/data/demo/shapes.png"])
print(out.text, out.cost.summary())
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlm_decode import cache, models, quota, samplers, stages
    from dlm_decode.autoregressive import AutoregressiveVlm
    from dlm_decode.base_vlm import Output
    from dlm_decode.loading import load, shipped_models
    from dlm_decode.vlm import DiffusionVlm

__all__ = [
    "AutoregressiveVlm",
    "DiffusionVlm",
    "Output",
    "cache",
    "load",
    "models",
    "quota",
    "samplers",
    "shipped_models",
    "stages",
]

_LOCATIONS = {
    "AutoregressiveVlm": "dlm_decode.autoregressive",
    "DiffusionVlm": "dlm_decode.vlm",
    "Output": "dlm_decode.base_vlm",
    "load": "dlm_decode.loading",
    "shipped_models": "dlm_decode.loading",
}


def __getattr__(name: str) -> Any:
    """Imports the heavy parts on first use, so that the command line answers `--help` at once."""
    if name in _LOCATIONS:
        return getattr(import_module(_LOCATIONS[name]), name)
    if name in __all__:
        return import_module(f"dlm_decode.{name}")
    raise AttributeError(f"module 'dlm_decode' has no attribute {name!r}")
