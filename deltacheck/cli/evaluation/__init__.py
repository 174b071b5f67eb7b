"""The command ``eval``, and the tables that it prints."""
