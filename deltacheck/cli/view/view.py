"""The ``view`` command: a page about a root in the browser."""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from deltacheck.cli import output
from deltacheck.cli.arguments import Item, Json, RootOnly, parse


def view(
    words: RootOnly = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="The port. Default: any free one.")
    ] = 0,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Serve a page about a root on this machine until Ctrl-C; nothing is written."""
    from deltacheck.cli.view.queries import Queries
    from deltacheck.cli.view.server import LOOPBACK, ViewServer

    queries = Queries(parse(words).root, item)
    try:
        server = ViewServer(queries, port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise OSError(
            error.errno,
            "the port cannot be used; name another with --port, or leave it out",
            f"{LOOPBACK}:{port}",
        ) from error
    with server:
        output.print_result(
            {"root": queries.path, "url": server.url},
            f"{queries.path} is shown at {server.url}",
            "Ctrl-C ends the server.",
        )
        # Whoever waits for the address reads a pipe.
        sys.stdout.flush()
        server.serve_forever()
