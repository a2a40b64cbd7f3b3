"""The planner: what a training job will need, by formula, before anything is built.

Standard library only, so that it starts at once and also runs in a browser's Python. Each idea has a file of its name:
`parameters`, `states`, `activations`, `memory`, `traffic`, `flops`, `cluster`, `time`, and on top of them `decide` (the
decision path), `search` (all layouts ranked) and `bottleneck` (judging a given one). Import from those files.
"""
