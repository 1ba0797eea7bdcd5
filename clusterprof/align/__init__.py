"""Ranks against each other: calls matched, clocks aligned, collectives placed."""
