"""Models of the protocols, their broken variants (`python -m tests.proof`, `make proof`), and recorded runs of them.

`python -m tests.proof.traces` records storms of the oracle and replays them in the models.
"""
