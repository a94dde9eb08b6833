"""One protection a file, with its client half and its server half side by side."""
