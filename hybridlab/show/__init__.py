"""Reports made visible: text for the terminal. Everything here reads `hybridlab.report`'s data types and nothing else."""
