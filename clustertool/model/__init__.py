"""Pure: no I/O, no clock, no environ. Everything that can be decided before a job starts is decided here."""
