"""PEARL's services, one folder each; see DESIGN in docs/architecture.md for who drives whom."""
