"""What is built on the paper's scripts: run as `python -m experiments.NAME` from the root."""
