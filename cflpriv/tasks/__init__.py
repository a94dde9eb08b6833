"""What clients compute: local training, evaluation, signatures. The models are in `engine.models`."""
