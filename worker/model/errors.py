"""Why a model cannot be loaded. The messages are for the operator who starts a worker: they say what to change.

ModelError
├── ModelNotFound       no such directory, file or cached download
│   └── ModelNotGiven   what the operator names is no place of a model: a wrong setting
├── BrokenModel         the files contradict each other or are cut short
└── UnsupportedModel    well-formed, but of a kind that this worker does not run
"""

from __future__ import annotations


class ModelError(ValueError):
    """Base of the errors of this package. Never raised itself."""


class ModelNotFound(ModelError):
    """There is no model where it was looked for, and it could not be fetched."""


class ModelNotGiven(ModelNotFound):
    """The operator's `--model` is neither a model's directory nor a file of one."""


class BrokenModel(ModelError):
    """A file is damaged, cut short, or does not fit the others."""


class UnsupportedModel(ModelError):
    """The model asks for something that this worker does not have."""
