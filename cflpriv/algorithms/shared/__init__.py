"""What several algorithms use: steps of a round, groupings by a test, private choices, counted sums, checks of settings."""
