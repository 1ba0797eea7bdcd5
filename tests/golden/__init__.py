"""What stands still while everything moves: README.md beside this file."""
