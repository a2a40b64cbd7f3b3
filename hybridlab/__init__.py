"""hybridlab: how large models are really trained, to predict, run and compare.

Imports nothing heavy: `import hybridlab.plan` must stay free of torch.
"""

__version__ = "0.1.0"
