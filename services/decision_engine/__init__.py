"""The decision engine: execution mode, prefill-decode counts and borrowing for a budget (paper 4.2, 4.3, 4.6)."""
