"""The command line: one module per verb, each loading what it needs when it runs."""
