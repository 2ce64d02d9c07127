"""Lossless speculation: drafts of the MTP head, checked by the trunk, accepted by one rule.

`route` and `policy` decide who speculates and how far, `backend` runs the trunk on one rank or a mesh, `accept`
draws, `draft` drafts, `stats` counts.
"""
