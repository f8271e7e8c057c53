"""The one command, `pearl`."""
