"""Names of the vision stages, as `dlm_decode.stages.names()`.

The stages live in `dlm_decode.vision`.
"""

from dlm_decode.vision import Stage, attach, get, make, names, register_stage

__all__ = ["Stage", "attach", "get", "make", "names", "register_stage"]
