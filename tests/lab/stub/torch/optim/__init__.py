"""The optimizers."""

from .optimizer import SGD  # noqa: F401
