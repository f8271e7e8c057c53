"""The engine `sglang`: drives an SGLang server through its HTTP API (tested with 0.5.23)."""
