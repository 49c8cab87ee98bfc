"""The models of the tables in the application's database that hold the last saved results of the reconciliation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from django.db import models

from outbox.contrib.django.models import StorableTextField


class Finding(models.Model):
    """A finding of the last reconciliation run.

    `output` is the folder of the results. `manage.py outbox_reconcile --save` replaces all findings with the same
    `output`.
    """

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[Finding]]

    output = models.TextField()
    run = models.CharField(max_length=63)
    rule = models.CharField(max_length=255)
    group = models.CharField(max_length=127, blank=True, db_column="consumer_group")
    finding_class = models.CharField("class", max_length=15, db_column="class")
    severity = models.CharField(max_length=15)
    key = models.TextField()
    detail = StorableTextField(blank=True)
    at = models.DateTimeField(null=True)
    first_seen = models.DateTimeField(null=True)
    message_id = models.CharField(max_length=63, blank=True)
    transaction_id = models.CharField(max_length=63, blank=True)
    row = StorableTextField(blank=True)
    body = StorableTextField(blank=True)
    # The step of the repair plan for this finding: a line of `outbox-reconcile plan`.
    step = models.JSONField(null=True)

    class Meta:
        app_label = "outbox_reconciliation"
        db_table = "outbox_finding"
        verbose_name = "reconciliation finding"

    def __str__(self) -> str:
        return f"{self.finding_class} {self.key}"


class SavedReconciliation(models.Model):
    """The last result of a reconciliation that `manage.py outbox_reconcile --save` has saved, one row per `output`.

    `causes` has the open causes of findings, the most urgent first: subject, severity, findings, new and oldest. `plan`
    has the first line of the repair plan, and `databases`: the alias of each database of the rules.
    """

    if TYPE_CHECKING:
        objects: ClassVar[models.Manager[SavedReconciliation]]

    output = models.TextField(unique=True)
    run = models.CharField(max_length=63)
    judged_at = models.DateTimeField()
    causes = models.JSONField()
    plan = models.JSONField()

    class Meta:
        app_label = "outbox_reconciliation"
        db_table = "outbox_reconciliation"

    def __str__(self) -> str:
        return f"{self.output} {self.run}"
