"""The processes beside a rank: the guard over nsys and the writer of its files."""
