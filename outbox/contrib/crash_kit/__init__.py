"""The crash kit: runs a scenario once for each of its steps, with a process that is killed there.

Each run is a fork of pytest, so it has the scenario, settings and patches of the test. After a kill, the kit ends
leases and changes due times instead of waiting. The runs execute plain statements of Django, so that an execute wrapper
sees each of them; what outbox sends together has tests of its own.
"""
