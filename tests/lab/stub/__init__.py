"""A torch that programs of tests train by, where they have FOLDER on PYTHONPATH."""

from pathlib import Path

FOLDER = Path(__file__).parent
#: a training that ends by itself, the rank that it is of, and how its window is captured
PROGRAM = """
import torch
optimizer = torch.optim.SGD()
for step in range(25):
    optimizer.step()
print("trained")
"""
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONPATH": str(FOLDER)}
OPTIONS = ["--ranks=0", "--steps=5:15", "--run-dir=run", "--no-merge"]
