"""What each rank did when: timelines, steps, accounts, the critical path."""
