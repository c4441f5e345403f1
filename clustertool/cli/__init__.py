"""This package has the command line of `clustertool`: parser, help and completion are made from one table of commands."""
