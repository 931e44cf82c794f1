"""What one given way to train a transformer costs: `step.predict`."""
