"""A torch that programs of tests train by, where they have FOLDER on PYTHONPATH."""

from pathlib import Path

FOLDER = Path(__file__).parent
