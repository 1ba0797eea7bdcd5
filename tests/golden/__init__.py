"""What is to stay the same while everything moves: README.md beside this file."""
