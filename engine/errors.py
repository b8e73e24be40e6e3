"""The one error for model files that we cannot or will not load.

It owns no text: whoever finds the fault writes one line that names the file and the field or
tensor. Nothing here may import torch.
"""

from __future__ import annotations


class ModelFileError(ValueError):
    """A model file is missing, corrupt, truncated or unknown; str() is one line for a person."""
