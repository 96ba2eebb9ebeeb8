"""The status page: one HTML file that shows this node, live.

In: requests for `/` and `/status.json` at the address of the metrics, from this machine. Out: the page, and the status that
any user may see, as JSON. It owns the page and its headers; it reads, and changes nothing.
"""
