"""What a root holds, drawn: bytes, changes, drift, contracts and the cost of a restore, as one page
and as images.
"""
