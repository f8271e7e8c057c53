"""Readable transcripts of what the paper's section 4 narrates, on the whole simulated cluster."""
