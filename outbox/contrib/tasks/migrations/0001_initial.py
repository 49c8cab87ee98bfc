import outbox.utils.ids
from django.db import migrations, models

from outbox.contrib.django.database.columns import compare_as_postgresql


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='TaskEntry',
            fields=[
                ('id', models.UUIDField(default=outbox.utils.ids.uuid7, editable=False, primary_key=True, serialize=False)),
                ('backend', models.CharField(max_length=127)),
                ('queue_name', models.CharField(max_length=127)),
                ('task_path', models.TextField()),
                ('args', models.JSONField()),
                ('kwargs', models.JSONField()),
                ('status', models.CharField(choices=[('READY', 'ready'), ('RUNNING', 'running'), ('FAILED', 'failed'), ('SUCCESSFUL', 'successful')], default='READY', max_length=15)),
                ('attempts', models.PositiveIntegerField(default=0)),
                ('run_after', models.DateTimeField(null=True)),
                ('enqueued_at', models.DateTimeField()),
                ('started_at', models.DateTimeField(null=True)),
                ('last_attempted_at', models.DateTimeField(null=True)),
                ('finished_at', models.DateTimeField(null=True)),
                ('worker_ids', models.JSONField(default=list)),
                ('errors', models.JSONField(default=list)),
                ('return_value', models.JSONField(null=True)),
                ('message_id', models.UUIDField(editable=False)),
                ('announced_at', models.DateTimeField(editable=False)),
            ],
            options={
                'verbose_name': 'task',
                'db_table': 'outbox_task',
                'indexes': [models.Index(fields=['finished_at'], name='outbox_task_finished_at'), models.Index(fields=['status', 'announced_at'], name='outbox_task_announced_at')],
            },
        ),
        # MariaDB ends a transaction at each of these statements, and Django refuses them in one.
        migrations.RunPython(compare_as_postgresql('outbox_tasks'), migrations.RunPython.noop, atomic=False),
    ]
