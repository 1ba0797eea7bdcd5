"""Readers of the results: text for a terminal, results.json and one HTML page.

A renderer takes `Results` (and, for the timeline, the placed collectives) and gives
text. None of them computes a verdict: what is said here was decided by the analysis.
"""
