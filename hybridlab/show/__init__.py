"""Reports made visible: text for the terminal. All of it reads the data types of `hybridlab.report`, nothing else."""
