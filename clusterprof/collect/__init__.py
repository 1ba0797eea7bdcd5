"""Fetching the reports of all profiled ranks, and the reasons of those that are missing."""
