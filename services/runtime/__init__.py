"""The only generic I/O: bus, core host, clock, lifecycle, log. No domain words here."""
