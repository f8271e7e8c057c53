"""The paper's figures and tables, simulated: one module each, every number beside the paper's own."""
