"""What clients compute: local training, evaluation, signatures; and the models."""
