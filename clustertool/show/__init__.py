"""This package prints what the user sees: rich on a terminal, plain stable lines otherwise."""
