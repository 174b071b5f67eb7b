"""The commands ``eval`` and ``demo``, and the tables that ``eval`` prints."""
