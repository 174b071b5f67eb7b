"""One save: capture its leaves, encode them, write a segment, and describe it in a manifest."""
