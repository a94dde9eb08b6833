"""Whether clusters help these clients: local models, one model and cluster models, scored on what clients keep back from training."""
