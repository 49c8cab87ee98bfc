"""What Django keeps of the reconciliation: saved findings, a condition, and repairs of findings.

    INSTALLED_APPS = [..., "outbox.contrib.django", "outbox.contrib.reconciliation"]

`manage.py outbox_reconcile` runs the reconciliation itself, which is the package `spark`. A repair verifies each step
again and audits it. Running a step twice has the same effect as running it once. docs/reconciliation/findings.md is the
page of the findings. Repairs publish typed messages again with the headers of the part `events`.
"""
