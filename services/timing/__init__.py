"""How long a serving engine takes for what it is asked: a pure model on a clock that its caller keeps (paper 3.2, 4.3)."""
