"""The command line of `clustertool`: its parser, its help and its completion, all made from one table of commands."""
