"""How many variants the tests of hostile input try: two hundred of each kind, and fifty in `make check`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("thorough", max_examples=200)
settings.register_profile("brief", max_examples=50)
settings.load_profile("thorough")
