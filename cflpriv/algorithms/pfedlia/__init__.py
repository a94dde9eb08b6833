"""pFedLIA: influence scores, groups and neighbourhoods, and the rounds."""
