"""Reports of the content of a root, as figures, tables and one page.

The values of leaves are not read: everything comes from manifests, tables, indexes and file sizes.
"""
