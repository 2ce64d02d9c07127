"""The processes that compute: engine and scheduler on rank 0, the same shard code on every rank.

The daemon starts them as `python -m mstar.ranks.worker` and speaks to them in the types of
`mstar.ranks.messages`, the one module here that it imports.
"""
