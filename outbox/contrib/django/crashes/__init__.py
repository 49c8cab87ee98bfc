"""The crash kit: runs a scenario once for each of its steps, with a process that is killed there.

See decision 205, and decision 216 for how well it finds faults.
"""
