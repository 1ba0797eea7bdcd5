"""What the processes of a run agree on: files, states, identities. Standard library only."""
