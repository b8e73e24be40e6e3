"""The errors for files and grammars that will not do, and how the faults of a request begin.

Of model files it owns no text: whoever finds the fault writes one line that names the file and the
field or tensor. Nothing here may import torch.
"""

from __future__ import annotations


class ModelFileError(ValueError):
    """A model file is missing, corrupt, truncated or unknown; str() is one line for a person."""


class GrammarError(ValueError):
    """A specification that can not be compiled, or a token outside the grammar."""


# How the message of a row begins that ends because of what its request asked for.
CONSTRAINT = "what was asked for cannot be kept: "
NOTHING_LEFT = CONSTRAINT + "its fields together leave no token that may come"
