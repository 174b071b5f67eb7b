"""The command ``view``: a page about a root, which a server on loopback serves.

``queries.py`` answers the page's requests with the documents of the other commands, ``server.py``
decides which requests are answered, and ``page/`` has the files of the page.
"""
