"""The claims, one a file: statement, source, assumptions, arms, and the experiment of one seed."""
