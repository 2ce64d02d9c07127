"""The control process: typed protocol, sockets, request registry, text, and the supervisor of the ranks.

It never imports torch. Its public sides are `mstar.daemon.client` (Python clients), `mstar.daemon.protocol`
(every message) and the commands `mstar-daemon` (`cli`) and `mstar` (`client_cli`).
"""
