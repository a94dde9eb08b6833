"""One run: its rounds, run folder, checkpoints and resumption, deployment, export and verification."""
