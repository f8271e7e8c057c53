"""The orchestrator (paper 4.4): the role table's only writer, and the planner."""
