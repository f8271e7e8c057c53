"""Taps for people: the live view, status, reports, the decision log. Publishes nothing."""
