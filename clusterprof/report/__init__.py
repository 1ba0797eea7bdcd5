"""Renderers of the results: text for a terminal, results.json and one HTML page.

A renderer takes `Results` (and, for the timeline, the placed collectives) and gives
text. None of them reaches a conclusion of its own: the analysis has.
"""
