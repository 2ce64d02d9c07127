"""Programs around mstar: the demo, the serving benchmark, and makers of what they need.

They use the other packages through their public interfaces, and nothing imports them.
"""
