"""What launchers share: the job that each makes, and reading the words of another program."""
