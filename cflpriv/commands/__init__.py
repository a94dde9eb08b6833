"""The commands of the command line, a file for each group. `cli` registers them and turns errors into one line."""
