"""The edge of a request (DESIGN 7): who holds a reply's state for its client. A library; agents and the gateway use it."""
