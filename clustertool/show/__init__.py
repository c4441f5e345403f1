"""EDGE. What a person sees: rich on a terminal, plain stable lines otherwise."""
